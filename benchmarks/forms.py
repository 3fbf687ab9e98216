"""What a rank keeps and sends, one thing changed at a time: a simulation of several ranks in one process.

A task of `tasks.py`, measured on held-out training data; the test data is not used. All forms of a seed start from the
same weights and see the same batches, and the learning rate falls along a cosine. Each form sends as many elements as
fit in equal bytes on the link: positions count by their entropy, or as a bitmap from a density of a half on; values by
their bits; biases and norms, which are exact here, as in 8 bits. Prints a Markdown table, whose differences are those
from ddp at the same seed, with the standard error over seeds.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from tasks import RATES, TASKS, Task
from torch import Tensor, nn

from lightning_sparsecomm.basis import Layout
from lightning_sparsecomm.channel.coherence import Coherence
from lightning_sparsecomm.codecs import BFloat16, OneBit, ThreeBit, TwoBit, ValueCodec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from command_line import at_least, folder

HEAD_BITS = 1 / 8
"""Of the magnitude that a group of values shares, for each value in `Levels`."""

MOMENTUM, BETAS, EPSILON = 0.9, (0.9, 0.999), 1e-8


class Levels(NamedTuple):
    """Elements in levels of magnitude, each so many times as high as the one below it; below the first they wait.

    Which element is in which level counts by the entropy, signs a bit. A value becomes the mean of its level. A tensor
    has as many bits as with three-bit values, which sets the lowest level.
    """

    ratio: float

    def sent(self, residual: Tensor, bits: float) -> Tensor:
        """What is sent in so many bits for each element."""
        flat = residual.reshape(-1)
        largest = float(flat.abs().max())
        if largest == 0:
            return torch.zeros_like(residual)
        logs = flat.abs().clamp(min=1e-9 * largest).log()
        low, high = math.log(1e-6 * largest), math.log(largest)
        while high - low > 0.01:
            middle = (low + high) / 2
            low, high = (middle, high) if self._bits(self._levels(logs, middle)) > bits else (low, middle)
        levels = self._levels(logs, high)
        counts = levels.bincount()
        means = torch.zeros(counts.numel(), dtype=flat.dtype).index_add_(0, levels, flat.abs()) / counts.clamp(min=1)
        means[0] = 0
        return (means[levels] * flat.sign()).view(residual.shape)

    def _levels(self, logs: Tensor, lowest: float) -> Tensor:
        return ((logs - lowest) / math.log(self.ratio)).floor().clamp(-1, 30).long() + 1

    def _bits(self, levels: Tensor) -> float:
        parts = levels.bincount().double() / levels.numel()
        some = parts[parts > 0]
        return float(-(some * some.log2()).sum() + (1 - parts[0]) * (1 + HEAD_BITS))


VALUES: dict[str, tuple[ValueCodec | Levels, float]] = {
    "bfloat16": (BFloat16(), 16),
    "three bits": (ThreeBit(), 3.25),
    "two bits": (TwoBit(), 2.5),
    "one bit": (OneBit(), 1.125),
    **{f"levels of {ratio}": (Levels(ratio), 3.25) for ratio in (2, 3, 4, 6)},
}
"""The codec of values, and its bits for each."""

LEVELS = [name for name, (codec, _) in VALUES.items() if isinstance(codec, Levels)]


class Form(NamedTuple):
    """What is changed.

    Attributes:
        values: How values are rounded: one of `VALUES`; "few bits" for two where over 60% are sent, else one.
        optimizer: "sgd"; "adam", whose moments see what is shared; or "local adam", with moments before the exchange.
        dense: Whether everything is sent: ddp.
        summed: Whether ranks each add up a piece, and send on the largest elements of its mean; otherwise all gather
            what each has selected, which allows 2 / W of the bits.
        mask: Whether momentum is set to 0 where something was sent.
        follow_rate: Whether the residual follows the learning rate.
        balanced: Whether small tensors are sent more densely.
        second: Adam's second moment: of this rank's "local" gradient; the same times its "coherence", as `LocalAdam`
            has it; with the square times a "product" of the gradient and the first moment before it, which confirms
            what is no noise; the local one "corrected" for the number of ranks by what the first moment is now, as
            `LocalAdam` did before; the "mean" over ranks of the local ones; that mean, corrected ("mean corrected"); or
            of the mean gradient, as in ddp, which no rank knows ("oracle").
        finish: Whether everything is sent in the last step.
        every: Steps between two exchanges, which have so many times the bits; in between, each rank steps along what it
            has to send.
        residual_in_weights: Whether a rank trains ahead of the shared weights by its residual; otherwise by what it has
            stepped along since the last exchange.
        late: Whether what a step shares moves the weights in the next one. Meanwhile, a rank trains ahead by its own.
        bounded: Whether Adam's directions count there only in part where they are mostly noise, see `Coherence.ahead`.
        most: When more is sent, in as many bytes: never, "evenly"; three times the mean in the "first" or the "last"
            tenth of the steps, a warm-up or cool-down; or "later", at the end three times as much as at the beginning.
    """

    values: str = "bfloat16"
    optimizer: Literal["sgd", "adam", "local adam"] = "sgd"
    dense: bool = False
    summed: bool = True
    mask: bool = False
    follow_rate: bool = True
    balanced: bool = True
    second: Literal["local", "coherence", "product", "corrected", "mean", "mean corrected", "oracle"] = "coherence"
    finish: bool = False
    every: int = 1
    residual_in_weights: bool = False
    late: bool = False
    bounded: bool = True
    most: Literal["evenly", "first", "last", "later"] = "evenly"

    @property
    def ahead(self) -> bool:
        """Whether each rank has weights of its own."""
        return self.every > 1 or self.residual_in_weights or self.late


def forms_of(optimizer: str) -> dict[str, Form]:
    """The forms by name."""
    if optimizer == "sgd":
        base = Form("three bits")
        best = base._replace(finish=True, every=2, residual_in_weights=True)
        return {
            "ddp": Form(dense=True),
            "sparsecomm": base,
            "… gathered": base._replace(summed=False),
            "… that does not follow the rate": base._replace(follow_rate=False),
            "… equally dense in all tensors": base._replace(balanced=False),
            "… 16-bit values": base._replace(values="bfloat16"),
            "… two-bit values": base._replace(values="two bits"),
            "… one-bit values": base._replace(values="one bit"),
            **_local_steps(base),
            **{f"… every 2 steps, residual in weights, {name}": best._replace(values=name) for name in LEVELS},
            "… masked": base._replace(mask=True, summed=False),
            "dgc as in the paper": Form(mask=True, summed=False, follow_rate=False, balanced=False),
        }
    base = Form("few bits", "local adam")
    return {
        "ddp": Form(optimizer="adam", dense=True),
        "sparsecomm (local Adam)": base,
        "… gathered": base._replace(summed=False),
        **_local_steps(base),
        "… of the rank's own gradient": base._replace(second="local"),
        "… product": base._replace(second="product"),
        "… corrected": base._replace(second="corrected"),
        "… mean over ranks": base._replace(second="mean"),
        "… mean over ranks, corrected": base._replace(second="mean corrected"),
        "… of the mean gradient": base._replace(second="oracle"),
        "… 16-bit values": base._replace(values="bfloat16"),
        "… three-bit values": base._replace(values="three bits"),
        "… two-bit values": base._replace(values="two bits"),
        "… one-bit values": base._replace(values="one bit"),
        "gradient dropping into Adam": base._replace(optimizer="adam", summed=False),
        "… equally dense in all tensors": Form(optimizer="adam", summed=False, follow_rate=False, balanced=False),
    }


def _local_steps(base: Form) -> dict[str, Form]:
    base = base._replace(finish=True)
    every = {"… that finishes": 1} | {f"… every {number} steps": number for number in (2, 4, 8)}
    alone = {name: base._replace(every=number) for name, number in every.items()}
    both = {f"{name}, residual in weights": form._replace(residual_in_weights=True) for name, form in alone.items()}
    best = base._replace(every=2, residual_in_weights=True)
    when = {"warms up": "first", "cools down": "last", "rises": "later"}
    spread = {f"… every 2 steps, residual in weights, {name}": best._replace(most=most) for name, most in when.items()}
    late = base._replace(late=True)
    unbounded = {
        "… every 2 steps, residual in weights, unbounded": best._replace(bounded=False),
        "… that finishes, a step late, unbounded": late._replace(bounded=False),
    }
    return alone | both | spread | {"… that finishes, a step late": late} | unbounded


def share_at(most: str, part: float) -> float:
    """Which multiple of the mean is sent in a step, when `part` of the run is over."""
    if most == "later":
        return 0.5 + part
    if most == "evenly":
        return 1.0
    return 3.0 if (part < 0.1 if most == "first" else part >= 0.9) else 0.7 / 0.9


def density_of(values: str, bits: float) -> float:
    """The density at which an element takes so many bits on average, sent or not."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _bits_at(middle, VALUES[values][1]) < bits else (low, middle)
    return low


def _bits_at(density: float, value_bits: float) -> float:
    return (_entropy(density) if density < 0.5 else 1.0) + density * value_bits


class Rank:
    """What one rank keeps for one tensor."""

    def __init__(self, weight: Tensor) -> None:
        self.velocity, self.first, self.second, self.residual, self.ahead = (torch.zeros_like(weight) for _ in range(5))


class Simulation:
    """One training of all ranks.

    Attributes:
        link_bytes: Bytes that a rank puts on the link.
    """

    def __init__(self, network: nn.Module, form: Form, bits: float, rate: float, steps: int, ranks: int) -> None:
        self.rate, self.steps, self.world_size = rate, steps, ranks
        bits *= form.every * (1 if form.summed else 2 / ranks)
        self.bits = bits
        if form.values == "few bits":
            form = form._replace(values="two bits" if density_of("two bits", bits) > 0.6 else "one bit")
        self.form = form
        self.network = network
        self.weights = [parameter.detach() for parameter in network.parameters()]
        self.ranks = [[Rank(weight) for weight in self.weights] for _ in range(ranks)]
        self.shared = [Rank(weight) for weight in self.weights]
        self.link_bytes = 0.0
        self.coherences = [Coherence() for _ in self.weights]
        # What the last step has shared, where it is used a step late.
        self.arrived = [torch.zeros_like(weight) for weight in self.weights]

    def step(self, step: int, gradients: Sequence[Sequence[Tensor]]) -> None:
        """One optimizer step, given each rank's gradients."""
        rate = self.rate * (1 + math.cos(math.pi * step / self.steps)) / 2
        everything = self.form.finish and step == self.steps - 1
        bits = self.bits * share_at(self.form.most, step / self.steps)
        densities = [1.0] * len(self.weights) if everything else self._densities(density_of(self.form.values, bits))
        exchanges = everything or step % self.form.every == 0
        for index, (weight, density) in enumerate(zip(self.weights, densities)):
            own = [each[index] for each in gradients]
            if not exchanges:
                self._step_alone(index, own, rate, step)
            elif self.form.dense or (weight.dim() < 2 and self.form.every == 1):
                element_bytes = 4 if self.form.dense else 1 + 4 / 64
                self.link_bytes += 2 * (self.world_size - 1) / self.world_size * weight.numel() * element_bytes
                weight -= rate * self._direction(self.shared[index], _mean(own), step)
            else:
                change = self._exchanged(index, own, rate, step, density)
                if self.form.late:
                    # What arrives in the last step is used as training ends.
                    change, self.arrived[index] = self.arrived[index] + change * everything, change
                weight -= change

    def own_weights(self, rank: int) -> list[Tensor]:
        """The weights by which a rank computes its gradient."""
        return [weight - self.ranks[rank][index].ahead for index, weight in enumerate(self.weights)]

    def _step_alone(self, index: int, own: list[Tensor], rate: float, step: int) -> None:
        for rank, each in zip(self.ranks, self._brought(index, own, step)):
            rank[index].residual.add_(each, alpha=rate)
            rank[index].ahead.add_(each, alpha=rate * self._ahead(index))

    def _ahead(self, index: int) -> float:
        """How much of its own steps a rank trains ahead by."""
        bounded = self.form.bounded and self.form.optimizer == "local adam" and self.form.second == "coherence"
        return self.coherences[index].ahead("", self.world_size) if bounded else 1.0

    def _direction(self, state: Rank, gradient: Tensor, step: int) -> Tensor:
        """What torch's optimizer steps along."""
        if self.form.optimizer == "sgd":
            return state.velocity.mul_(MOMENTUM).add_(gradient)
        state.first.lerp_(gradient, 1 - BETAS[0])
        state.second.lerp_(gradient.square(), 1 - BETAS[1])
        unbiased = state.second / (1 - BETAS[1] ** (step + 1))
        return state.first / (1 - BETAS[0] ** (step + 1)) / (unbiased.sqrt() + EPSILON)

    def _exchanged(self, index: int, own: list[Tensor], rate: float, step: int, density: float) -> Tensor:
        form, ranks = self.form, [each[index] for each in self.ranks]
        brought = self._brought(index, own, step)
        scaled = form.follow_rate and form.optimizer != "adam"
        total = torch.zeros_like(own[0])
        whole = self.weights[index].dim() < 2
        count = total.numel() if whole else max(1, round(density * total.numel()))
        codec, value_bits = (None, 8 + 32 / 64) if whole else VALUES[form.values]
        pieces = [_piece(rank, total.numel(), self.world_size) for rank in range(self.world_size)]
        for rank, each, piece in zip(ranks, brought, pieces):
            rank.residual.add_(each, alpha=rate if scaled else 1.0)
            sent = _sent(rank.residual, count, codec)
            if form.summed:
                sent.view(-1)[piece] = rank.residual.view(-1)[piece]
            rank.residual -= sent
            if form.mask:
                rank.velocity[sent != 0] = 0
            total += sent / self.world_size
        if form.summed:
            mean, total = total, _sent(total, count, codec)
            for rank, piece in zip(ranks, pieces):
                rank.residual.view(-1)[piece] += self.world_size * (mean - total).view(-1)[piece]
        for rank, each in zip(ranks, brought):
            rank.ahead = rank.residual * (self._ahead(index) if form.residual_in_weights else 0.0)
            if form.late:
                rank.ahead = each * rate * self._ahead(index)
        # With everything sent, there are no positions.
        bits = total.numel() * (value_bits if count == total.numel() else _bits_at(count / total.numel(), value_bits))
        self.link_bytes += (
            (2 * (self.world_size - 1) / self.world_size if form.summed else self.world_size - 1) * bits / 8
        )
        if form.optimizer == "adam":
            return rate * self._direction(self.shared[index], total, step)
        return total if scaled else rate * total

    def _brought(self, index: int, own: list[Tensor], step: int) -> list[Tensor]:
        """What enters each rank's residual."""
        if self.form.optimizer == "sgd":
            return [rank[index].velocity.mul_(MOMENTUM).add_(gradient) for rank, gradient in zip(self.ranks, own)]
        return self._local_directions(index, own, step) if self.form.optimizer == "local adam" else own

    def _local_directions(self, index: int, own: list[Tensor], step: int) -> list[Tensor]:
        ranks = [each[index] for each in self.ranks]
        coherence = self.coherences[index].of("", self.world_size) if self.form.second == "coherence" else 1.0
        self._compare(index, own, step)
        for rank, gradient in zip(ranks, own):
            entering = gradient.square() * coherence
            if self.form.second == "product" and step:
                signal = gradient * rank.first / (1 - BETAS[0] ** step)
                entering = (signal + (entering - signal) / self.world_size).clamp_(min=0).minimum(entering)
            rank.first.lerp_(gradient, 1 - BETAS[0])
            rank.second.lerp_(entering, 1 - BETAS[1])
        means = [rank.first / (1 - BETAS[0] ** (step + 1)) for rank in ranks]
        squares = [rank.second / (1 - BETAS[1] ** (step + 1)) for rank in ranks]
        noise = (1 - BETAS[0]) / (1 + BETAS[0])
        if self.form.second == "corrected":
            squares = [_corrected(mean, square, noise, self.world_size) for mean, square in zip(means, squares)]
        elif self.form.second == "mean":
            squares = [_mean(squares)] * self.world_size
        elif self.form.second == "mean corrected":
            squares = [
                _corrected(_mean(means), _mean(squares), noise / self.world_size, self.world_size)
            ] * self.world_size
        elif self.form.second == "oracle":
            shared = self.shared[index].second.lerp_(_mean(own).square(), 1 - BETAS[1])
            squares = [shared / (1 - BETAS[1] ** (step + 1))] * self.world_size
        return [mean / (square.sqrt() + EPSILON) for mean, square in zip(means, squares)]

    def _compare(self, index: int, own: list[Tensor], step: int) -> None:
        coherence, layout = self.coherences[index], Layout([("", tuple(own[0].shape))])
        (positions,) = coherence.positions(layout, step, torch.device("cpu"))
        some = torch.stack([gradient.take(positions) for gradient in own])
        total = torch.cat([some.sum(0), some.square().sum()[None]])
        coherence.take([""], [True], total[None], self.world_size, step)
        if self.form.second == "coherence":
            self.link_bytes += 2 * (self.world_size - 1) / self.world_size * total.nbytes

    def _densities(self, density: float) -> list[float]:
        sizes = {index: weight.numel() for index, weight in enumerate(self.weights) if weight.dim() > 1}
        if not self.form.balanced:
            return [density] * len(self.weights)
        left, densities = density * sum(sizes.values()), [1.0] * len(self.weights)
        # Small tensors that need fewer than their part are sent whole.
        for index, size in sorted(sizes.items(), key=lambda each: each[1]):
            rest = sum(math.sqrt(other) for other in sizes.values() if other >= size)
            count = min(size, left * math.sqrt(size) / rest)
            densities[index], left = count / size, left - count
        return densities


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return sum(tensors) / len(tensors)  # type: ignore[return-value]


def _corrected(mean: Tensor, square: Tensor, noise: float, ranks: int) -> Tensor:
    signal = ((mean.square() - noise * square) / (1 - noise)).clamp_(min=0).minimum(square)
    return (square - signal) / ranks + signal


def _piece(rank: int, size: int, ranks: int) -> slice:
    length = -(-size // ranks)
    return slice(rank * length, (rank + 1) * length)


def _sent(residual: Tensor, count: int, codec: ValueCodec | Levels | None) -> Tensor:
    """The largest elements, as they are rounded; all and exact without a codec."""
    if codec is None:
        return residual.clone()
    if isinstance(codec, Levels):
        if count < residual.numel():
            return codec.sent(residual, _bits_at(count / residual.numel(), 3.25))
        codec = ThreeBit()
    flat = residual.reshape(-1)
    chosen = torch.topk(flat.abs(), count).indices.sort().values
    section = codec.encode(flat[chosen], chosen, Layout([]))
    values = codec.decode(section, count, codec.parameter).to(flat)
    return torch.zeros_like(flat).index_copy_(0, chosen, values).view(residual.shape)


def _entropy(p: float) -> float:
    return 0.0 if p in (0, 1) else -p * math.log2(p) - (1 - p) * math.log2(1 - p)


class Training(NamedTuple):
    """What all forms have in common; the task's batches have so many samples for each rank."""

    task: Task
    data_dir: Path
    bits: float
    rate: float
    steps: int
    ranks: int
    batch: int


def train(form: Form, training: Training, seed: int) -> tuple[float, float, float]:
    """Accuracy in percent and loss on the held-out samples, and bytes on the link of a rank."""
    torch.manual_seed(seed)
    task, ranks = training.task, training.ranks
    data = task.read(training.data_dir, True)
    inputs, targets = data.train
    simulation = Simulation(task.network(data.classes), form, training.bits, training.rate, training.steps, ranks)
    parameters = list(simulation.network.parameters())
    generator = torch.Generator().manual_seed(seed)
    for step in range(training.steps):
        gradients = []
        for rank in range(ranks):
            if form.ahead:
                shared = [weight.clone() for weight in simulation.weights]
                torch._foreach_copy_(simulation.weights, simulation.own_weights(rank))
            batch = torch.randint(0, len(inputs), (training.batch,), generator=generator)
            loss = task.loss(simulation.network(inputs[batch]), targets[batch])
            gradients.append(torch.autograd.grad(loss, parameters))
            if form.ahead:
                torch._foreach_copy_(simulation.weights, shared)
        with torch.no_grad():
            simulation.step(step, gradients)
    with torch.no_grad():
        outputs = torch.cat([simulation.network(some) for some in data.held_out[0].split(2000)])
    targets = data.held_out[1]
    return 100 * task.accuracy(outputs, targets), float(task.loss(outputs, targets)), simulation.link_bytes


def difference(ours: Sequence[float], theirs: Sequence[float], decimals: int) -> str:
    """The mean of differences at the same seed, with its standard error if there are several seeds."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = f"{statistics.mean(differences):+.{decimals}f}"
    if len(differences) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(differences) / math.sqrt(len(differences)):.{decimals}f}"


def main() -> None:
    """Runs all forms, seed by seed, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=folder, default=Path("data"), help="Fashion-MNIST and shakespeare.txt")
    parser.add_argument("--task", choices=TASKS, default="convolution")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--rate", type=float, help="learning rate; that of tasks.py, which suits ddp")
    parser.add_argument("--forms", nargs="+", help="only these, beside ddp")
    parser.add_argument("--steps", type=at_least(1), default=300)
    parser.add_argument("--bits", type=float, default=3.0, help="of each element of weights, in each half of a sum")
    parser.add_argument("--ranks", type=at_least(2), default=4)
    parser.add_argument("--batch", type=at_least(1), default=32, help="samples for each rank and step")
    parser.add_argument("--seeds", type=at_least(1), default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rate = options.rate or RATES["sgd" if options.optimizer == "sgd" else "adamw"][options.task]
    forms = forms_of(options.optimizer)
    unknown = set(options.forms or ()) - forms.keys()
    if unknown:
        parser.error(f"--forms must be of {', '.join(map(repr, forms))}; got {', '.join(map(repr, unknown))}.")
    forms = {name: form for name, form in forms.items() if name == "ddp" or name in (options.forms or forms)}
    task, size = TASKS[options.task], (options.steps, options.ranks, options.batch)
    training = Training(task, options.data_dir, options.bits, rate, *size)
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in forms}
    for seed in range(options.seeds):
        for name, form in forms.items():
            results[name].append(train(form, training, seed))
            print(f"seed {seed}, {name}: {results[name][-1]}", file=sys.stderr, flush=True)
    print("| form | loss | from ddp | accuracy, % | from ddp | fewer bytes than ddp |\n|---|---:|---:|---:|---:|---:|")
    ddp_accuracies, ddp_losses = ([run[i] for run in results["ddp"]] for i in (0, 1))
    for name, runs in results.items():
        accuracies, losses = [run[0] for run in runs], [run[1] for run in runs]
        fewer = results["ddp"][0][2] / runs[0][2]
        loss, accuracy = statistics.mean(losses), statistics.mean(accuracies)
        further, higher = difference(losses, ddp_losses, 4), difference(accuracies, ddp_accuracies, 2)
        print(f"| {name} | {loss:.4f} | {further} | {accuracy:.2f} | {higher} | {fewer:.1f} × |")


if __name__ == "__main__":
    main()
