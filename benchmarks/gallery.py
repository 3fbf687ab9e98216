"""Every method at equal bytes on the link: three networks, and a tenth, a hundredth and a thousandth of ddp's bytes.

Each method runs as its paper has it (`GALLERY`), except for one knob: how many elements, bits or columns it sends, or
how often. The knob is set by measurement: by dry runs, on batches of 2 at a hundredth of the learning rate, and of 60
steps where a method exchanges in each, until one sends the budget's bytes within 5%; and by runs with the first seed,
if these send a tenth more or less than the dry run did. Nothing else is tuned; learning rates are those of `tasks.py`,
which suit ddp. A method stands at the budget that is nearest to what it sends, and its cell says so where the two
differ.

Biases and norms keep their first values: in networks so small they alone would take up to 1/58 of ddp's bytes, and most
methods send them whole. Warm-ups, which would last longer than the run, are left out.

Ranks are processes, since a simulation in one process would need each method a second time. Each run is written to a
JSON file as it ends; `--resume` skips the runs in that file. Prints a table, and plots the front with `--plot`.
"""

import argparse
import math
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from defaults import BASELINE, DivergedError, known_strategy, run, spread
from runs import COMMIT, load, made_with, save, versions
from runs import spread as spread_of
from tasks import RATES
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from command_line import at_least, folder, quieten

BUDGETS = (10, 100, 1000)
"""How many times fewer bytes than ddp."""

OPTIMIZERS = {"convolution": "sgd", "gpt": "adamw", "lstm": "sgd", "digits": "sgd"}
"""The optimizer of each network."""

NETWORKS = ("convolution", "gpt", "lstm")

CLOSE, TRIES = 1.05, 20
"""How near to a budget is near enough, and how many values of a knob are tried for all budgets together."""

DRY_BATCH, DRY_RATE, DRY_STEPS = 2, 0.01, 60
"""A dry run's batch; the factor on its learning rate, so that it does not diverge; its steps, if all send as much."""

WORST = 5
"""The greatest difference from ddp's loss that the plot shows."""

MISLEADING = 1.1
"""The factor from a dry run's bytes to the run's above which the search goes on with runs."""


class Knob(NamedTuple):
    """What decides how much a method sends.

    Attributes:
        fewest: Its value with the fewest bytes.
        most: Its value with the most.
        values: All its values, if they are few; else whole numbers if `most` is an integer, or numbers of three digits.
    """

    fewest: float
    most: float
    values: tuple[int, ...] = ()

    @property
    def rises(self) -> bool:
        """Whether a larger value sends more."""
        return self.most > self.fewest

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return isinstance(self.most, int)

    def snapped(self, value: float) -> float:
        """The nearest value that can be set."""
        value = min(max(value, min(self.fewest, self.most)), max(self.fewest, self.most))
        if self.values:
            return min(self.values, key=lambda each: abs(math.log(each / value)))
        return round(value) if self.whole else float(f"{value:.3g}")

    def first(self, budget: int) -> float:
        """Where the search begins: with the fraction of elements, or of steps; else in the middle."""
        if self.rises != self.whole:
            return self.snapped(1 / budget if self.rises else budget)
        return self.snapped(math.sqrt(self.fewest * self.most))

    def next(self, budget: int, tried: dict[float, float]) -> float | None:
        """The value to measure next, given how many times fewer bytes each tried one sends; None when found.

        The logarithm of bytes is about a straight line in that of the knob.
        """
        if not tried:
            return self.first(budget)
        off = {value: math.log(budget / fewer) for value, fewer in tried.items()}  # above 0: too many bytes
        near = min(off, key=lambda value: abs(off[value]))
        if abs(off[near]) <= math.log(CLOSE) or len(tried) >= TRIES:
            return None
        others = [value for value in off if value != near and off[value] != off[near]]
        across = [value for value in others if (off[value] > 0) != (off[near] > 0)]
        slope = 1.0 if self.rises else -1.0
        if others:
            other = min(across or others, key=lambda value: abs(off[value]))
            slope = (off[near] - off[other]) / math.log(near / other) or slope
            slope = math.copysign(min(max(abs(slope), 0.2), 3.0), 1 if self.rises else -1)
        guess = self.snapped(near * math.exp(-off[near] / slope))
        if guess in tried and across:
            guess = self.snapped(math.sqrt(near * other))
        return None if guess in tried else guess


class Method(NamedTuple):
    """A row of the gallery.

    Attributes:
        call: The method as its paper has it, with {} for the knob.
        knob: What decides how much it sends; None if nothing does.
        adam: Options that it needs for Adam and AdamW.
        optimizers: What it is defined for.
        optimizer: The one that it moves by on every network; the network's own by default. "plain" is SGD without
            momentum.
        rates: Whose learning rates suit it with SGD: a sign moves every weight as far as Adam does.
    """

    call: str
    knob: Knob | None = None
    adam: str = ""
    optimizers: tuple[str, ...] = ("sgd", "adamw")
    optimizer: str = ""
    rates: str = "sgd"

    def strategy(self, knob: float | None, optimizer: str) -> str:
        """The strategy, as `defaults.py` names it."""
        call = self.call.format(knob)
        if optimizer == "adamw" and self.adam:
            call = f"{call.removesuffix(')')}{'' if call.endswith('()') else ', '}{self.adam})"
        return call


DENSITY, EVERY, RANK, BITS = Knob(1e-6, 1.0), Knob(300, 1), Knob(1, 64), Knob(2, 8, (2, 4, 8))

GALLERY = {
    "sparsecomm": Method("sparsecomm"),
    "dense": Method("dense(wire_dtype='bfloat16')"),
    "gradient_dropping": Method("gradient_dropping(density={}, follow_rate=False)", DENSITY),
    "dgc": Method(
        "dgc(density={}, warmup_steps=0, momentum_masking=True, follow_rate=False)",
        DENSITY,
        adam="momentum_correction=False",
    ),
    "local_adam": Method("local_adam(density={}, warmup_steps=0)", DENSITY, optimizers=("adamw",)),
    "ok_topk": Method("ok_topk(density={}, follow_rate=False)", DENSITY),
    "random_k": Method("random_k(density={}, follow_rate=False)", DENSITY),
    "aligned_topk": Method("aligned_topk(density={}, follow_rate=False)", DENSITY),
    "sketched_sgd": Method(
        "sketched_sgd(density={}, momentum_masking=True, follow_rate=False)", DENSITY, adam="momentum_correction=False"
    ),
    "s2_reducer": Method("s2_reducer(block_density={}, follow_rate=False)", DENSITY),
    "powersgd": Method("powersgd(rank={}, follow_rate=False)", RANK),
    "quantized": Method("quantized(bits={}, follow_rate=False)", BITS),
    "qsgd": Method("qsgd(levels={})", Knob(1, 255)),
    "terngrad": Method("terngrad()"),
    "natural": Method("natural()"),
    "onebit_sgd": Method("onebit_sgd(follow_rate=False)"),
    "ef_signsgd": Method("ef_signsgd()"),
    "signsgd": Method("signsgd()", optimizer="sgd", rates="adamw"),
    "strom": Method("strom(threshold={}, once=True, follow_rate=False)", Knob(10.0, 1e-6)),
    "dryden": Method("dryden(density={}, follow_rate=False)", DENSITY),
    "adacomp": Method("adacomp(bin_size={0}, convolution_bin_size={0}, follow_rate=False)", Knob(100_000, 1)),
    "ef21": Method("ef21(density={})", DENSITY),
    "demo": Method("demo(k={})", Knob(1, 4096), optimizer="plain", rates="adamw"),
    "onebit_adam": Method("onebit_adam()", optimizers=("adamw",)),
    "parallax": Method("parallax()"),
    "omnireduce": Method("omnireduce(block_density={}, follow_rate=False)", DENSITY),
    "sparcml": Method("sparcml(density={}, follow_rate=False)", DENSITY),
    "post_local_sgd": Method("post_local_sgd(dense_steps=10, every={}, average_moments=False)", EVERY),
    "sbc": Method("sbc(density={}, every=1)", DENSITY),  # SBC (1): every=10 sends less than a hundredth
    "federated_averaging": Method("federated_averaging(every={})", EVERY),
    "diloco": Method("diloco(every={})", EVERY),
    "sparse_loco": Method("sparse_loco(every=30, density={})", DENSITY),
    "streaming_diloco": Method("streaming_diloco(every={})", Knob(300, 6)),
    "muloco": Method("muloco(every={})", EVERY),
    "des_loc": Method("des_loc(every={})", EVERY),
}
"""Every recipe, and what `strategy="sparsecomm"` is. A recipe without a line here fails a test."""

Run = dict[str, Any]

NONE = "none"


def weights_alone(network: nn.Module) -> None:
    """Freezes biases and norms."""
    for parameter in network.parameters():
        parameter.requires_grad_(parameter.dim() > 1)


def measured(name: str, knob: float | None, task: str, seed: int, dry: bool, options: argparse.Namespace) -> Run:
    """One training, also one that diverges or fails."""
    method = GALLERY.get(name, Method(name))
    optimizer = method.optimizer or OPTIMIZERS[task]
    rate = RATES[optimizer if optimizer == "adamw" else method.rates][task] * (DRY_RATE if dry else 1)
    cell = {"method": name, "knob": knob, "strategy": method.strategy(knob, optimizer), "task": task, "seed": seed}
    cell |= {"optimizer": optimizer, "rate": rate, "dry": dry, "commit": COMMIT}
    steps, held_out = options.steps, None
    if dry:
        options = argparse.Namespace(**vars(options) | {"batch_size": DRY_BATCH})
        steps, held_out = steps if "every=" in method.call else min(steps, DRY_STEPS), DRY_BATCH
    begin = time.perf_counter()
    try:
        found = run(cell["strategy"], task, optimizer, steps, seed, rate, options, weights_alone, held_out)
        found["link_bytes"] *= options.steps / steps  # of a whole run
    except DivergedError as error:
        found = {"diverged": error.steps, "link_bytes": error.link_bytes * options.steps / max(error.steps, 1)}
    except Exception as error:  # The others should run nevertheless; --resume tries it again.
        found = {"failed": str(error).strip().splitlines()[-1]}
    if not math.isfinite(found.get("loss", 0)):
        found |= {"diverged": options.steps, "loss": None}
    return cell | found | {"seconds": round(time.perf_counter() - begin, 1)}


def fewer_bytes(each: Run, runs: list[Run]) -> float | None:
    """How many times fewer bytes a run has than ddp's with its network; None if that is unknown."""
    base = next((a["link_bytes"] for a in runs if (a["method"], a["task"]) == (BASELINE, each["task"])), None)
    return base / each["link_bytes"] if base and each.get("link_bytes") else None


def of(name: str, task: str, runs: list[Run], dry: bool = False) -> list[Run]:
    """The runs of a method with a network."""
    return [each for each in runs if (each["method"], each["task"], each["dry"]) == (name, task, dry)]


def tried(name: str, task: str, runs: list[Run], dry: bool = False) -> dict[Any, float]:
    """By value of the knob, how many times fewer bytes were sent, with the first seed that was run.

    Of a training that diverged, the dry run tells it.
    """
    mine = of(name, task, runs, dry)
    first = min((each["seed"] for each in mine), default=0)
    instead = {} if dry else tried(name, task, runs, True)
    sent: dict[Any, float] = {}
    for each in mine:
        if each["seed"] == first:
            fewer = instead.get(each["knob"]) if "diverged" in each else None
            if (fewer := fewer or fewer_bytes(each, runs)) is not None:
                sent[each["knob"]] = fewer
    return sent


def at_budget(budget: int, sent: dict[Any, float]) -> Any:
    """The value of the knob that stands at this budget: the nearest, if no other budget is nearer to it.

    NONE if there is no such value, since None is the only value where there is no knob.
    """
    best = min(sent, key=lambda knob: abs(math.log(sent[knob] / budget)), default=None)
    if not sent or min(BUDGETS, key=lambda each: abs(math.log(sent[best] / each))) != budget:
        return NONE
    return best


class Next(NamedTuple):
    """A run that is still to be made: with which value of the knob, and whether dry."""

    knob: Any
    dry: bool


def missing(name: str, task: str, seed: int, runs: list[Run], steps: int) -> Next | None:
    """The next run of a method with a network and a seed; None when all are there."""
    made = {each["knob"] for each in of(name, task, runs) if each["seed"] == seed}
    method = GALLERY.get(name, Method(name))
    if OPTIMIZERS[task] not in method.optimizers or any("failed" in each for each in of(name, task, runs, True)):
        return None
    if method.knob is None:
        return None if made else Next(None, False)
    sent, dry = tried(name, task, runs), tried(name, task, runs, True)
    knob = method.knob
    if "every={}" in method.call:
        # No more than the whole run.
        knob = knob._replace(fewest=min(knob.fewest, steps))
    if seed == 0 and not made:
        # All dry runs come before the first run.
        for budget in BUDGETS if len(dry) < TRIES else ():
            if (value := knob.next(budget, dry)) is not None:
                return Next(value, True)
    stands = standing(dry if seed == 0 else sent)
    following = next((value for value in stands if value not in made), None)
    misled = any(abs(math.log(sent[value] / dry[value])) > math.log(MISLEADING) for value in sent.keys() & dry.keys())
    if seed == 0 and following is None and misled and len(made) < TRIES:
        tries = (knob.next(budget, sent) for budget in BUDGETS)
        following = next((value for value in tries if value is not None), None)
    return None if following is None else Next(following, False)


def standing(sent: dict[Any, float]) -> list[Any]:
    """The values of the knob that stand at some budget."""
    return [value for budget in BUDGETS if (value := at_budget(budget, sent)) != NONE]


class Cell(NamedTuple):
    """A method with a network at a budget.

    Attributes:
        fewer: How many times fewer bytes than ddp; NaN if it does not stand there.
        losses: Differences from ddp's with the same seeds.
        ms: CPU milliseconds of a rank's step, more than ddp's with the same seeds.
        diverged: Trainings that diverged.
        why: Why it does not stand there.
    """

    fewer: float = math.nan
    losses: tuple[float, ...] = ()
    ms: tuple[float, ...] = ()
    diverged: int = 0
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return self.why
        count = f"{self.diverged} of {self.diverged + len(self.losses)} diverged" if self.diverged else ""
        loss = spread(list(self.losses), "+", 3) if self.losses else ""
        return ", ".join(filter(None, (loss, count)))


def cell_of(name: str, task: str, budget: int, runs: list[Run]) -> Cell:
    """A cell of the table, with where it stands if that is more than a tenth from the budget."""
    mine = of(name, task, runs)
    if OPTIMIZERS[task] not in GALLERY[name].optimizers:
        return Cell(why=f"for {' and '.join(GALLERY[name].optimizers)} only")
    failures = [each["failed"] for each in (*of(name, task, runs, True), *mine) if "failed" in each]
    if failures:
        return Cell(why=f"failed: {failures[0]}")
    sent = tried(name, task, runs)
    if not sent:
        return Cell(why="diverged before it sent anything" if mine else "not run")
    knob = at_budget(budget, sent)
    if knob == NONE:
        sent = tried(name, task, runs, True) | sent
        least = all(fewer < budget for fewer in sent.values())
        limit = (max if least else min)(sent, key=lambda value: sent[value])
        how = "no knob" if limit is None else f"knob at {limit:g}"
        return Cell(why=f"{'least' if least else 'most'} {fraction(sent[limit])}, {how}")
    base = {each["seed"]: each for each in of(BASELINE, task, runs)}
    pairs = [(each, base[each["seed"]]) for each in mine if each["knob"] == knob and each["seed"] in base]
    whole = [(own, ddp) for own, ddp in pairs if "diverged" not in own]
    losses = tuple(own["loss"] - ddp["loss"] for own, ddp in whole)
    more = tuple(own["cpu_ms"] - ddp["cpu_ms"] for own, ddp in whole)
    bytes_of = [found for own, _ in whole if (found := fewer_bytes(own, runs)) is not None]
    fewer = statistics.mean(bytes_of) if bytes_of else sent[knob]
    return Cell(fewer, losses, more, len(pairs) - len(whole))


def fraction(fewer: float) -> str:
    """A fraction of ddp's bytes."""
    return f"1/{fewer:,.1f}" if fewer < 10 else f"1/{fewer:,.0f}"


def networks(runs: list[Run]) -> list[str]:
    """Those that were run, in order."""
    return [task for task in OPTIMIZERS if any(each["task"] == task for each in runs)]


def table(runs: list[Run]) -> str:
    """Losses from ddp's: means and standard errors over seeds."""
    tasks = networks(runs)
    lines = []
    for task in tasks:
        mine = of(BASELINE, task, runs)
        loss, ms = spread([each["loss"] for each in mine], "", 3), statistics.mean(each["cpu_ms"] for each in mine)
        lines.append(f"- {task} by {OPTIMIZERS[task]}: ddp's loss is {loss}, and its step takes {ms:.1f} ms of a core.")
    heads = [f"{task}, 1/{budget:,}" for task in tasks for budget in BUDGETS]
    lines += ["", f"| method | step, ms more | {' | '.join(heads)} |", f"|---|---:|{'---:|' * len(heads)}"]
    for name in GALLERY:
        if not any(each["method"] == name for each in runs):
            continue
        cells = {(task, budget): cell_of(name, task, budget, runs) for task in tasks for budget in BUDGETS}
        ms = [statistics.median(cell.ms) for cell in cells.values() if cell.ms]
        texts = [
            f"{cell} at {fraction(cell.fewer)}" if abs(math.log(cell.fewer / budget)) > math.log(1.1) else str(cell)
            for (_, budget), cell in cells.items()
        ]
        cost = spread_of(ms, 1) if len(ms) > 1 else "".join(f"{each:.1f}" for each in ms)
        lines.append(f"| `{name}` | {cost} | {' | '.join(texts)} |")
    return "\n".join(lines)


def front(points: dict[str, tuple[float, float]]) -> list[str]:
    """The names of points that no other one beats in both bytes and loss, from the most bytes to the fewest."""
    found: list[str] = []
    for name in sorted(points, key=lambda each: (-points[each][0], points[each][1])):
        if not found or points[name][1] < points[found[-1]][1]:
            found.append(name)
    return found[::-1]


def plot(runs: list[Run], path: Path) -> None:
    """Loss from ddp's by bytes, a panel for each network; a line joins methods that no other one beats in both."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = networks(runs)
    figure, axes = plt.subplots(len(tasks), 1, figsize=(9, 4.5 * len(tasks)), squeeze=False, layout="constrained")
    for task, axis in zip(tasks, axes[:, 0]):
        cells = {
            f"{name} {budget}": cell_of(name, task, budget, runs)
            for name in GALLERY
            for budget in BUDGETS
            if any(each["method"] == name for each in runs)
        }
        points = {name: (c.fewer, min(statistics.mean(c.losses), WORST)) for name, c in cells.items() if c.losses}
        best = front({name: point for name, point in points.items() if not cells[name].diverged})
        axis.axhline(0, color="0.6", linewidth=1)
        axis.plot(*zip(*(points[name] for name in best)), color="0.5", drawstyle="steps-pre") if best else None
        for number, method in enumerate(GALLERY):
            mine = [point for name, point in points.items() if name.split()[0] == method]
            marker = "osD^vP*X<>"[number % 10]
            axis.plot(*zip(*mine), marker, color=f"C{number % 9}", label=method) if mine else None
        for number, name in enumerate(best):
            above = 4 if number % 2 else -10
            axis.annotate(name.split()[0], points[name], fontsize=7, xytext=(3, above), textcoords="offset points")
        axis.margins(0.08)
        axis.set(xscale="log", title=f"{task} by {OPTIMIZERS[task]}", ylabel="held-out loss, difference from ddp's")
        axis.set_yscale("symlog", linthresh=0.01)
        axis.set_ylim(min(-0.02, 2 * min((loss for _, loss in points.values()), default=0)), 1.5 * WORST)
    note = f"; losses {WORST} above ddp's and more are at {WORST}"
    axes[-1][0].set_xlabel("times fewer bytes on the link than ddp, whole run" + note)
    # Some methods are in one panel only.
    named = {label: point for axis in axes[:, 0] for point, label in zip(*axis.get_legend_handles_labels())}
    methods = [method for method in GALLERY if method in named]
    figure.legend([named[method] for method in methods], methods, loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs what is missing, seed by seed, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=folder, default=Path("data"), help="Fashion-MNIST and shakespeare.txt")
    parser.add_argument("--tasks", nargs="+", choices=OPTIMIZERS, default=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", choices=GALLERY, default=list(GALLERY), help="these, beside ddp")
    parser.add_argument("--steps", type=at_least(1), default=300)
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("--processes", type=at_least(2), default=4)
    parser.add_argument("--batch-size", type=at_least(1), default=32, help="of each process")
    parser.add_argument("--output", type=Path, default=Path("gallery.json"))
    parser.add_argument("--resume", action="store_true", help="keep the runs in --output, and try failed ones again")
    parser.add_argument("--plot", type=Path, help="file for a plot of loss by bytes")
    parser.add_argument("--only-print", action="store_true", help="print the table of --output")
    options = parser.parse_args()
    options.held_out = False
    for method in GALLERY.values():
        known_strategy(method.strategy(method.knob and method.knob.most, "adamw"))
    quieten()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    settings = {"processes": options.processes, "batch_size": options.batch_size, "steps": options.steps} | versions()
    runs = load(options.output, settings, options.resume or options.only_print)
    if not options.only_print:
        runs = [each for each in runs if "failed" not in each]
        for seed in range(options.seeds):
            for task in options.tasks:
                for name in (BASELINE, *options.methods):
                    while (following := missing(name, task, seed, runs, options.steps)) is not None:
                        runs.append(measured(name, following.knob, task, seed, following.dry, options))
                        save(runs, options.output, settings)
                        show(runs[-1], fewer_bytes(runs[-1], runs))
    print(table(runs))
    if options.plot is not None:
        plot(runs, options.plot)
    print(f"\n{made_with(each['commit'] for each in runs)}")


def show(each: Run, fewer: float | None) -> None:
    """A line about a run that has ended."""
    names = ("strategy", "task", "seed", "dry", "loss", "diverged", "failed", "seconds")
    shown = {name: each[name] for name in names if each.get(name) is not None}
    print(shown | {"fewer": fewer and round(fewer, 1)}, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
