"""Ranks train on their own, and exchange their weight changes every few steps."""

import math
from collections.abc import Sequence
from functools import partial

import torch

from lightning_sparsecomm.basis.arguments import check_booleans, is_number
from lightning_sparsecomm.basis.schedules import Density, Every
from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.codecs import Auto, ChunkTopK, Golomb, OneSidedTopK, SharedMean, SparseCodec, TwoBit
from lightning_sparsecomm.exchange import ClientMean, DenseAllReduce, Gather, GatherContributions
from lightning_sparsecomm.exchange.dense import WireDtype
from lightning_sparsecomm.sharing import DeltaSync, Method
from lightning_sparsecomm.sharing.outer import OuterOptimizer
from lightning_sparsecomm.sharing.streamed import Mix
from lightning_sparsecomm.sharing.sync import Buffers


class sbc(Method):
    """Sparse Binary Compression: every few steps, sends the positions of each tensor's largest changes of one sign.

    A rank compares the mean of the k largest positive changes (with the residual) and that of the k largest negative
    ones. It sends the positions on the side with the larger mean, and that mean. So almost all bits are positions: 8.1
    for each at a density of 1%.

    Bytes per exchange and rank, at density p: b + 1/(1 − (1−p)^(2^b)) bits for each position, with Golomb's parameter b
    (4.8 at 10%, 8.1 at 1%, 11.5 at 0.1%), 5 to 9 for each tensor, 40 of headers, and the buffers that change.

    Source: Sattler et al. 2018, Sparse Binary Compression, algorithms 1 to 4, with momentum masking and no warm-up.

    >>> sbc(density=0.01, every=10).syncs[0].every
    10
    >>> sbc(every=Exponential(1, 100, steps=5000)).syncs[0].every
    Exponential(first=1, last=100, steps=5000)

    Args:
        density: Fraction of each tensor's elements sent, in (0, 1], or a schedule of it; at least one element.
        every: Optimizer steps between two exchanges, or a schedule of it.
        error_feedback: Whether to keep what is not sent and add it to the next changes. Training suffers without.
        momentum_masking: Whether to set the optimizer's momentum to zero where this rank sent something.
        buffers: What happens to floating-point buffers: "average" in each exchange, "own" for each rank, or "broadcast"
            before every forward pass, as under ddp.
        exclude: Patterns of parameter names whose changes are sent whole, such as "*.bias".
        fragments: In how many parts of whole layers to exchange the others, each every `every` steps, one after
            another.
        delay: Steps between the start of an exchange and its use; training goes on meanwhile. 0 waits for it.
        mix: The local weights then: "keep" what was trained meanwhile, or their share α in α·w + (1 − α)·anchor.
        residual_in_weights: Whether a rank trains on from all that it has trained, also what it has not sent yet, and
            not from what ranks share, as the paper has it. Better where `every` is 1; only without a delay.

    Raises:
        ValueError: A density outside (0, 1], `every` or `fragments` below 1, or `residual_in_weights` with a delay or
            without error feedback.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        density: Density = 0.01,
        every: Every = 10,
        error_feedback: bool = True,
        momentum_masking: bool = True,
        buffers: Buffers = "average",
        exclude: Sequence[str] = (),
        fragments: int = 1,
        delay: int = 0,
        mix: Mix = "keep",
        residual_in_weights: bool = False,
    ) -> None:
        check_booleans(error_feedback=error_feedback, momentum_masking=momentum_masking)
        codec = SparseCodec(OneSidedTopK(density), SharedMean(), Golomb())
        channel = Channel(Gather(codec), [ErrorFeedback()] if error_feedback else [])
        now = partial(DeltaSync, every=every, buffers=buffers)
        later = partial(now, mask_momentum=momentum_masking, fragments=fragments, delay=delay, mix=mix)
        sparse = later(channel, exclude=exclude, residual_in_weights=residual_in_weights)
        super().__init__([sparse, now(Channel(DenseAllReduce()), parameters=exclude)] if exclude else [sparse])


class sbc1(sbc):
    """The paper's SBC(1): 0.1% of the changes in every step.

    >>> sbc1().syncs[0].every
    1
    """

    def __init__(self) -> None:
        super().__init__(density=0.001, every=1)


class sbc2(sbc):
    """The paper's SBC(2): 1% of the changes every 10 steps.

    >>> sbc2().syncs[0].every
    10
    """

    def __init__(self) -> None:
        super().__init__(density=0.01, every=10)


class sbc3(sbc):
    """The paper's SBC(3): 1% of the changes every 100 steps.

    >>> sbc3().syncs[0].every
    100
    """

    def __init__(self) -> None:
        super().__init__(density=0.01, every=100)


class federated_averaging(Method):
    """Ranks train on their own, and average their weights every few optimizer steps.

    Bytes per exchange and rank: 4 for each element, and for each tensor.

    Source: McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data. All ranks
    train in each round; of those that a round leaves out, what they have trained is dropped, as the paper's clients
    would not have trained.

    >>> federated_averaging(every=50, wire_dtype="bfloat16")
    federated_averaging(every=50, wire_dtype='bfloat16')
    >>> federated_averaging(fraction=0.5, weights=[600, 200, 400, 800])
    federated_averaging(every=100, fraction=0.5, weights=[600, 200, 400, 800])

    Args:
        every: Optimizer steps between two averages, or a schedule of it.
        wire_dtype: Dtype of changes on the wire: "same" (float32 or wider), "float32", "float16" or "bfloat16". What
            narrower ones round off is lost; in float16, so is what exceeds about ±65,000.
        buffers: What happens to floating-point buffers: "average" in each exchange, "own" for each rank, or "broadcast"
            before every forward pass, as under ddp.
        fragments: In how many parts of whole layers to exchange, each every `every` steps, one after another.
        delay: Steps between the start of an exchange and its use; training goes on meanwhile. 0 waits for it.
        mix: The local weights then: "keep" what was trained meanwhile, or their share α in α·w + (1 − α)·anchor.
        fraction: C, the part of the ranks whose changes count in a round, in (0, 1]; drawn anew in each.
        weights: n_k, how much each rank counts, such as its number of samples, in the order of ranks; None for equal
            weights.

    Raises:
        ValueError: `every` below 1, an unknown `wire_dtype`, a fraction outside (0, 1], a weight that is not positive;
            before the first step, not as many weights as ranks.
    """

    def __init__(
        self,
        every: Every = 100,
        wire_dtype: WireDtype = "same",
        buffers: Buffers = "average",
        fragments: int = 1,
        delay: int = 0,
        mix: Mix = "keep",
        fraction: float = 1.0,
        weights: Sequence[float] | None = None,
    ) -> None:
        alike = is_number(fraction) and fraction == 1 and weights is None
        exchange = DenseAllReduce(wire_dtype) if alike else ClientMean(fraction, weights, wire_dtype)
        channel = Channel(exchange)
        super().__init__([DeltaSync(channel, every, buffers=buffers, fragments=fragments, delay=delay, mix=mix)])


class diloco(Method):
    """Federated averaging with an outer optimizer, SGD with Nesterov's momentum, whose gradient is the mean change.

    Bytes per exchange and rank: 4 for each element, and for each tensor.

    Source: Douillard et al. 2023, DiLoCo: Distributed Low-Communication Training of Language Models, which uses AdamW
    as the user's own optimizer.

    >>> diloco(every=100, outer_lr=0.5)
    diloco(every=100, outer_lr=0.5)

    Args:
        every: Optimizer steps between two exchanges, or a schedule of it.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Momentum of the outer optimizer, in [0, 1); 0 for none.
        wire_dtype: Dtype of changes on the wire: "same" (float32 or wider), "float32", "float16" or "bfloat16". What
            narrower ones round off is lost; in float16, so is what exceeds about ±65,000.
        buffers: What happens to floating-point buffers: "average" in each exchange, "own" for each rank, or "broadcast"
            before every forward pass, as under ddp.
        fragments: In how many parts of whole layers to exchange, each every `every` steps, one after another.
        delay: Steps between the start of an exchange and its use; training goes on meanwhile. 0 waits for it.
        mix: The local weights then: "keep" what was trained meanwhile, or their share α in α·w + (1 − α)·anchor.

    Raises:
        ValueError: `every` or `fragments` below 1, a rate that is not positive, a momentum outside [0, 1), or an
            unknown `wire_dtype`.
    """

    def __init__(
        self,
        every: Every = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        wire_dtype: WireDtype = "same",
        buffers: Buffers = "average",
        fragments: int = 1,
        delay: int = 0,
        mix: Mix = "keep",
    ) -> None:
        outer = nesterov(outer_lr, outer_momentum, 0.7)
        channel = Channel(DenseAllReduce(wire_dtype))
        super().__init__([DeltaSync(channel, every, outer, buffers=buffers, fragments=fragments, delay=delay, mix=mix)])


class sparse_loco(Method):
    """Every few steps, sends the largest changes of each chunk of a tensor in 2 bits, with a residual that decays.

    Bytes per exchange and rank, at 64 of 4,096: about 7.5 bits for each position, 2.17 for its value, 40 of headers.

    Source: Sarfi et al. 2025, Communication Efficient LLM Pre-training with SparseLoCo, which uses AdamW as the user's
    own optimizer. The two magnitudes of the 2 bits are the means of the smaller and the larger half of each 192.

    >>> sparse_loco(every=15, density=1 / 32)
    sparse_loco(every=15, density=0.03125)

    Args:
        every: Optimizer steps between two exchanges, or a schedule of it.
        density: Fraction of each chunk's elements sent, in (0, 1], or a schedule of it.
        chunk: Elements in a chunk; no chunk spans two tensors.
        tiles: Whether chunks of matrices are squares, 64 × 64 for 4,096.
        of_senders: Whether a change is the mean over those ranks that sent it, and not over all.
        clip_to_median: Whether a rank's change is scaled down to the median of all ranks' norms.
        decay: Fraction of the residual kept from one exchange to the next, in (0, 1].
        outer_lr: Factor on the mean change; 1 adds it unchanged.
        buffers: What happens to floating-point buffers: "average" in each exchange, "own" for each rank, or "broadcast"
            before every forward pass, as under ddp.
        fragments: In how many parts of whole layers to exchange, each every `every` steps, one after another.
        delay: Steps between the start of an exchange and its use; training goes on meanwhile. 0 waits for it.
        mix: The local weights then: "keep" what was trained meanwhile, or their share α in α·w + (1 − α)·anchor.

    Raises:
        ValueError: `every`, `chunk` or `fragments` below 1, a density or decay outside (0, 1], or a rate that is not
            positive.
    """

    def __init__(
        self,
        every: Every = 30,
        density: Density = 1 / 64,
        chunk: int = 4096,
        decay: float = 0.95,
        outer_lr: float = 1.0,
        buffers: Buffers = "average",
        fragments: int = 1,
        delay: int = 0,
        mix: Mix = "keep",
        tiles: bool = False,
        of_senders: bool = False,
        clip_to_median: bool = False,
    ) -> None:
        _check_rate(outer_lr, 1)
        check_booleans(tiles=tiles, of_senders=of_senders, clip_to_median=clip_to_median)
        codec = SparseCodec(ChunkTopK(density, chunk, tiles), TwoBit(192), Auto())
        exchange = (
            GatherContributions(codec, of_senders, clip_to_median) if of_senders or clip_to_median else Gather(codec)
        )
        outer = partial(torch.optim.SGD, lr=outer_lr) if outer_lr != 1 else None
        channel = Channel(exchange, [ErrorFeedback(decay)])
        super().__init__([DeltaSync(channel, every, outer, buffers=buffers, fragments=fragments, delay=delay, mix=mix)])


def nesterov(outer_lr: float, outer_momentum: float, papers: float) -> OuterOptimizer:
    """SGD with Nesterov's momentum, as the outer optimizer; a `ValueError` where a number makes no sense.

    `papers` is the rate that the method's paper uses.
    """
    _check_rate(outer_lr, papers)
    if not (is_number(outer_momentum) and 0 <= outer_momentum < 1):
        raise ValueError(f"outer_momentum must be in [0, 1); got {outer_momentum!r}. Use 0.9, as the paper does.")
    return partial(torch.optim.SGD, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)


def _check_rate(outer_lr: float, papers: float) -> None:
    if not (is_number(outer_lr) and 0 < outer_lr < math.inf):
        raise ValueError(f"outer_lr must be a positive number; got {outer_lr!r}. Use {papers}, as the paper does.")
