"""Parameters in fragments, each of which is exchanged at a time of its own."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.basis.arguments import check_one_of, check_whole_number
from lightning_sparsecomm.channel.saved import Saved
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.share import Share, Turn

FragmentOrder = Literal["strided", "sequential"]
"""Which layers a fragment has: every P-th, or as many that follow one another."""


def check_fragments(count: int, order: FragmentOrder, most_every: float) -> None:
    """Raises `ValueError` unless each of so many fragments can have a step of its own among `most_every` steps."""
    check_whole_number("fragments", count, 1, "parts exchanged one after another", "Use 1 to exchange all at once.")
    if count > most_every:
        raise ValueError(
            f"fragments must be at most every, {most_every:.0f} steps, so that each has a step of its own; got {count}."
            f" Use fragments={most_every:.0f}."
        )
    check_one_of("fragment_order", order, get_args(FragmentOrder), "Use 'strided'.")


def layer_of(name: str, numbers: int = 1) -> str:
    """The layer that a parameter belongs to: its name up to the first number, or so many, or else up to its last part.

    >>> layer_of("blocks.3.attention.weight"), layer_of("head.bias"), layer_of("scale"), layer_of("scales.2", numbers=2)
    ('blocks.3', 'head', '', 'scales.2')
    """
    parts = name.split(".")
    places = [place for place, part in enumerate(parts) if part.isdigit()]
    last = places[numbers - 1] if len(places) >= numbers else max([len(parts) - 2, *places])
    return ".".join(parts[: last + 1])


def layers_of(parameters: NamedParameters, count: int) -> list[str]:
    """The layer of each parameter. One that has more than a fragment's share of all elements is cut into its own.

    >>> from torch import nn
    >>> nested = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)))
    >>> sorted(set(layers_of(list(nested.named_parameters()), count=2)))
    ['0', '1.0', '1.1']
    """
    numbers = [1] * len(parameters)
    share = sum(parameter.numel() for _, parameter in parameters) / count
    while True:
        layers = [layer_of(name, number) for (name, _), number in zip(parameters, numbers)]
        sizes = Counter[str]()
        for layer, (_, parameter) in zip(layers, parameters):
            sizes[layer] += parameter.numel()
        deeper = [number + (sizes[layer] > share) for layer, number in zip(layers, numbers)]
        if layers == [layer_of(name, number) for (name, _), number in zip(parameters, deeper)]:
            return layers
        numbers = deeper


def fragments_of(parameters: NamedParameters, count: int, order: FragmentOrder) -> list[NamedParameters]:
    """Cuts parameters into fragments of whole layers; it depends on names and sizes alone.

    Args:
        parameters: In named-parameter order.
        count: How many fragments to make.
        order: "strided": layer i goes to fragment i mod `count`. "sequential": layers that follow one another, about
            the same number of elements in each fragment.

    Returns:
        `count` fragments. Where there are fewer layers, the last ones are empty.
    """
    layers = layers_of(parameters, count)
    sizes = Counter[str]()
    for layer, (_, parameter) in zip(layers, parameters):
        sizes[layer] += parameter.numel()
    if order == "strided":
        numbers = [place % count for place in range(len(sizes))]
    else:
        numbers = _sequential(list(sizes.values()), count)
    fragment_of = dict(zip(sizes, numbers))
    pairs = list(zip(layers, parameters))
    return [[pair for layer, pair in pairs if fragment_of[layer] == number] for number in range(count)]


def is_due(step: int, every: int, fragment: int, count: int) -> bool:
    """Whether a fragment is exchanged after a step, counted from 0: each every `every` steps, evenly staggered.

    The last one is exchanged after every multiple of `every`. This depends on the step alone, so fragments stay
    staggered after an aborted turn, and in a run that resumes. Where there are more fragments than steps, several are
    exchanged in one.

    >>> [[step + 1 for step in range(12) if is_due(step, 6, fragment, 3)] for fragment in range(3)]
    [[2, 8], [4, 10], [6, 12]]
    """
    return (step + 1 - every * (fragment + 1) // count) % every == 0


class FragmentedShare(Share):
    """Runs one share for each fragment of an optimizer's parameters. It keeps no state but theirs.

    State is saved by parameter name, as that of one share. So a run may resume with another number of fragments.

    Args:
        start: Starts the share of a fragment, given its number and parameters.
        optimizer: Whose parameters they are.
        parameters: In named-parameter order; equal on all ranks.
        wire: Where to communicate.
        count: Number of fragments.
        order: See `fragments_of`.
    """

    def __init__(
        self,
        start: Callable[[int, NamedParameters], Share],
        optimizer: Optimizer,
        parameters: NamedParameters,
        wire: Wire,
        count: int,
        order: FragmentOrder,
    ) -> None:
        self.fragments: list[Share] = []
        self._start = start
        self._count = count
        self._order = order
        self._due: list[Share] = []
        # Those that the last turn has exchanged.
        self._exchanged: list[Share] = []
        self._closes_round = False
        super().__init__(optimizer, parameters, wire)

    def extend(self, parameters: NamedParameters) -> None:
        super().extend(parameters)
        # More layers may move others to another fragment. What is held for them moves along, by name.
        held, in_common = self.state_dict(), {id(weight): shared for weight, shared in self.in_common()}
        failures = {name: each.failure for each in self.fragments for name, _ in each.parameters if each.failure}
        pieces = fragments_of(parameters, self._count, self._order)
        self.fragments = [self._start(number, piece) for number, piece in enumerate(pieces) if piece]
        self.load_state_dict(held)
        for fragment in self.fragments:
            fragment.failure = next((failures[name] for name, _ in fragment.parameters if name in failures), None)
        for weight, shared in self.in_common():
            # State has only what this rank exchanges.
            if id(weight) in in_common:
                shared.copy_(in_common[id(weight)])

    @property
    def overlaps(self) -> bool:
        return any(fragment.overlaps for fragment in self.fragments)

    @property
    def closes_round(self) -> bool:
        return self._closes_round

    def due(self, turn: Turn) -> bool:
        return any(fragment.due(turn) for fragment in self.fragments)

    def before_step(self) -> None:
        for fragment in self.fragments:
            fragment.before_step()

    def skip(self) -> None:
        for fragment in self.fragments:
            fragment.skip()

    def after_step(self) -> None:
        for fragment in self.fragments:
            fragment.after_step()

    def before_update(self) -> None:
        for fragment in self.fragments:
            fragment.before_update()

    def after_update(self) -> None:
        for fragment in self.fragments:
            fragment.after_update()

    def prepare(self, turn: Turn) -> None:
        self._due = [fragment for fragment in self.fragments if fragment.due(turn)]
        for fragment in self._due:
            fragment.prepare(turn)
        self._closes_round = self.fragments[-1] in self._due and self.fragments[-1].closes_round

    def exchange(self) -> None:
        for fragment in self._due:
            fragment.exchange()

    def commit(self) -> None:
        for fragment in self._due:
            fragment.commit()
        self._due, self._exchanged = [], self._due

    def to_hand_out(self) -> list[tuple[Parameter, Tensor]]:
        return [pair for fragment in self._exchanged for pair in fragment.to_hand_out()]

    def handed_out(self) -> None:
        for fragment in self._exchanged:
            fragment.handed_out()

    def in_common(self) -> list[tuple[Parameter, Tensor]]:
        return [pair for fragment in self.fragments for pair in fragment.in_common()]

    def abort(self) -> None:
        """Aborts all fragments, also those that were not due: together they are the last good model."""
        for fragment in self.fragments:
            fragment.abort()
        self._due = []

    def shared_weights(self) -> list[tuple[Tensor, Tensor]] | None:
        kept = [fragment.shared_weights() for fragment in self.fragments]
        if any(pairs is None for pairs in kept):
            return None
        if not any(kept):
            return []
        # Weights of a fragment that was just exchanged are the shared values.
        weights = [weight.detach() for _, weight in self.parameters]
        by_weight = {weight.data_ptr(): (weight, weight) for weight in weights}
        by_weight |= {weight.data_ptr(): (weight, shared) for pairs in kept for weight, shared in pairs or ()}
        return list(by_weight.values())

    def residual_norm(self) -> float:
        return math.hypot(*(fragment.residual_norm() for fragment in self.fragments))

    def hand_back(self) -> dict[int, Tensor]:
        handed: dict[int, Tensor] = {}
        for fragment in self.fragments:
            handed.update(fragment.hand_back())
        return handed

    def state_dict(self) -> Saved:
        merged: Saved = {}
        for fragment in self.fragments:
            for kind, parts in fragment.state_dict().items():
                merged.setdefault(kind, {}).update(parts)
        return merged

    def load_state_dict(self, saved: Saved) -> None:
        for fragment in self.fragments:
            fragment.load_state_dict(saved)


def _sequential(sizes: Sequence[int], count: int) -> list[int]:
    """Fragments of layers in order: each takes layers up to its part of what is left, and leaves one for each other."""
    numbers: list[int] = []
    fragment, held, taken, rest = 0, 0, 0, sum(sizes)
    for place, size in enumerate(sizes):
        others = count - fragment - 1
        full = held + size / 2 > rest / (others + 1)
        if taken and others and (full or len(sizes) - place <= others):
            fragment, held, taken, rest = fragment + 1, 0, 0, rest - held
        numbers.append(fragment)
        held, taken = held + size, taken + 1
    return numbers
