"""Plans a training: what each method's step would take, and which one to use."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch.nn import Parameter
from torch.optim import SGD, Adam, Optimizer

from lightning_sparsecomm import methods
from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.methods.auto import BASELINE, DEFAULT, ROUNDED, Quality, allowed
from lightning_sparsecomm.planning.links import Link
from lightning_sparsecomm.planning.model import Predicted, Work, predict
from lightning_sparsecomm.planning.quantities import as_bytes, as_time
from lightning_sparsecomm.planning.rehearsed import rehearse
from lightning_sparsecomm.sharing import BucketSync, DeltaSync, Method
from lightning_sparsecomm.sharing.gradients import NamedParameters


def known() -> dict[str, Method]:
    """Those that may be chosen by any quality, and all other recipes."""
    recipes = {name: recipe() for name, recipe in methods.RECIPES.items() if name != "dense"}
    return allowed("trained") | recipes


@dataclass(frozen=True)
class Plan:
    """What each method's step would take.

    Attributes:
        rows: By name, in the order of their steps' seconds.
        refused: Methods that are not defined for the optimizer, with the reason.
        choice: The fastest of those that may be chosen.
        choosable: Those that may be chosen.
    """

    rows: dict[str, Predicted]
    refused: dict[str, str]
    choice: str
    choosable: tuple[str, ...] = ()

    def table(self) -> str:
        """The rows as text."""
        baseline = self.rows[BASELINE].seconds
        lines = [("  method", "step", "by ddp's", "compute", "coding", "waiting", "sent per step", "kept", "bound by")]
        for name, row in self.rows.items():
            lines.append(
                (
                    f"{self._mark(name)} {name}",
                    as_time(row.seconds),
                    f"{row.seconds / baseline:.2g}" if baseline else "",
                    as_time(row.compute),
                    as_time(row.coding),
                    as_time(row.exposed),
                    as_bytes(row.link_bytes),
                    as_bytes(row.held_bytes),
                    row.bound,
                )
            )
        return "\n".join([*aligned(lines), "", self.reason()])

    def _mark(self, name: str) -> str:
        return "*" if name == self.choice else "+" if name in self.choosable else " "

    def reason(self) -> str:
        """The choice in a sentence."""
        chosen, baseline = self.rows[self.choice], self.rows[BASELINE]
        if self.choice == BASELINE:
            others = [name for name in (ROUNDED, DEFAULT) if name in self.rows]
            words = " and ".join(f"{name} {as_time(self.rows[name].seconds)}" for name in others)
            than = f"; {words}" if words else ""
            return f"Use ddp: its step takes {as_time(baseline.seconds)}, bound by {baseline.bound}{than}."
        times = baseline.seconds / chosen.seconds
        return (
            f"Use {self.choice}: a step of {as_time(chosen.seconds)}, {times:.1f} times faster than ddp's"
            f" {as_time(baseline.seconds)}, {baseline.link_bytes / max(chosen.link_bytes, 1):,.0f} times fewer bytes."
        )

    def as_dict(self) -> dict[str, object]:
        """All figures, for JSON; times in seconds."""
        rows = {name: asdict(row) | {"seconds": row.seconds, "bound": row.bound} for name, row in self.rows.items()}
        return {"choice": self.choice, "rows": rows, "refused": self.refused}


def plan(
    kinds: Sequence[tuple[Optimizer, NamedParameters]],
    ranks: int,
    link: Link,
    work: Work,
    length: float = math.inf,
    quality: Quality = "trained",
    candidates: Mapping[str, Method] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """Rehearses methods on this processor, and predicts a step with each.

    >>> import torch
    >>> from lightning_sparsecomm.planning import Network, Work, plan, square_layers
    >>> parameters = square_layers(100_000)
    >>> sgd = torch.optim.SGD([weight for _, weight in parameters], lr=0.1, momentum=0.9)
    >>> plan([(sgd, parameters)], 4, Network(10e6, rtt=0.02), Work(0.01), length=1000).choice
    'sparsecomm'

    Args:
        kinds: Optimizers, with the parameters that each trains.
        ranks: Number of ranks.
        link: The network between them.
        work: What a rank computes in a step.
        length: Optimizer steps of the run, which the default method's density and local steps follow; infinite where
            unknown.
        quality: What may be chosen.
        candidates: Further methods to predict, by name; all recipes by default.
        progress: Called before each rehearsal, with the method's name, its number from 1 on, and how many there are.

    Returns:
        What each method's step takes, in `rows`, and the `choice`; `table()` shows both.

    Raises:
        ValueError: `ranks` below 1, an unknown quality, or no parameter that requires a gradient.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1; got {ranks!r}.")
    choosable = allowed(quality)
    everything = {BASELINE: methods.dense()} | choosable | dict(known() if candidates is None else candidates)
    # Nothing is sent for parameters that are frozen.
    kinds = [(optimizer, [each for each in named if each[1].requires_grad]) for optimizer, named in kinds]
    kinds = [(optimizer, named) for optimizer, named in kinds if named]
    if not kinds:
        raise ValueError("kinds must hold a parameter that requires a gradient; got none. Unfreeze some.")
    rows: dict[str, Predicted] = {}
    refused: dict[str, str] = {}
    for number, (name, method) in enumerate(everything.items(), start=1):
        if progress is not None:
            progress(name, number, len(everything))
        made = method.for_run(length, ranks)
        try:
            _check_size(made, kinds)
            rehearsed = rehearse(made, kinds, ranks, length)
        except (TypeError, ValueError) as error:
            refused[name] = str(error)
        else:
            rows[name] = predict(rehearsed, link, work)
    rows = dict(sorted(rows.items(), key=lambda pair: pair[1].seconds))
    choice = min((name for name in choosable if name in rows), key=lambda name: rows[name].seconds)
    return Plan(rows, refused, choice, tuple(choosable))


def _check_size(method: Method, kinds: Sequence[tuple[Optimizer, NamedParameters]]) -> None:
    """Raises `TooLargeError` as a training would; rehearsals have stand-ins, which are small."""
    for _, named in kinds:
        for sync, piece in method.parts(named):
            in_pieces = isinstance(sync, BucketSync) or (isinstance(sync, DeltaSync) and sync.fragments > 1)
            if not in_pieces:
                Layout.of(piece)


def square_layers(elements: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, Parameter]]:
    """Parameters of eight square weights and their biases, with about so many elements in all.

    They have no memory of their own, so a model of any size costs nothing.

    Args:
        elements: Elements of all of them, approximately.
        dtype: Their dtype.
    """
    width = max(2, round(math.sqrt(elements / 8)))
    shapes = [shape for _ in range(8) for shape in ((width, width), (width,))]
    return [(f"part{i}", Parameter(torch.zeros(1, dtype=dtype).expand(shape))) for i, shape in enumerate(shapes)]


def optimizer_for(name: str, parameters: NamedParameters) -> Optimizer:
    """SGD with momentum, Adam or AdamW on these parameters.

    Raises:
        ValueError: Another name.
    """
    weights = [parameter for _, parameter in parameters]
    made: dict[str, Optimizer] = {
        "sgd": SGD(weights, lr=0.1, momentum=0.9),
        "adam": Adam(weights),
        "adamw": torch.optim.AdamW(weights),
    }
    if name not in made:
        raise ValueError(f"optimizer must be one of {', '.join(made)}; got {name!r}.")
    return made[name]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are as wide as they must be: the first one to the left, all others to the right.

    >>> aligned([("step", "ms"), ("a", "100")])
    ['step   ms', 'a     100']
    """
    first, *rest = (max(map(len, column)) for column in zip(*rows))
    return [row[0].ljust(first) + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], rest)) for row in rows]
