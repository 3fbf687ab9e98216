"""Ranks add up whole gradients, sketches or blocks, so bytes hardly depend on the number of ranks."""

from collections.abc import Sequence

from lightning_sparsecomm.basis.arguments import check_booleans, renamed
from lightning_sparsecomm.basis.schedules import Density
from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.codecs import TopBlocks
from lightning_sparsecomm.exchange import BlockReduce, DenseAllReduce, SketchedTopK
from lightning_sparsecomm.exchange.block import SizedBy
from lightning_sparsecomm.exchange.dense import WireDtype
from lightning_sparsecomm.exchange.sketched import Recovery, SketchDtype
from lightning_sparsecomm.methods.corrected import corrected
from lightning_sparsecomm.sharing import BucketSync, GradientSync, Method


class dense(Method):
    """Averages whole gradients by all-reduce during the backward pass, as DDP does, and counts the bytes.

    Bytes per step and rank: one element of the wire's dtype for each of n. "same" gives DDP's result to the bit; half
    precision saves half the bytes and rounds.

    >>> dense(wire_dtype="bfloat16")
    dense(wire_dtype='bfloat16')

    Args:
        wire_dtype: "same" (the gradient's own), "float32", "float16" or "bfloat16".

    Raises:
        ValueError: Unknown `wire_dtype`.
    """

    def __init__(self, wire_dtype: WireDtype = "same") -> None:
        super().__init__([BucketSync(wire_dtype)])


class sketched_sgd(Method):
    """Shares the largest elements of the sum over ranks of accumulated momentum, found in a count sketch of that sum.

    Their number, and so the bytes, does not depend on the number of ranks.

    Bytes per step and rank: 4 for each of rows × columns numbers of the sketch (2 in half precision), 4 for each
    candidate, for each element of biases and norms, which are sent whole, and for each tensor.

    Source: Ivkin et al. 2019, Communication-efficient distributed SGD with Sketching, algorithm 3. As in its
    experiments, biases are sent whole. Nesterov's momentum and
    clipping are those of Deep Gradient Compression.

    >>> sketched_sgd(density=0.001, candidates=390)
    sketched_sgd(density=0.001, candidates=390)
    >>> sketched_sgd(recovery="heavymix", momentum_correction=False)  # algorithm 2
    sketched_sgd(density=None, momentum_correction=False, recovery='heavymix')

    Args:
        density: Fraction of the weights' elements shared, in (0, 1], or a schedule of it. None is 0.001.
        k: Number of elements shared, instead of a density.
        rows: Rows of the sketch.
        columns: Columns of the sketch; None for ten times k, as in the paper's larger runs.
        candidates: P; the exact sums of P times k elements are exchanged, and the k largest of them shared.
        sketch_dtype: Dtype of the sketch on the wire: "same" (float32 or wider), "float16", or "bfloat16", which suits
            gradients of any scale.
        always_sketch: Whether to sketch even where the whole vector takes fewer bytes.
        clip: Largest norm of the averaged gradient; each rank's own is clipped for it. None uses the Trainer's
            gradient_clip_val, if there is one.
        momentum_correction: Whether to apply momentum before the exchange. Otherwise the optimizer, which may then be
            any, applies its own after it.
        momentum_masking: Whether to set momentum to zero where something was sent, as in the paper's experiments. What
            it throws away is lost: with momentum 0.9 nine tenths of the gradient at density 1, and 9% at 0.01.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        follow_rate: Whether the residual follows SGD's learning rate, as in algorithm 2, so that a gradient counts as
            much as in the step that computed it, and what still waits after the last step is applied.
        recovery: How elements are found: "candidates", P times k of them, as in the paper's experiments; or
            "heavymix", as in algorithms 1 and 2: all with large estimates, filled up to k with random ones.

    Raises:
        ValueError: A density outside (0, 1]; k, rows, columns or candidates below 1; k above the number of elements; a
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
        momentum_masking: bool = False,
        exclude: Sequence[str] = (),
        follow_rate: bool = True,
        recovery: Recovery = "candidates",
    ) -> None:
        check_booleans(always_sketch=always_sketch, momentum_correction=momentum_correction)
        check_booleans(momentum_masking=momentum_masking, follow_rate=follow_rate)
        with renamed(wire_dtype="sketch_dtype"):
            sketched = SketchedTopK(density, k, rows, columns, candidates, sketch_dtype, always_sketch, recovery)
        super().__init__(corrected(sketched, clip, momentum_correction, momentum_masking, exclude, follow_rate))


class s2_reducer(Method):
    """Sums blocks of elements, such as an embedding's rows, of which most are zero or left out, in a count sketch.

    Of each weight a rank sends the blocks of largest norm, and keeps the rest in the residual. If most of a gradient's
    blocks are zero already, as in an embedding, it sends all that are not. Ranks agree on the union of their blocks,
    and add up its elements in a count sketch. Embeddings with `sparse=True` are sent in the same way, and their
    gradients stay sparse.

    Bytes per step and rank: a bit for each block, 4·λ for each element of the union's blocks, and 4 for each element of
    biases and norms, which are sent whole.

    Source: S2 Reducer: High-Performance Sparse Communication to Accelerate Distributed Deep Learning, algorithm 1. In
    the paper the sketch's size follows from what one rank sends, and its hashes are fixed. Here the size follows from
    the union, and the hashes change in every step.

    >>> s2_reducer(sketch_ratio=None)  # sends the blocks themselves
    s2_reducer(block_density=0.03125, sketch_ratio=None)

    Args:
        block_density: Fraction of each weight's blocks that a rank sends, in (0, 1], or a schedule of it; at least one.
        block_size: Most elements in a block; longer rows of a weight are cut into several blocks.
        sketch_ratio: λ, the sketch's size relative to what it holds. None, or 1 and more, sends the blocks themselves.
        rows: Rows of the sketch; an estimate is their median.
        sized_by: What λ is relative to: the elements of the union, or of the rank that has most, as in the paper.
        always_sketch: Whether to sketch even where the sketch is longer than what it holds.
        sparse_below: The fraction of non-zero blocks below which all of them are sent, in [0, 1].
        error_feedback: Whether to keep blocks that are not sent and add them to the next gradient.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        follow_rate: Whether the residual follows SGD's learning rate, so that a gradient counts as much as in the step
            that computed it, and what still waits after the last step is applied. The paper's does not.

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
        follow_rate: bool = True,
    ) -> None:
        check_booleans(always_sketch=always_sketch, error_feedback=error_feedback, follow_rate=follow_rate)
        with renamed(density="block_density", size="block_size"):
            some, all_blocks = (TopBlocks(density, block_size, sparse_below) for density in (block_density, 1.0))
        top, whole = (BlockReduce(each, sketch_ratio, rows, sized_by, always_sketch) for each in (some, all_blocks))
        memories = [ErrorFeedback(follow_rate=follow_rate)] if error_feedback else []
        syncs = [
            GradientSync(Channel(top, memories), exclude=exclude, min_dimensions=2),
            GradientSync(Channel(whole), exclude=exclude, sparse=True),
            *([GradientSync(Channel(BlockReduce()), parameters=exclude, sparse=True)] if exclude else []),
        ]
        super().__init__([*syncs, GradientSync(Channel(DenseAllReduce()), rest=True)])
