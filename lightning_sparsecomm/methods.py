"""The recipes: each published method as a composition of parts.

A recipe is a subclass of `Method` that only makes its parts. It is named like the function that it is used as; being a
class lets LightningCLI list it, find it by its bare name, and show its help.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch

from lightning_sparsecomm.averaging import Averaging
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.checks import check_switches, is_number
from lightning_sparsecomm.codecs import (
    Auto,
    ChunkTopK,
    Float16,
    Float32,
    Golomb,
    OneSidedTopK,
    RunLength16,
    SharedMean,
    SparseCodec,
    TopBlocks,
    TopK,
    TwoBit,
)
from lightning_sparsecomm.delta_sync import Buffers, DeltaSync
from lightning_sparsecomm.exchange import BlockReduce, DenseAllReduce, Exchange, Gather, SketchedTopK
from lightning_sparsecomm.exchange.block import SizedBy
from lightning_sparsecomm.exchange.dense import WireDtype
from lightning_sparsecomm.exchange.sketched import SketchDtype
from lightning_sparsecomm.local_mode import LOCAL_MODES, LocalName
from lightning_sparsecomm.memory import ClipLocalNorm, ErrorFeedback, Memory, Momentum, MomentumCorrection
from lightning_sparsecomm.method import Method
from lightning_sparsecomm.schedules import Density, Every, warmed
from lightning_sparsecomm.sync import BucketSync, GradientSync, Sync

Scope = Literal["model", "tensor"]
ValueName = Literal["float32", "float16"]


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

    Bytes per step and rank: 6 for each element sent (2 of position, 4 of value; 4 with float16), 32 of headers, and a
    bit for each tensor. With a local mode, also the parameters once every `average_every` steps, and whenever the
    model is validated or saved.

    Source: Aji & Heafield 2017, Sparse Communication for Distributed Gradient Descent; local modes, averaging and
    warm-up: Combining Global Sparse Gradients with Local Gradients. Divided by the number of ranks, as DDP does; the
    papers sum.

    Args:
        density: Fraction of elements sent, in (0, 1], or a schedule of it.
        scope: Whether the largest are sought in the whole model, as in the paper, or in each tensor.
        values: Dtype of the values on the wire. What float16 rounds off stays in the residual.
        error_feedback: Whether what is not sent is kept and added to the next gradient. Training suffers without.
        exclude: Patterns of parameter names that are sent dense in the same step, such as "*.bias".
        local: What the optimizer sees of a rank's own gradient g, S being what it sent, G what all sent: "none"
            G, "sum" (G + g)/2, "partial" G − S + g, "error" the same without error feedback. Each divided by W.
        average_every: With a local mode, parameters are averaged over ranks every so many steps; None never does.
        average_buffers: Whether floating-point buffers are averaged with them.
        average_optimizer_state: Whether the optimizer's state is averaged with them.
        warmup_steps: T, of a drop ratio of (1 − density)^max(1, T/t) in step t: at first nearly all is sent. 0: none.
        momentum_masking: Whether the optimizer's own momentum (SGD's, Adam's first) is set to zero where something was
            sent.

    Raises:
        ValueError: A density outside (0, 1], an unknown scope, dtype or local mode, `average_every` below 1, or more
            to average where nothing is.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        density: Density = 0.01,
        scope: Scope = "model",
        values: ValueName = "float32",
        error_feedback: bool = True,
        exclude: Sequence[str] = (),
        local: LocalName = "none",
        average_every: int | None = 500,
        average_buffers: bool = False,
        average_optimizer_state: bool = False,
        warmup_steps: int = 0,
        momentum_masking: bool = False,
    ) -> None:
        check_switches(
            error_feedback=error_feedback,
            average_buffers=average_buffers,
            average_optimizer_state=average_optimizer_state,
            momentum_masking=momentum_masking,
        )
        if local not in (*LOCAL_MODES, "error"):
            raise ValueError(
                f"local must be one of {', '.join(LOCAL_MODES)}, error; got {local!r}."
                " 'partial' with parameter averaging served the paper best."
            )
        averaging = None
        if local == "none" and (average_buffers or average_optimizer_state):
            raise ValueError(
                "average_buffers and average_optimizer_state need a local mode, with which ranks' parameters are"
                " averaged; got local='none'. Use the callback ParameterAveraging, which averages with any method."
            )
        if average_every is not None:
            averaging = Averaging(average_every, average_buffers, average_optimizer_state)
        elif local != "none":
            warnings.warn(
                f"local={local!r} lets every rank's parameters go their own way, and with average_every=None nothing"
                " brings them together before the end of fit. The paper averages every 500 steps.",
                stacklevel=2,
            )
        keeps = error_feedback and local != "error"
        mode: Literal["none", "sum", "partial"] = "partial" if local == "error" else local
        channel = Channel(
            _gather(warmed(density, warmup_steps, None, "inverse_time"), scope, values),
            [ErrorFeedback()] if keeps else [],
        )
        syncs: list[Sync] = [GradientSync(channel, exclude=exclude, local=mode, mask_momentum=momentum_masking)]
        if exclude:
            syncs.append(GradientSync(Channel(DenseAllReduce()), parameters=exclude))
        super().__init__(syncs, averaging if mode != "none" else None)


class dgc(Method):
    """Deep Gradient Compression: the largest elements of each tensor's residual, which takes in momentum.

    Local clipping, momentum correction, momentum factor masking and a warm-up of the density; tensors of one dimension
    (biases, norms) go dense and get the same momentum. Momentum, dampening, Nesterov's method and weight decay are read
    from the user's own torch.optim.SGD in each step, and switched off in it while it steps.

    Bytes per step and rank: 6 for each element sent (2 of position, 4 of value; 4 with float16), 4 for each
    element of the others, and 32 of headers.

    Source: Lin et al. 2018, Deep Gradient Compression. Selection is the exact top-k, found by a sampled threshold that
    over-selects.

    Args:
        density: Fraction of each tensor's elements sent, in (0, 1], or a schedule of it (which has no further warm-up).
        warmup_steps: Optimizer steps in which the density falls in 4 stages, as density^((stage+1)/5). 0 for none.
        warmup_epochs: The warm-up in epochs instead, one stage each; the paper has 4. Needs a Trainer.
        clip: Largest norm of the averaged gradient, which each rank's own is clipped for. None takes over the Trainer's
            gradient_clip_val, if there is one.
        momentum_correction: Whether momentum is applied before the exchange; else by the optimizer, which may then be
            any.
        momentum_masking: Whether momentum is set to zero wherever something was sent.
        scope: Whether the largest are sought in each tensor, as in the paper, or in the whole model.
        values: Dtype of the values on the wire. What float16 rounds off stays in the residual.
        exclude: Patterns of more parameter names that are sent dense, such as "head.*".

    Raises:
        ValueError: A density outside (0, 1], a clip that is not positive, or an unknown scope or dtype.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        density: Density = 0.001,
        warmup_steps: int = 1000,
        warmup_epochs: int | None = None,
        clip: float | None = None,
        momentum_correction: bool = True,
        momentum_masking: bool = True,
        scope: Scope = "tensor",
        values: ValueName = "float32",
        exclude: Sequence[str] = (),
    ) -> None:
        check_switches(momentum_correction=momentum_correction, momentum_masking=momentum_masking)
        sparse = _gather(warmed(density, warmup_steps, warmup_epochs, "exponential"), scope, values)
        super().__init__(_corrected(sparse, clip, momentum_correction, momentum_masking, exclude))


class sbc(Method):
    """Sparse Binary Compression: every so many optimizer steps, the largest weight changes of each tensor, of one sign.

    The k largest positive and the k largest negative changes (with the residual) are compared by their means; the
    greater side's positions are sent, and that one mean. So bits go for positions alone: 8.1 each at a density of 1%.

    Bytes per exchange and rank, at density p: b + 1/(1 − (1−p)^(2^b)) bits for each position, b being Golomb's
    parameter (4.8 at 10%, 8.1 at 1%, 11.5 at 0.1%), 5 to 9 for each tensor, 40 of headers, and the buffers that change.

    Source: Sattler et al. 2018, Sparse Binary Compression, algorithms 1 to 4, with momentum masking and no warm-up.

    Args:
        density: Fraction of each tensor's elements sent, in (0, 1], or a schedule of it; at least one element.
        every: Optimizer steps between two exchanges, or a schedule of it.
        error_feedback: Whether what is not sent is kept and added to the next changes. Training suffers without.
        momentum_masking: Whether the optimizer's own momentum is set to zero where this rank sent something.
        buffers: Whether floating-point buffers are averaged each time ("average"), stay each rank's ("own"), or
            are broadcast before every forward pass as under ddp ("broadcast").
        exclude: Patterns of parameter names whose changes are sent whole, such as "*.bias".

    Raises:
        ValueError: A density outside (0, 1], or `every` below 1.
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
    ) -> None:
        check_switches(error_feedback=error_feedback, momentum_masking=momentum_masking)
        codec = SparseCodec(OneSidedTopK(density), SharedMean(), Golomb())
        channel = Channel(Gather(codec), [ErrorFeedback()] if error_feedback else [])
        sparse = DeltaSync(channel, every, mask_momentum=momentum_masking, buffers=buffers, exclude=exclude)
        dense = DeltaSync(Channel(DenseAllReduce()), every, buffers=buffers, parameters=exclude)
        super().__init__([sparse, dense] if exclude else [sparse])


class sbc1(sbc):
    """The paper's SBC(1): 0.1% of the changes in every step."""

    def __init__(self) -> None:
        super().__init__(density=0.001, every=1)


class sbc2(sbc):
    """The paper's SBC(2): 1% of the changes every 10 steps."""

    def __init__(self) -> None:
        super().__init__(density=0.01, every=10)


class sbc3(sbc):
    """The paper's SBC(3): 1% of the changes every 100 steps."""

    def __init__(self) -> None:
        super().__init__(density=0.01, every=100)


class federated_averaging(Method):
    """Ranks train by themselves, and their weights are averaged every so many optimizer steps.

    Bytes per exchange and rank: 4 for each element, and for each tensor.

    Source: McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data; here all
    ranks take part in each round, with equal weights.

    Args:
        every: Optimizer steps between two averages, or a schedule of it.
        wire_dtype: Dtype of the changes on the wire: "same" (float32 or wider), "float32", "float16" or "bfloat16".
            What narrower ones round off is lost, and in float16 what of a change goes beyond some ±65,000.
        buffers: Whether floating-point buffers are averaged too ("average"), stay each rank's ("own"), or are broadcast
            before every forward pass as under ddp ("broadcast").

    Raises:
        ValueError: `every` below 1, or an unknown `wire_dtype`.
    """

    def __init__(self, every: Every = 100, wire_dtype: WireDtype = "same", buffers: Buffers = "average") -> None:
        super().__init__([DeltaSync(Channel(DenseAllReduce(wire_dtype)), every, buffers=buffers)])


class diloco(Method):
    """Federated averaging whose mean change is the gradient of an outer optimizer: SGD with Nesterov's momentum.

    Bytes per exchange and rank: 4 for each element, and for each tensor.

    Source: Douillard et al. 2023, DiLoCo: Distributed Low-Communication Training of Language Models; with AdamW as the
    user's own optimizer there.

    Args:
        every: Optimizer steps between two exchanges, or a schedule of it.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Its momentum, in [0, 1); 0 for none.
        wire_dtype: Dtype of the changes on the wire: "same" (float32 or wider), "float32", "float16" or "bfloat16".
            What narrower ones round off is lost, and in float16 what of a change goes beyond some ±65,000.
        buffers: Whether floating-point buffers are averaged too ("average"), stay each rank's ("own"), or are broadcast
            before every forward pass as under ddp ("broadcast").

    Raises:
        ValueError: `every` below 1, a rate that is not positive, a momentum outside [0, 1), or an unknown `wire_dtype`.
    """

    def __init__(
        self,
        every: Every = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        wire_dtype: WireDtype = "same",
        buffers: Buffers = "average",
    ) -> None:
        _check_rate(outer_lr, 0.7)
        if not (is_number(outer_momentum) and 0 <= outer_momentum < 1):
            raise ValueError(f"outer_momentum must be in [0, 1); got {outer_momentum!r}. Use 0.9, as the paper.")
        nesterov = outer_momentum > 0
        outer = partial(torch.optim.SGD, lr=outer_lr, momentum=outer_momentum, nesterov=nesterov)
        channel = Channel(DenseAllReduce(wire_dtype))
        super().__init__([DeltaSync(channel, every, outer, buffers=buffers)])


class sparse_loco(Method):
    """The largest changes of each chunk in 2 bits, every so many optimizer steps, with a residual that fades.

    Bytes per exchange and rank, at 64 of 4,096: some 7.5 bits for each position, 2.5 for its value, and 40 of headers.

    Source: Sarfi et al. 2025, Communication Efficient LLM Pre-training with SparseLoCo; with AdamW as the user's own
    optimizer there. The two magnitudes of the 2 bits are means of the smaller and the larger half of each 64.

    Args:
        every: Optimizer steps between two exchanges, or a schedule of it.
        density: Fraction of each chunk's elements that is sent, in (0, 1], or a schedule of it.
        chunk: Elements of a chunk; tensors are cut into chunks by themselves.
        decay: Part of the residual that is kept from one exchange to the next, in (0, 1].
        outer_lr: Factor on the mean change; 1 adds it as it is.
        buffers: Whether floating-point buffers are averaged each time ("average"), stay each rank's ("own"), or
            are broadcast before every forward pass as under ddp ("broadcast").

    Raises:
        ValueError: `every` or `chunk` below 1, a density or decay outside (0, 1], a rate that is not positive.
    """

    def __init__(
        self,
        every: Every = 30,
        density: Density = 1 / 64,
        chunk: int = 4096,
        decay: float = 0.95,
        outer_lr: float = 1.0,
        buffers: Buffers = "average",
    ) -> None:
        _check_rate(outer_lr, 1)
        codec = SparseCodec(ChunkTopK(density, chunk), TwoBit(), Auto())
        outer = partial(torch.optim.SGD, lr=outer_lr) if outer_lr != 1 else None
        channel = Channel(Gather(codec), [ErrorFeedback(decay)])
        super().__init__([DeltaSync(channel, every, outer, buffers=buffers)])


class sketched_sgd(Method):
    """The largest elements of the sum over ranks of all momentum that waited, found in a count sketch of it.

    Unlike the largest of each rank, they are as many with any number of ranks, and so are the bytes.

    Bytes per step and rank: 4 for each of rows × columns numbers of the sketch (2 in half precision), 4 for each of the
    candidates, and for each element of biases and norms, which are sent whole, and for each tensor.

    Source: Ivkin et al. 2019, Communication-efficient distributed SGD with Sketching, algorithm 3, with momentum set to
    zero where something was sent, and biases apart, as its experiments have it; Nesterov's momentum and clipping as
    in Deep Gradient Compression.

    Args:
        density: Fraction of the elements of weights shared, in (0, 1], or a schedule of it. None is 0.001.
        k: How many elements are shared, instead of a density.
        rows: Rows of the sketch.
        columns: Its columns; None for ten times k, as in the paper's larger runs.
        candidates: P, how many times k elements have their exact sums exchanged, of which the k largest are shared.
        sketch_dtype: Dtype of the sketch on the wire: "same" (float32 or wider), "float16" or "bfloat16", which is for
            gradients of any scale.
        always_sketch: Whether the sketch is used even where it would take more bytes than everything does.
        clip: Largest norm of the averaged gradient, which each rank's own is clipped for. None takes over the Trainer's
            gradient_clip_val, if there is one.
        momentum_correction: Whether momentum is applied before the exchange; else by the optimizer, which may then be
            any.
        momentum_masking: Whether momentum is set to zero wherever something was sent.
        exclude: Patterns of more parameter names that are sent whole, such as "head.*".

    Raises:
        ValueError: A density outside (0, 1]; k, rows, columns or candidates below 1; k greater than what there is; a
            clip that is not positive; an unknown dtype.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        density: Density | None = None,
        k: int | None = None,
        rows: int = 5,
        columns: int | None = None,
        candidates: float = 36,
        sketch_dtype: SketchDtype = "same",
        always_sketch: bool = False,
        clip: float | None = None,
        momentum_correction: bool = True,
        momentum_masking: bool = True,
        exclude: Sequence[str] = (),
    ) -> None:
        check_switches(
            always_sketch=always_sketch, momentum_correction=momentum_correction, momentum_masking=momentum_masking
        )
        sketched = SketchedTopK(density, k, rows, columns, candidates, sketch_dtype, always_sketch)
        super().__init__(_corrected(sketched, clip, momentum_correction, momentum_masking, exclude))


class s2_reducer(Method):
    """Blocks of which most are zero, such as an embedding's rows, or made so by taking the largest: in a sketch.

    Of weights each rank takes the blocks of largest norm, and what remains waits in the residual; where a gradient's
    blocks are mostly zero by themselves, as an embedding's are, it takes all that are not. Ranks agree on the union of
    their blocks, whose elements are then summed in a count sketch. Embeddings with `sparse=True` go the same way, and
    their gradients stay sparse.

    Bytes per step and rank: a bit for each block, then 4·λ for each element of the union's blocks; 4 for each element
    of biases and norms, which are sent whole.

    Source: S2 Reducer: High-Performance Sparse Communication to Accelerate Distributed Deep Learning, algorithm 1. The
    paper takes the sketch's size of what one rank sends, and keeps its hashes; here it is of the union, and they change
    in every step.

    Args:
        block_density: Fraction of each weight's blocks that a rank sends, in (0, 1], or a schedule of it; at least one.
        block_size: The most elements of a block: rows of a weight are cut into blocks where they are longer.
        sketch_ratio: λ, the sketch's size by that of what it holds. None, and 1 and more, send that itself, exactly.
        rows: The sketch's rows; the estimate is their median.
        sized_by: What λ is taken of: the elements of the union, or of the rank that has most, as in the paper.
        always_sketch: Whether the sketch is used even where it is longer than what it holds.
        sparse_below: The fraction of non-zero blocks below which all of them are sent, in [0, 1].
        error_feedback: Whether blocks that are not sent are kept and added to the next gradient.
        exclude: Patterns of more parameter names that are sent whole, such as "head.*".

    Raises:
        ValueError: A density outside (0, 1], `block_size` or `rows` below 1, or a ratio that is not positive.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        block_density: Density = 1 / 32,
        block_size: int = 256,
        sketch_ratio: float | None = 0.5,
        rows: int = 1,
        sized_by: SizedBy = "union",
        always_sketch: bool = False,
        sparse_below: float = 0.5,
        error_feedback: bool = True,
        exclude: Sequence[str] = (),
    ) -> None:
        check_switches(always_sketch=always_sketch, error_feedback=error_feedback)

        def reduce(density: Density) -> BlockReduce:
            return BlockReduce(
                TopBlocks(density, block_size, sparse_below), sketch_ratio, rows, sized_by, always_sketch
            )

        top = Channel(reduce(block_density), [ErrorFeedback()] if error_feedback else [])
        super().__init__(
            [
                GradientSync(top, exclude=exclude, min_dimensions=2),
                GradientSync(Channel(reduce(1.0)), exclude=exclude, sparse=True),
                *([GradientSync(Channel(BlockReduce()), parameters=exclude, sparse=True)] if exclude else []),
                GradientSync(Channel(DenseAllReduce()), rest=True),
            ]
        )


class split(Method):
    """One method for some of the parameters, such as embeddings, and another for the rest.

    >>> split(["embedding.*"], s2_reducer(sketch_ratio=None), dgc(density=0.001))
    split([GradientSync(Channel(BlockReduce(...

    Where one of them takes over momentum or clipping from an optimizer that holds parameters of both (dgc), the other
    does the same with what it shares.

    Args:
        parameters: Shell-style patterns of the parameters' names.
        method: Theirs.
        rest: That of all others.

    Raises:
        ValueError: Both average parameters, or one is different for different optimizers.
        TypeError: `parameters` is not a list of patterns, or one of the others is no method.
    """

    def __init__(self, parameters: Sequence[str], method: Method, rest: Method) -> None:
        if isinstance(parameters, str) or not parameters or not all(isinstance(each, str) for each in parameters):
            raise TypeError(
                f"parameters must be a list of patterns of names, not empty; got {parameters!r}. Use ['embedding.*']."
            )
        for option, each in (("method", method), ("rest", rest)):
            if not isinstance(each, Method):
                raise TypeError(f"{option} must be a Method, such as methods.dgc(); got {each!r}.")
            if each.otherwise is not None:
                raise ValueError(f"{option} must be one method for all optimizers; got {each!r}. Name one of the two.")
        if method.averaging is not None and rest.averaging is not None:
            raise ValueError("method and rest both average all parameters. Leave it to one, with average_every=None.")
        super().__init__(
            [
                *(sync.limited(within=parameters) for sync in method.syncs),
                *(sync.limited(outside=parameters) for sync in rest.syncs),
            ],
            method.averaging or rest.averaging,
        )


def _corrected(
    exchange: Exchange, clip: float | None, correction: bool, masking: bool, exclude: Sequence[str]
) -> list[Sync]:
    """Weights through an exchange, their momentum and residual before it; all else whole, its momentum after it."""
    before: list[Memory] = [ClipLocalNorm(clip)]
    after: list[Memory] = [ClipLocalNorm(clip)]
    if correction:
        before.append(MomentumCorrection(masking))
        after.append(Momentum())
    return [
        GradientSync(
            Channel(exchange, [*before, ErrorFeedback()]),
            exclude=exclude,
            min_dimensions=2,
            mask_momentum=masking and not correction,
        ),
        GradientSync(Channel(DenseAllReduce(), after), rest=True),
    ]


def _check_rate(outer_lr: float, papers: float) -> None:
    if not (is_number(outer_lr) and 0 < outer_lr < math.inf):
        raise ValueError(f"outer_lr must be a positive number; got {outer_lr!r}. Use {papers}, as the paper.")


def _gather(density: Density, scope: Scope, values: ValueName) -> Gather:
    codecs = {"float32": Float32(), "float16": Float16()}
    if values not in codecs:
        raise ValueError(
            f"values must be one of {', '.join(codecs)}; got {values!r}. Use 'float32' to send them exactly."
        )
    return Gather(SparseCodec(TopK(density, scope), codecs[values], RunLength16()))


RECIPES: dict[str, Callable[[], Method]] = {
    "dense": dense,
    "gradient_dropping": gradient_dropping,
    "dgc": dgc,
    "sbc": sbc,
    "federated_averaging": federated_averaging,
    "diloco": diloco,
    "sparse_loco": sparse_loco,
    "sketched_sgd": sketched_sgd,
    "s2_reducer": s2_reducer,
}
"""Methods that have a strategy name of their own, `sparsecomm_` and the key."""


def default() -> Method:
    """What `strategy="sparsecomm"` means: dgc for optimizers that it is defined for (SGD), else gradient dropping."""
    return Method(dgc().syncs, otherwise=gradient_dropping(density=0.01))
