"""How replicas are kept together: a method, and what it is made of."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch.nn import Parameter

from lightning_sparsecomm.averaging import Averaging
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.codecs import Compressor, Selector
from lightning_sparsecomm.exchange import Exchange
from lightning_sparsecomm.gradients import NamedParameters
from lightning_sparsecomm.memory import Memory
from lightning_sparsecomm.sync import BucketSync, Sync

T = TypeVar("T")


class Method:
    """How replicas are kept together: one or more syncs, each parameter belonging to exactly one of them.

    Make one with a recipe of `methods`, or from parts of your own:

    >>> from lightning_sparsecomm.codecs import Float16, SparseCodec, TopK
    >>> from lightning_sparsecomm.exchange import Gather
    >>> from lightning_sparsecomm.memory import ErrorFeedback
    >>> from lightning_sparsecomm.sync import GradientSync
    >>> Method([GradientSync(Channel(Gather(SparseCodec(TopK(0.001), Float16())), [ErrorFeedback()]))])
    Method([GradientSync(Channel(Gather(SparseCodec(selector=TopK(density=0.001, scope='model'), ...

    Args:
        syncs: What is exchanged, for which parameters.
        averaging: When replicas that have gone apart are made one again; None for never before the end of fit.
        otherwise: The method for optimizers that this one is not defined for; None refuses them.

    Raises:
        ValueError: There is no sync, a `BucketSync` is not the only one, or more than one sync takes the rest.
    """

    def __init__(
        self, syncs: Sequence[Sync], averaging: Averaging | None = None, otherwise: "Method | None" = None
    ) -> None:
        if not syncs:
            raise ValueError("syncs must name at least one sync; got none. Use dense() to send everything.")
        if len(syncs) > 1 and any(isinstance(sync, BucketSync) for sync in syncs):
            raise ValueError(
                "a BucketSync must be the only sync of a method, since DDP's buckets hold all parameters;"
                f" got {len(syncs)} syncs. Use GradientSync(Channel(DenseAllReduce())) for some of the parameters."
            )
        if len({(sync.within, sync.outside) for sync in syncs if sync.rest}) < sum(sync.rest for sync in syncs):
            raise ValueError("only one sync of a method can take the rest; got several with rest=True.")
        if otherwise is not None and any(isinstance(sync, BucketSync) for sync in (*syncs, *otherwise.syncs)):
            raise ValueError("a BucketSync works inside DDP's hook for all optimizers: it allows of no `otherwise`.")
        self.syncs: tuple[Sync, ...] = tuple(syncs)
        self.averaging = averaging
        self.otherwise = otherwise

    def takes(self, name: str, parameter: Parameter) -> bool:
        """Whether some sync takes this parameter, of itself or with the rest."""
        return any(sync.may_take(name, parameter) if sync.rest else sync.claims(name, parameter) for sync in self.syncs)

    def parts(self, parameters: NamedParameters) -> list[tuple[Sync, NamedParameters]]:
        """Which sync takes which of the parameters; syncs that take none are left out."""
        claims = {name: any(sync.claims(name, parameter) for sync in self.syncs) for name, parameter in parameters}
        parts: list[tuple[Sync, NamedParameters]] = []
        for sync in self.syncs:
            piece = [
                (name, parameter)
                for name, parameter in parameters
                if (not claims[name] and sync.may_take(name, parameter) if sync.rest else sync.claims(name, parameter))
            ]
            if piece:
                parts.append((sync, piece))
        return parts

    def __repr__(self) -> str:
        options = f", averaging={self.averaging!r}" if self.averaging is not None else ""
        options += f", otherwise={self.otherwise!r}" if self.otherwise is not None else ""
        return f"Method({list(self.syncs)!r}{options})"


def parts_in(part: object, kind: type[T]) -> Iterator[T]:
    """Everything of a kind in a method, however deep."""
    if isinstance(part, kind):
        yield part
    elif isinstance(part, (list, tuple)):
        for item in part:
            yield from parts_in(item, kind)
    elif isinstance(part, (Method, Sync, Channel, Memory, Exchange, Compressor, Selector)):
        for item in vars(part).values():
            yield from parts_in(item, kind)
