"""Whole gradients in a few bits for each element."""

from collections.abc import Sequence

from lightning_sparsecomm.basis.arguments import check_booleans
from lightning_sparsecomm.codecs.blockwise import Bits
from lightning_sparsecomm.exchange import QuantizedAllReduce
from lightning_sparsecomm.methods.weights import weights_by, with_rows
from lightning_sparsecomm.sharing import Method


class quantized(Method):
    """Sends every element of weights' gradients in 8, 4 or 2 bits; ranks each sum a piece, and send it on in as many.

    The bytes on the link hardly depend on the number of ranks. What is rounded off stays in residuals. Biases and norms
    are sent whole. Any optimizer works: it applies its own momentum to what is shared.

    Bytes on the link per step and rank: 2 (W − 1) / W for each element of weights (half with 4 bits), 1/64 more for
    scales, 16 of headers for each of 2 (W − 1) messages, and 8 (W − 1) / W for each element of biases and norms.

    Source: the compressed all-reduce of 1-bit Adam (Tang et al. 2021), whose two roundings are fed back. It has a bit
    for each element and a scale for a piece; here there are 8 or 4 bits, and a scale for each 256 elements.

    >>> quantized(bits=4)
    quantized(bits=4)

    Args:
        bits: 8, 4 or 2, for each element.
        error_feedback: Whether to keep what is rounded off and add it to the next gradient.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        follow_rate: Whether the residual follows SGD's learning rate, so that a gradient counts as much as in the step
            that computed it, and what still waits after the last step is applied.
        few_rows: As for `gradient_dropping`.

    Raises:
        ValueError: `bits` is none of these.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        bits: Bits = 8,
        error_feedback: bool = True,
        exclude: Sequence[str] = (),
        follow_rate: bool = True,
        few_rows: bool = False,
    ) -> None:
        check_booleans(error_feedback=error_feedback, follow_rate=follow_rate)
        syncs = weights_by(QuantizedAllReduce(bits), error_feedback, exclude, follow_rate)
        super().__init__(with_rows(syncs, few_rows, exclude))
