"""Which parameters are exchanged, when, and where the result goes."""

import copy
import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, TypeVar

from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.basis.arguments import check_booleans, check_whole_number
from lightning_sparsecomm.basis.parts import Part
from lightning_sparsecomm.channel import ClipLocalNorm, Momentum
from lightning_sparsecomm.sharing.gradients import NamedParameters, has_few_rows, has_sparse_gradient
from lightning_sparsecomm.sharing.share import Share

Buffers = Literal["average", "own", "broadcast"]

S = TypeVar("S", bound="Sync")


class Sync(Part, ABC):
    """What a method does for some of the parameters. Each parameter belongs to exactly one sync of a method.

    A sync is frozen: it holds no state of any training. `start` makes the share that does the work for one optimizer.

    Args:
        parameters: Shell-style patterns of parameter names, as in `module.named_parameters()`.
        exclude: Patterns of names that are left to other syncs.
        min_dimensions: Parameters of fewer dimensions are left to other syncs.
        rest: Whether it takes what no other sync of the method takes, whatever the patterns.

    Attributes:
        inside: For each `limited` call, patterns of which one must match.
        outside: Patterns of which none may match.

    Raises:
        TypeError: A string is given instead of a list of patterns.
    """

    takes_sparse: bool | None = False
    """Whether it takes the parameters whose gradients are sparse tensors, and no others; None takes both kinds."""

    takes_few_rows: bool | None = None
    """Whether it takes the tables whose gradients have few rows (`note_few_rows`), and no others; None takes both."""

    drifts: bool = False
    """Whether replicas drift apart between exchanges."""

    anchored: bool = False
    """Whether its shares set weights to anchors of their own, so that no other share may set them."""

    shares_gradients: bool = True
    """Whether `.grad` holds the shared gradient after an exchange, and no longer this rank's own."""

    buffers: Buffers = "broadcast"
    """Floating-point buffers: broadcast by ddp, averaged with each exchange of weights, or each rank's own."""

    def __init__(
        self,
        parameters: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        min_dimensions: int = 0,
        rest: bool = False,
    ) -> None:
        for option, patterns in (("parameters", parameters), ("exclude", exclude)):
            if isinstance(patterns, str):
                raise TypeError(
                    f"{option} must be a list of patterns; got the string {patterns!r}. Use [{patterns!r}]."
                )
            if not isinstance(patterns, Sequence) or not all(isinstance(each, str) for each in patterns):
                raise TypeError(
                    f"{option} must be a list of patterns of parameter names; got {patterns!r}. Use [] for none."
                )
        check_booleans(rest=rest)
        check_whole_number("min_dimensions", min_dimensions, 0, "", "Use 2 for weights only.")
        self.parameters = tuple(parameters)
        self.exclude = tuple(exclude)
        self.min_dimensions = min_dimensions
        self.rest = rest
        self.inside: tuple[tuple[str, ...], ...] = ()
        self.outside: tuple[str, ...] = ()

    def limited(self, inside: Sequence[str] = ("*",), outside: Sequence[str] = ()) -> "Sync":
        """The same sync for those of its parameters that match a pattern of `inside`, and none of `outside`."""
        sync = copy.copy(self)
        sync.inside, sync.outside = (*self.inside, tuple(inside)), (*self.outside, *outside)
        return sync

    def taking_few_rows(self: S, takes: bool | None) -> S:
        """The same sync with another `takes_few_rows`."""
        sync = copy.copy(self)
        sync.takes_few_rows = takes
        return sync

    def may_take(self, name: str, parameter: Parameter) -> bool:
        """Whether it could take this parameter if it were the only sync."""
        if self.takes_sparse is not None and self.takes_sparse != has_sparse_gradient(parameter):
            return False
        if self.takes_few_rows is not None and self.takes_few_rows != has_few_rows(parameter):
            return False
        return all(matches(name, patterns) for patterns in self.inside) and not matches(name, self.outside)

    def claims(self, name: str, parameter: Parameter) -> bool:
        """Whether this parameter belongs to this sync, and not as part of the rest; equal on all ranks."""
        if self.rest or parameter.dim() < self.min_dimensions or not self.may_take(name, parameter):
            return False
        return matches(name, self.parameters) and not matches(name, self.exclude)

    def objection(self, optimizer: Optimizer) -> str | None:
        """Why it is not defined for an optimizer, and what to use instead; None where it is."""
        return None

    def check(self, parameters: NamedParameters) -> None:
        """Checks the parameters that belong to it.

        Raises:
            ValueError: It cannot take one of them.
        """

    def joining(self, clip: ClipLocalNorm | None, momentum: Momentum | None) -> "Sync":
        """The same sync, which also does what another sync does instead of the optimizer, for all its parameters.

        `clip` clips each rank's own gradient, `momentum` is applied to what is shared; None where not needed.

        Raises:
            ValueError: It cannot.
        """
        raise ValueError("the optimizer itself does both there. Give these parameters an optimizer of their own.")

    @abstractmethod
    def start(self, optimizer: Optimizer, parameters: NamedParameters, wire: Wire) -> Share:
        """The share that exchanges these of an optimizer's parameters; arguments as for `Share`."""

    def _patterns(self) -> str:
        parts = [f"inside={list(patterns)!r}" for patterns in self.inside if patterns != ("*",)]
        parts += [f"outside={list(self.outside)!r}"] if self.outside else []
        parts += [] if self.parameters == ("*",) else [f"parameters={list(self.parameters)!r}"]
        parts += [f"exclude={list(self.exclude)!r}"] if self.exclude else []
        parts += [f"min_dimensions={self.min_dimensions}"] if self.min_dimensions else []
        parts += ["rest=True"] if self.rest else []
        return "".join(f", {part}" for part in parts)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether any shell-style pattern matches; case matters."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
