"""Positions that all ranks have in common: values are summed, and bytes do not depend on the number of ranks."""

from collections.abc import Sequence

from lightning_sparsecomm.basis.arguments import check_booleans
from lightning_sparsecomm.basis.schedules import Density
from lightning_sparsecomm.exchange import AlignedTopK, RandomK
from lightning_sparsecomm.methods.weights import weights_by
from lightning_sparsecomm.sharing import Method


class random_k(Method):
    """Sends the gradient at random positions, which all ranks draw alike, so that no position travels.

    The simplest method whose bytes do not depend on the number of ranks, and the one to compare others with. Biases and
    norms are sent whole. Any optimizer works: it applies its own momentum to what is shared.

    Bytes per step and rank: 4 for each of k elements, for each element of biases and norms, and for each tensor.

    Source: Stich et al. 2018, Sparsified SGD with Memory. The residual follows the learning rate, and what waits in the
    end is applied; `follow_rate=False` is the paper's form.

    >>> random_k(density=0.05)
    random_k(density=0.05)

    Args:
        density: Fraction of weights' elements sent, in (0, 1], or a schedule of it; at least one.
        error_feedback: Whether to keep what is not sent and add it to the next gradient. Without, values are multiplied
            by 1 / density: their mean is the gradient, with much noise.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        follow_rate: Whether the residual follows SGD's learning rate, so that a gradient counts as much as in the step
            that computed it, and what still waits after the last step is applied.

    Raises:
        ValueError: A density outside (0, 1].
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        density: Density = 0.01,
        error_feedback: bool = True,
        exclude: Sequence[str] = (),
        follow_rate: bool = True,
    ) -> None:
        check_booleans(error_feedback=error_feedback, follow_rate=follow_rate)
        exchange = RandomK(density, unbiased=not error_feedback)
        super().__init__(weights_by(exchange, error_feedback, exclude, follow_rate))


class aligned_topk(Method):
    """Sends the blocks that are largest in the sum over ranks, as a small all-reduce of projections finds them.

    So no position travels, and the bytes do not depend on the number of ranks. Biases and norms are sent whole. Any
    optimizer works: it applies its own momentum to what is shared.

    Bytes per step and rank: 4 for each element of k blocks, for each of `projections` numbers of every block (0.8% of
    the elements, with the defaults), for each element of biases and norms, and for each tensor twice.

    Source: ARC-Top-K (2025), with blocks of equal length instead of rows. The residual follows the learning rate, and
    what waits in the end is applied; `follow_rate=False` leaves that to the optimizer.

    >>> aligned_topk(density=0.05, block_size=64, projections=4)
    aligned_topk(density=0.05, block_size=64, projections=4)

    Args:
        density: Fraction of each weight's blocks sent, in (0, 1], or a schedule of it; at least one.
        block_size: Elements in a block. Smaller blocks are chosen better, and their projections take more bytes.
        projections: Numbers for each block; more of them find the largest blocks better.
        error_feedback: Whether to keep what is not sent and add it to the next gradient. Training suffers without.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        follow_rate: Whether the residual follows SGD's learning rate, so that a gradient counts as much as in the step
            that computed it, and what still waits after the last step is applied.

    Raises:
        ValueError: A density outside (0, 1], or `block_size` or `projections` below 1.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        density: Density = 0.01,
        block_size: int = 256,
        projections: int = 2,
        error_feedback: bool = True,
        exclude: Sequence[str] = (),
        follow_rate: bool = True,
    ) -> None:
        check_booleans(error_feedback=error_feedback, follow_rate=follow_rate)
        exchange = AlignedTopK(density, block_size, projections)
        super().__init__(weights_by(exchange, error_feedback, exclude, follow_rate))
