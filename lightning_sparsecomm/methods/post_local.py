"""Averages in every step at first, and every few steps later."""

from functools import partial

from lightning_sparsecomm.basis.arguments import check_booleans, check_whole_number
from lightning_sparsecomm.basis.schedules import Stages
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.exchange import DenseAllReduce
from lightning_sparsecomm.exchange.dense import WireDtype
from lightning_sparsecomm.sharing import DeltaSync, Method
from lightning_sparsecomm.sharing.streamed import Mix
from lightning_sparsecomm.sharing.sync import Buffers


class post_local_sgd(Method):
    """Ranks average their weights after every step at first, and every few steps once training has settled.

    With SGD, with or without momentum, the first steps are ddp's, to float round-off, if all ranks have a gradient for
    each parameter: the mean of weights after a step is the step of the mean gradient. With Adam they are not: the
    second moment is then the mean of those of the ranks' own gradients.

    Bytes per exchange and rank: 4 for each element, and as many for each of the optimizer's moments that is averaged.

    Source: Lin et al. 2018, Don't Use Large Mini-Batches, Use Local SGD. There, gradients are averaged in the first
    steps, and momentum is each rank's own later.

    >>> post_local_sgd(dense_steps=500, every=8).syncs[0].every
    Stages(numbers=(1, 8), steps=(0, 500), epochs=())

    Args:
        dense_steps: Optimizer steps after each of which weights are averaged, at least 1.
        every: Optimizer steps between two averages after that.
        average_moments: Whether the optimizer's momentum and moments are averaged with the weights. In the paper they
            are not. With SGD the first steps are ddp's either way.
        wire_dtype: Dtype of changes on the wire: "same" (float32 or wider), "float32", "float16" or "bfloat16".
        buffers: What happens to floating-point buffers: "average" in each exchange, "own" for each rank, or "broadcast"
            before every forward pass, as under ddp.
        fragments: In how many parts of whole layers to exchange later, each every `every` steps, one after another.
        delay: Steps between the start of a later exchange and its use; training goes on meanwhile. 0 waits for it.
        mix: The local weights then: "keep" what was trained meanwhile, or their share α in α·w + (1 − α)·anchor.

    Raises:
        ValueError: `dense_steps`, `every` or `fragments` below 1, a delay of `every` or more, or an unknown
            `wire_dtype`.
        TypeError: `average_moments` is neither True nor False; at setup, an optimizer keeps other state than SGD's
            momentum and Adam's moments, and it is to be averaged.
    """

    def __init__(
        self,
        dense_steps: int = 1000,
        every: int = 16,
        average_moments: bool = True,
        wire_dtype: WireDtype = "same",
        buffers: Buffers = "average",
        fragments: int = 1,
        delay: int = 0,
        mix: Mix = "keep",
    ) -> None:
        check_whole_number("dense_steps", dense_steps, 1, "steps in which all is averaged", "Use 1000, for example.")
        check_whole_number("every", every, 1, "optimizer steps between two averages", "Use 16, for example.")
        check_booleans(average_moments=average_moments)
        moments = dict.fromkeys(("momentum_buffer", "exp_avg", "exp_avg_sq"), 1) if average_moments else None
        streaming = partial(DeltaSync, fragments=fragments, delay=delay, mix=mix, moments=moments)
        stages = Stages([1, every], steps=[0, dense_steps])
        super().__init__([streaming(Channel(DenseAllReduce(wire_dtype)), stages, buffers=buffers)])
