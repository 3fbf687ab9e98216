"""Local optimizers whose moments are averaged too, less often than the weights."""

from functools import partial

from lightning_sparsecomm.basis.arguments import check_whole_number
from lightning_sparsecomm.basis.schedules import Every
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.exchange import DenseAllReduce
from lightning_sparsecomm.exchange.dense import WireDtype
from lightning_sparsecomm.sharing import DeltaSync, Method
from lightning_sparsecomm.sharing.streamed import Mix
from lightning_sparsecomm.sharing.sync import Buffers


class des_loc(Method):
    """Ranks train on their own; weights are averaged every few steps, the optimizer's moments less often.

    Moments change more slowly than weights, and the second more slowly than the first. Averaging them keeps them from
    the noise of a rank's small batches.

    Bytes per exchange and rank, with the defaults: 4 for each element and tensor, and on average 2 more for Adam's
    moments.

    Source: Iacob et al. 2025, DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models,
    with fixed periods. It is for Adam and AdamW; SGD's momentum counts as the first moment, and SGD
    without momentum has none.

    >>> des_loc(every=50)
    des_loc(every=50)

    Args:
        every: Optimizer steps between two averages of the weights, or a schedule of it.
        first_every: Averages of the weights from one average of the first moment to the next.
        second_every: The same for the second moment.
        wire_dtype: Dtype of weight changes on the wire: "same" (float32 or wider), "float32", "float16" or "bfloat16".
            Moments travel in float32 or wider.
        buffers: What happens to floating-point buffers: "average" in each exchange, "own" for each rank, or "broadcast"
            before every forward pass, as under ddp.
        fragments: In how many parts of whole layers to exchange, each every `every` steps, one after another.
        delay: Steps between the start of an exchange and its use; training goes on meanwhile. 0 waits for it.
        mix: The local weights then: "keep" what was trained meanwhile, or their share α in α·w + (1 − α)·anchor.

    Raises:
        ValueError: `every`, `first_every`, `second_every` or `fragments` below 1, a delay of `every` or more, or an
            unknown `wire_dtype`.
        TypeError: At setup, with an optimizer that keeps other state than these moments.
    """

    def __init__(
        self,
        every: Every = 100,
        first_every: int = 3,
        second_every: int = 6,
        wire_dtype: WireDtype = "same",
        buffers: Buffers = "average",
        fragments: int = 1,
        delay: int = 0,
        mix: Mix = "keep",
    ) -> None:
        check_whole_number("first_every", first_every, 1, "averages of the weights to one of moments", "Use 3.")
        check_whole_number("second_every", second_every, 1, "averages of the weights to one of moments", "Use 6.")
        moments = {"exp_avg": first_every, "momentum_buffer": first_every, "exp_avg_sq": second_every}
        streaming = partial(DeltaSync, fragments=fragments, delay=delay, mix=mix, moments=moments)
        super().__init__([streaming(Channel(DenseAllReduce(wire_dtype)), every, buffers=buffers)])
