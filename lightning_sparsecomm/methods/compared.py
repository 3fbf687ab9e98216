"""The systems that S2 Reducer's paper compares itself with, as compositions of parts."""

from collections.abc import Sequence

from lightning_sparsecomm.basis.arguments import check_booleans, renamed
from lightning_sparsecomm.basis.schedules import Density
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.codecs import ChunkTopK, SparseCodec
from lightning_sparsecomm.exchange import DenseAllReduce, GatherNonZero, RegionSum
from lightning_sparsecomm.methods.dropping import PositionName, ValueName, value_coding
from lightning_sparsecomm.methods.sums import s2_reducer
from lightning_sparsecomm.methods.weights import weights_by
from lightning_sparsecomm.sharing import GradientSync, Method


class parallax(Method):
    """Gathers sparse gradients, and all-reduces dense ones. Exact, as ddp.

    Gradients of layers built with `sparse=True` are sent as rows and values, from each rank to all, and stay sparse for
    the optimizer. So are those of `tables`, whose gradients are dense tensors of mostly zeros.

    Bytes per step and rank: 8 for each run of elements that are not zero, such as a row, 4 for each such element, 24
    and the headers; 4 for each element of all other parameters. On the link, what is gathered counts W − 1 times.

    Source: Kim et al. 2019, Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks. There, parameter
    servers add up the sparse gradients; here each rank does.

    >>> parallax(tables=["embedding.*"])
    parallax(tables=['embedding.*'])

    Args:
        tables: Patterns of parameter names with dense gradients of mostly zeros, which are gathered too.
    """

    def __init__(self, tables: Sequence[str] = ()) -> None:
        with renamed(parameters="tables"):
            dense_tables = GradientSync(Channel(GatherNonZero()), parameters=tables)
        super().__init__(
            [
                GradientSync(Channel(GatherNonZero()), sparse=True),
                *([dense_tables] if tables else []),
                GradientSync(Channel(DenseAllReduce()), rest=True),
            ]
        )


class omnireduce(s2_reducer):
    """Sums the blocks that are not zero on any rank, and skips all others. Exact, as ddp, with all blocks.

    With a `block_density` below 1, each rank sends its blocks of largest norm, and keeps the rest in the residual.

    Bytes per step and rank: a bit for each block, 4 for each element of the union's blocks, and 4 for each element of
    biases and norms, which are sent whole.

    Source: Fei et al. 2021, Efficient Sparse Collective Communication and its Application to Accelerate Distributed
    Deep Learning (OmniReduce). There, aggregators ask for the next blocks that are not zero; here ranks agree on a
    bitmap first.

    >>> omnireduce(block_density=0.1)
    omnireduce(block_density=0.1)

    Args:
        block_density: Fraction of each weight's blocks that a rank sends, in (0, 1], or a schedule of it. 1 sends all
            that are not zero.
        block_size: Most elements in a block; longer rows of a weight are cut into several blocks.
        error_feedback: Whether to keep blocks that are not sent and add them to the next gradient.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        follow_rate: Whether the residual follows SGD's learning rate, so that a gradient counts as much as in the step
            that computed it, and what still waits after the last step is applied.

    Raises:
        ValueError: A density outside (0, 1], or `block_size` below 1.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        block_density: Density = 1.0,
        block_size: int = 256,
        error_feedback: bool = True,
        exclude: Sequence[str] = (),
        follow_rate: bool = True,
    ) -> None:
        check_booleans(error_feedback=error_feedback)
        keeps = error_feedback and block_density != 1
        super().__init__(
            block_density, block_size, None, error_feedback=keeps, exclude=exclude, follow_rate=follow_rate
        )


class sparcml(Method):
    """Sends the largest elements of each bucket; ranks each add up a part, which becomes dense where it fills up.

    A rank sends the k largest of each 512 consecutive elements of gradient plus residual to those that add them up.
    They send what they have added up to all: as positions and values, or, where ranks have filled it up, as a bitmap
    and values. Biases and norms are sent whole. Any optimizer works.

    Bytes on the link per step and rank: about (W − 1) / W times 6 for each element sent (2 of position, 4 of value),
    and as many times 6 for each position that any rank has sent, or 4 and 1/8 for each element; 8 (W − 1) / W for each
    element of biases and norms, and 340 W of headers and lengths.

    Source: Renggli et al. 2019, SparCML: High-Performance Sparse Communication for Machine Learning (split all-gather),
    with 8 of 512. The paper also rounds what is dense by QSGD. Here the residual follows the learning rate, and what
    waits in the end is applied; `follow_rate=False` leaves that to the optimizer.

    >>> sparcml(density=1 / 32)
    sparcml(density=0.03125)

    Args:
        density: Fraction of each bucket's elements sent, in (0, 1], or a schedule of it.
        bucket: Elements in a bucket; no bucket spans two tensors.
        values: Dtype of values on the way to those that add them up, as for `gradient_dropping`: one that rounds each
            value by itself.
        positions: How positions are coded, as for `gradient_dropping`.
        error_feedback: Whether to keep what is not sent and add it to the next gradient. Training suffers without.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        follow_rate: Whether the residual follows SGD's learning rate, so that a gradient counts as much as in the step
            that computed it, and what still waits after the last step is applied.

    Raises:
        ValueError: A density outside (0, 1], `bucket` below 1, or an unknown dtype or code.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        density: Density = 8 / 512,
        bucket: int = 512,
        values: ValueName = "float32",
        positions: PositionName = "fast",
        error_feedback: bool = True,
        exclude: Sequence[str] = (),
        follow_rate: bool = True,
    ) -> None:
        check_booleans(error_feedback=error_feedback, follow_rate=follow_rate)
        with renamed(chunk="bucket"):
            selector = ChunkTopK(density, bucket)
        codec = SparseCodec(selector, *value_coding(values, positions))
        super().__init__(weights_by(RegionSum(codec), error_feedback, exclude, follow_rate))
