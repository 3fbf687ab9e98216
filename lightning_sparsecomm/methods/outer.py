"""DiLoCo with outer gradients in a few bits: streamed, or with Muon as the user's own optimizer."""

from lightning_sparsecomm.basis.arguments import check_booleans
from lightning_sparsecomm.basis.schedules import Every
from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.codecs.blockwise import Bits
from lightning_sparsecomm.exchange import QuantizedAllReduce
from lightning_sparsecomm.methods.periodic import nesterov
from lightning_sparsecomm.sharing import DeltaSync, Method
from lightning_sparsecomm.sharing.streamed import Mix
from lightning_sparsecomm.sharing.sync import Buffers


class streaming_diloco(Method):
    """DiLoCo in parts of whole layers, in 4 bits for each element, each exchanged while training goes on.

    Bytes on the link per exchange of a part and rank: (W − 1) / W for each of its elements, 1/32 more for scales, and
    16 of headers for each of 2 (W − 1) messages.

    Source: Douillard et al. 2025, Streaming DiLoCo with overlapping communication, which uses AdamW as the user's own
    optimizer. The paper rounds to 4 bits with an exponent (E3M0) and no residual. Here they are multiples of a scale
    for each 256 elements, with one.

    >>> streaming_diloco(every=50, fragments=4)
    streaming_diloco(every=50, fragments=4)

    Args:
        every: Optimizer steps between two exchanges of the same part, or a schedule of it.
        fragments: In how many parts to exchange the model; at most as many as it has layers. The paper's have 3 layers.
        delay: Steps between the start of an exchange and its use; training goes on meanwhile. 0 waits for it.
        mix: The local weights then: their share α in α·w + (1 − α)·anchor, or "keep" what was trained meanwhile.
        bits: 8, 4 or 2, for each element on the wire.
        error_feedback: Whether to keep what is rounded off and add it to the next change.
        outer_lr: Learning rate of the outer optimizer, SGD with Nesterov's momentum.
        outer_momentum: Its momentum, in [0, 1); 0 for none.
        buffers: What happens to floating-point buffers: "average" in each exchange, "own" for each rank, or "broadcast"
            before every forward pass, as under ddp.

    Raises:
        ValueError: `every` or `fragments` below 1, `delay` not below `every`, a mix outside [0, 1), other `bits`, a
            rate that is not positive, or a momentum outside [0, 1).
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        every: Every = 100,
        fragments: int = 2,
        delay: int = 5,
        mix: Mix = 0.5,
        bits: Bits = 4,
        error_feedback: bool = True,
        outer_lr: float = 0.4,
        outer_momentum: float = 0.9,
        buffers: Buffers = "average",
    ) -> None:
        check_booleans(error_feedback=error_feedback)
        outer = nesterov(outer_lr, outer_momentum, 0.4)
        channel = Channel(QuantizedAllReduce(bits), [ErrorFeedback()] if error_feedback else [])
        super().__init__([DeltaSync(channel, every, outer, buffers=buffers, fragments=fragments, delay=delay, mix=mix)])


class muloco(Method):
    """DiLoCo in 2 bits for each element, for Muon as the user's own optimizer.

    Muon's steps change all directions of a matrix alike, so their sum loses less by rounding than AdamW's. Any
    optimizer is accepted. `torch.optim.Muon` takes matrices only: give other parameters to AdamW, by manual
    optimization.

    Bytes on the link per exchange and rank: (W − 1) / (2 W) for each element, 1/8 more for magnitudes, and 16 of
    headers for each of 2 (W − 1) messages.

    Source: Thérien et al. 2025, MuLoCo: Muon is a practical inner optimizer for DiLoCo, with the outer rate and
    momentum of DiLoCo. The two magnitudes of the 2 bits are the means of the smaller and the larger ones of each 128
    elements.

    >>> muloco(every=50)
    muloco(every=50)

    Args:
        every: Optimizer steps between two exchanges, or a schedule of it.
        bits: 8, 4 or 2, for each element on the wire.
        error_feedback: Whether to keep what is rounded off and add it to the next change. 2 bits need it.
        outer_lr: Learning rate of the outer optimizer, SGD with Nesterov's momentum.
        outer_momentum: Its momentum, in [0, 1); 0 for none.
        buffers: What happens to floating-point buffers: "average" in each exchange, "own" for each rank, or "broadcast"
            before every forward pass, as under ddp.
        fragments: In how many parts of whole layers to exchange, each every `every` steps, one after another.
        delay: Steps between the start of an exchange and its use; training goes on meanwhile. 0 waits for it.
        mix: The local weights then: "keep" what was trained meanwhile, or their share α in α·w + (1 − α)·anchor.

    Raises:
        ValueError: `every` or `fragments` below 1, other `bits`, a rate that is not positive, or a momentum outside
            [0, 1).
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        every: Every = 30,
        bits: Bits = 2,
        error_feedback: bool = True,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        buffers: Buffers = "average",
        fragments: int = 1,
        delay: int = 0,
        mix: Mix = "keep",
    ) -> None:
        check_booleans(error_feedback=error_feedback)
        outer = nesterov(outer_lr, outer_momentum, 0.7)
        channel = Channel(QuantizedAllReduce(bits), [ErrorFeedback()] if error_feedback else [])
        super().__init__([DeltaSync(channel, every, outer, buffers=buffers, fragments=fragments, delay=delay, mix=mix)])
