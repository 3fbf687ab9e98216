"""A method: its syncs, and which parameters belong to which."""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import Parameter

from lightning_sparsecomm.basis.arguments import check_options, options_of, plain_for_command_lines
from lightning_sparsecomm.basis.parts import Part
from lightning_sparsecomm.sharing.averaging import Averaging
from lightning_sparsecomm.sharing.bucket import BucketSync
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.sync import Sync

RunSize = tuple[float, int]
"""A run's optimizer steps, infinite where unknown, and its ranks, 0 where unknown."""

# Arguments that the call of a recipe shows even at their defaults.
_TELLING = ("density", "block_density", "every")


class Method(Part):
    """How ranks share what they train: one or more syncs. Each parameter belongs to exactly one of them.

    Use a recipe of `methods`, or combine parts:

    >>> from lightning_sparsecomm.codecs import Float16, SparseCodec, TopK
    >>> from lightning_sparsecomm.exchange import Gather
    >>> from lightning_sparsecomm.channel import Channel, ErrorFeedback
    >>> from lightning_sparsecomm.sharing import GradientSync
    >>> Method([GradientSync(Channel(Gather(SparseCodec(TopK(0.001), Float16())), [ErrorFeedback()]))])
    Method([GradientSync(Channel(Gather(SparseCodec(selector=TopK(density=0.001, scope='model'), ...

    Args:
        syncs: What is exchanged, and for which parameters.
        averaging: When to average replicas that drift; None averages them only at the end of training.
        fallback: The method for optimizers that this one is not defined for; None refuses them.

    Raises:
        ValueError: There is no sync; a `BucketSync` has other syncs or a fallback beside it; or several syncs have
            `rest=True`.
    """

    by_run: Callable[[float, int], "Method"] | None = None
    """Makes what a run of so many steps and ranks uses instead, at its start; None for a method that fits any."""

    call: str | None = None
    """How a recipe was called, such as `dgc(density=0.01)`; None for a method composed by hand."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        make = cls.__init__

        @functools.wraps(make)
        def noted(self: Method, *args: Any, **options: Any) -> None:
            with plain_for_command_lines():
                known = options_of(make)
                if type(self) is cls and known is not None:
                    check_options(cls.__name__, options, known)
                make(self, *args, **options)
            if type(self) is cls:
                self.call = _call_of(cls, args, options)

        cls.__init__ = noted  # type: ignore[method-assign]

    def __init__(
        self, syncs: Sequence[Sync], averaging: Averaging | None = None, fallback: "Method | None" = None
    ) -> None:
        if not isinstance(syncs, Sequence) or not all(isinstance(sync, Sync) for sync in syncs):
            raise TypeError(f"syncs must be a list of syncs; got {syncs!r}. Use [GradientSync(...)], for example.")
        if averaging is not None and not isinstance(averaging, Averaging):
            raise TypeError(
                f"averaging must be an Averaging; got {averaging!r}. Use Averaging(every=500), for example."
            )
        if fallback is not None and not isinstance(fallback, Method):
            raise TypeError(
                f"fallback must be a Method; got {fallback!r}. Use methods.gradient_dropping(), for example."
            )
        if not syncs:
            raise ValueError("syncs must name at least one sync; got none. Use dense() to send everything.")
        if len(syncs) > 1 and any(isinstance(sync, BucketSync) for sync in syncs):
            raise ValueError(
                "a BucketSync must be the only sync of a method, since DDP's buckets hold all parameters;"
                f" got {len(syncs)} syncs. Use GradientSync(Channel(DenseAllReduce())) for some of the parameters."
            )
        if len({(sync.inside, sync.outside) for sync in syncs if sync.rest}) < sum(sync.rest for sync in syncs):
            raise ValueError("only one sync of a method can take the rest; got several with rest=True. Set it for one.")
        if fallback is not None and any(isinstance(sync, BucketSync) for sync in (*syncs, *fallback.syncs)):
            raise ValueError(
                "fallback must be None with a BucketSync, which works in DDP's hook for all optimizers; got one."
                " Use GradientSync(Channel(DenseAllReduce())) instead of the BucketSync."
            )
        self.syncs: tuple[Sync, ...] = tuple(syncs)
        self.averaging = averaging
        self.fallback = fallback

    def takes(self, name: str, parameter: Parameter) -> bool:
        """Whether some sync exchanges this parameter, by its patterns or as part of the rest."""
        return any(sync.may_take(name, parameter) if sync.rest else sync.claims(name, parameter) for sync in self.syncs)

    def parts(self, parameters: NamedParameters) -> list[tuple[Sync, NamedParameters]]:
        """Each sync with those of the parameters that belong to it; syncs without any are left out."""
        return [(sync, piece) for sync, piece in zip(self.syncs, _pieces(self.syncs, parameters)) if piece]

    def candidates(self, parameters: NamedParameters) -> list[tuple[Sync, NamedParameters]]:
        """As `parts`, but a table is in each sync to which it may belong, as it is found later whether it has few rows.

        What a method does for an optimizer follows from these, and so from nothing that is found later.
        """
        syncs = [sync.taking_few_rows(None) for sync in self.syncs]
        return [(sync, piece) for sync, piece in zip(self.syncs, _pieces(syncs, parameters)) if piece]

    def with_fallback(self, fallback: "Method") -> "Method":
        """The same method, with one for optimizers that it is not defined for."""
        Method(self.syncs, self.averaging, fallback)
        method = copy.copy(self)
        method.fallback = fallback
        if self.by_run is not None:
            method.by_run = functools.partial(_by_run_with, self.by_run, fallback)
        return method

    @property
    def chain(self) -> list["Method"]:
        """The method and its fallbacks."""
        return [self, *([] if self.fallback is None else self.fallback.chain)]

    def for_run(self, steps: float, ranks: int) -> "Method":
        """The method of a run of so many optimizer steps, infinite where unknown; itself unless it depends on them."""
        return self if self.by_run is None else self.by_run(steps, ranks)

    def following(self, by_run: Callable[[float, int], "Method"]) -> "Method":
        """The same method, for which a run uses what `by_run` makes of its steps and ranks, where it can."""
        method = copy.copy(self)
        method.by_run = by_run
        return method

    def with_syncs(self, syncs: Sequence[Sync]) -> "Method":
        """The same method with other syncs, and without fallback."""
        method = copy.copy(self)
        method.syncs, method.fallback, method.by_run = tuple(syncs), None, None
        return method

    def __repr__(self) -> str:
        """The call that made it, if a recipe did; else its parts."""
        if self.call is not None:
            return self.call if self.fallback is None else f"{self.call}.with_fallback({self.fallback!r})"
        options = f", averaging={self.averaging!r}" if self.averaging is not None else ""
        options += f", fallback={self.fallback!r}" if self.fallback is not None else ""
        return f"Method({list(self.syncs)!r}{options})"


def _by_run_with(by_run: Callable[[float, int], Method], fallback: Method, steps: float, ranks: int) -> Method:
    return by_run(steps, ranks).with_fallback(fallback)


def _pieces(syncs: Sequence[Sync], parameters: NamedParameters) -> list[NamedParameters]:
    """What each sync takes; those that take the rest, what no sync claims."""
    rest = [pair for pair in parameters if not any(sync.claims(*pair) for sync in syncs)]
    return [
        [pair for pair in (rest if sync.rest else parameters) if (sync.may_take if sync.rest else sync.claims)(*pair)]
        for sync in syncs
    ]


def _call_of(recipe: type[Method], args: Sequence[Any], options: Mapping[str, Any]) -> str:
    """A recipe's call, with the arguments that are not at their defaults, and how much is sent, or how often."""
    signature = inspect.signature(recipe)
    bound = signature.bind(*args, **options)
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        arguments |= value if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    shown = [
        f"{name}={value!r}"
        for name, value in arguments.items()
        if name not in signature.parameters
        or not _equal(value, signature.parameters[name].default)
        or (name in _TELLING and not _equal(value, 1))
    ]
    return f"{recipe.__name__}({', '.join(shown)})"


def _equal(value: Any, default: Any) -> bool:
    # LightningCLI makes lists of tuples.
    if isinstance(value, (list, tuple)) and isinstance(default, (list, tuple)):
        return list(value) == list(default)
    return value is default or (type(value) is type(default) and value == default)
