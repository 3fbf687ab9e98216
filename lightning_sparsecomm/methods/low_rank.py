"""Gradients of weights as products of two thin matrices."""

from collections.abc import Sequence

from lightning_sparsecomm.basis.arguments import check_booleans
from lightning_sparsecomm.exchange import PowerSGD
from lightning_sparsecomm.methods.weights import weights_by
from lightning_sparsecomm.sharing import Method


class powersgd(Method):
    """Sends each weight's gradient plus residual as a product of two thin matrices, which ranks sum.

    The bytes do not depend on the number of ranks. Biases and norms are sent whole. Any optimizer works: it applies its
    own momentum to what is shared.

    Bytes per step and rank: 4 for each of rank · (rows + columns) numbers of a weight, where `shape[0]` is its rows,
    for each element of biases and norms, and for each tensor. A weight that this makes no shorter is sent whole.

    Source: Vogels et al. 2019, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization. The
    residual follows the learning rate, and what waits in the end is applied; `follow_rate=False` is the paper's form.

    >>> powersgd(rank=4, exclude=["embedding.*"])
    powersgd(rank=4, exclude=['embedding.*'])

    Args:
        rank: Columns of the two matrices: more are closer to the gradient, and take more bytes.
        dense_steps: Optimizer steps at the start that send everything whole; torch's `start_powerSGD_iter`.
        warm_start: Whether to begin with the matrices of the step before; training suffers without.
        error_feedback: Whether to keep what is not sent and add it to the next gradient. Training suffers without.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        follow_rate: Whether the residual follows SGD's learning rate, so that a gradient counts as much as in the step
            that computed it, and what still waits after the last step is applied.

    Raises:
        ValueError: `rank` below 1, or `dense_steps` below 0.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        rank: int = 2,
        dense_steps: int = 0,
        warm_start: bool = True,
        error_feedback: bool = True,
        exclude: Sequence[str] = (),
        follow_rate: bool = True,
    ) -> None:
        check_booleans(error_feedback=error_feedback, follow_rate=follow_rate)
        factors = PowerSGD(rank, dense_steps, warm_start)
        super().__init__(weights_by(factors, error_feedback, exclude, follow_rate))
