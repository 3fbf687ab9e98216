"""The recipes: each published method as a composition of parts.

A recipe is a subclass of `Method` that only makes its parts. It is named like the function that it is used as; being a
class lets LightningCLI list it, find it by its bare name, and show its help.
"""

from collections.abc import Callable, Sequence
from typing import Literal

from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.codecs import Float16, Float32, Raw32, SparseCodec, TopK
from lightning_sparsecomm.exchange import DenseAllReduce, Gather
from lightning_sparsecomm.exchange.dense import WireDtype
from lightning_sparsecomm.memory import ErrorFeedback
from lightning_sparsecomm.schedules import Density
from lightning_sparsecomm.sync import BucketSync, GradientSync, Sync


class Method:
    """How gradients are synchronized: one or more syncs, each parameter belonging to exactly one of them.

    Make one with a recipe of this module, or from parts of your own:

    >>> from lightning_sparsecomm.codecs import Float16
    >>> Method([GradientSync(Channel(Gather(SparseCodec(TopK(0.001), Float16())), [ErrorFeedback()]))])
    Method([GradientSync(Channel(Gather(SparseCodec(selector=TopK(density=0.001, scope='model'), ...

    Args:
        syncs: What is exchanged, for which parameters.

    Raises:
        ValueError: There is no sync, or a `BucketSync` is not the only one.
    """

    def __init__(self, syncs: Sequence[Sync]) -> None:
        if not syncs:
            raise ValueError("syncs must name at least one sync; got none. Use dense() to send everything.")
        if len(syncs) > 1 and any(isinstance(sync, BucketSync) for sync in syncs):
            raise ValueError(
                "a BucketSync must be the only sync of a method, since DDP's buckets hold all parameters;"
                f" got {len(syncs)} syncs. Use GradientSync(Channel(DenseAllReduce())) for some of the parameters."
            )
        self.syncs = tuple(syncs)

    def __repr__(self) -> str:
        return f"Method({list(self.syncs)!r})"


class dense(Method):
    """All gradients, averaged by all-reduce while the backward pass goes on: what DDP does, with the bytes counted.

    Bytes: n elements of the wire's dtype. With "same" the result is DDP's; a narrower dtype rounds, and saves half.

    Args:
        wire_dtype: "same" (the gradient's own), "float32", "float16" or "bfloat16".

    Raises:
        ValueError: Unknown `wire_dtype`.
    """

    def __init__(self, wire_dtype: WireDtype = "same") -> None:
        super().__init__([BucketSync(wire_dtype)])


class gradient_dropping(Method):
    """The largest elements of gradient plus residual are sent; the rest waits in the residual.

    Bytes per step and rank: 8 for each element sent (4 of position, 4 of value; 6 with float16), 32 of
    headers, and a bit for each tensor.

    Source: Aji & Heafield 2017, Sparse Communication for Distributed Gradient Descent. Divided by the number of ranks,
    as DDP does; the paper sums.

    Args:
        density: Fraction of elements sent, in (0, 1], or a schedule of it.
        scope: Whether the largest are sought in the whole model, as in the paper, or in each tensor.
        values: Dtype of the values on the wire. What float16 rounds off stays in the residual.
        error_feedback: Whether what is not sent is kept and added to the next gradient. Training suffers without.
        exclude: Patterns of parameter names that are sent dense in the same step, such as "*.bias".

    Raises:
        ValueError: A density outside (0, 1], or an unknown scope or dtype.
    """

    def __init__(
        self,
        density: Density = 0.01,
        scope: Literal["model", "tensor"] = "model",
        values: Literal["float32", "float16"] = "float32",
        error_feedback: bool = True,
        exclude: Sequence[str] = (),
    ) -> None:
        codecs = {"float32": Float32(), "float16": Float16()}
        if values not in codecs:
            raise ValueError(
                f"values must be one of {', '.join(codecs)}; got {values!r}. Use 'float32' to send them exactly."
            )
        sparse = Gather(SparseCodec(TopK(density, scope), codecs[values], Raw32()))
        memories = [ErrorFeedback()] if error_feedback else []
        syncs: list[Sync] = [GradientSync(Channel(sparse, memories), exclude=exclude)]
        if exclude:
            syncs.append(GradientSync(Channel(DenseAllReduce()), parameters=exclude))
        super().__init__(syncs)


RECIPES: dict[str, Callable[[], Method]] = {"dense": dense, "gradient_dropping": gradient_dropping}
"""Methods that have a strategy name of their own, `sparsecomm_` and the key."""


def default() -> Method:
    """What `strategy="sparsecomm"` means."""
    return gradient_dropping(density=0.01)
