"""Each rank adds up a region of the vector: the largest elements of the sum, in bytes that hardly grow with ranks."""

from collections.abc import Sequence

from lightning_sparsecomm.basis.arguments import check_booleans
from lightning_sparsecomm.basis.schedules import Density
from lightning_sparsecomm.exchange import OkTopK
from lightning_sparsecomm.methods.dropping import PositionName, ScopeName, ValueName, codec_of, selector_of
from lightning_sparsecomm.methods.weights import weights_by
from lightning_sparsecomm.sharing import Method


class ok_topk(Method):
    """Sends the largest elements of gradient plus residual, of which ranks each add up a region and share the largest.

    As `gradient_dropping`, but the k largest elements of the sum are shared, and not all that any rank has selected. So
    the bytes hardly grow with ranks. Biases and norms are sent whole. Any optimizer works: it applies its own momentum
    to what is shared.

    Bytes per step and rank on the link, with W ranks: 2 (W − 1) / W times 6 for each of k elements (2 of position, 4 of
    value; 4 with float16), up to 6 more for each where ranks have unequal parts, 8 (W − 1) / W for each element of
    biases and norms, and 340 times W.

    Source: Li & Hoefler 2022, Near-Optimal Sparse Allreduce for Distributed Deep Learning (Ok-Topk). Here, thresholds
    are new in each step, the residual follows the learning rate, and what waits in the end is applied;
    `follow_rate=False` leaves that to the optimizer.

    >>> ok_topk(density=0.02)
    ok_topk(density=0.02)

    Args:
        density: Fraction of weights' elements sent, in (0, 1], or a schedule of it.
        scope: What a rank ranks together: all weights of the "model", as in the paper, each "tensor", or each tensor
            with small ones sent more densely ("balanced"), or those that have more to send in each step, by their
            "norm" or their "entropy" (`LayerwiseTopK`).
        values: Dtype of values on the wire, as for `gradient_dropping`. What is rounded off stays in residuals.
        positions: How positions are coded: "fast" takes 2 bytes for each element sent; "short" is the shortest of five
            codes, and ranks tell each other their messages' lengths once more.
        balance_every: Rounds for which ranks keep the regions that they add up, while these are even.
        error_feedback: Whether to keep what is not sent and add it to the next gradient. Training suffers without.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        follow_rate: Whether the residual follows SGD's learning rate, so that a gradient counts as much as in the step
            that computed it, and what still waits after the last step is applied.

    Raises:
        ValueError: A density outside (0, 1], an unknown scope, dtype or code, or `balance_every` below 1.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        density: Density = 0.01,
        scope: ScopeName = "model",
        values: ValueName = "float32",
        positions: PositionName = "fast",
        balance_every: int = 64,
        error_feedback: bool = True,
        exclude: Sequence[str] = (),
        follow_rate: bool = True,
    ) -> None:
        check_booleans(error_feedback=error_feedback, follow_rate=follow_rate)
        exchange = OkTopK(codec_of(selector_of(density, scope), values, positions), balance_every)
        super().__init__(weights_by(exchange, error_feedback, exclude, follow_rate))
