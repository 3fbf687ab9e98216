"""The selectors of the literature: thresholds that are fixed, found for each sign, or found for each bin."""

from collections.abc import Sequence

from lightning_sparsecomm.basis.arguments import check_booleans, renamed
from lightning_sparsecomm.basis.schedules import Density
from lightning_sparsecomm.codecs import AdaptiveBins, Auto, Multiples, SignedMeans, SparseCodec, Threshold, TwoSidedTopK
from lightning_sparsecomm.exchange import Gather
from lightning_sparsecomm.methods.weights import weights_by
from lightning_sparsecomm.sharing import Method


class strom(Method):
    """Sends each element of the residual that reaches a fixed threshold, as a multiple of it; the rest waits.

    Biases and norms are sent whole. Any optimizer works: it applies its own momentum to what is shared.

    Bytes per step and rank: for each element sent, its position in the shortest code, such as 8 bits where 1% are sent,
    a sign bit, and a bit for its multiple where some are above 1; 32 of headers, 8 of length; 4 for each element of
    biases and norms. How many are sent follows from the threshold: about (s / threshold)² of the elements where that is
    far above s, their root mean square.

    Source: Strom 2015, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing. There, an element is sent
    once the threshold in a step, however large it is (`once=True`): gradients that stay above the threshold then pile
    up in the residual, which follows them late. The residual follows the learning rate, and what waits in the end is
    applied; `follow_rate=False` leaves that to the optimizer.

    >>> strom(threshold=0.02)
    strom(threshold=0.02)

    Args:
        threshold: τ, in units of a rank's own gradient. It decides over bytes and quality, and no number suits all
            models: ten times the root mean square of the gradient's elements sends about 1% of them.
        once: Whether an element is sent as τ or −τ, however large it is, as in the paper; otherwise as the largest
            multiple that it reaches.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        follow_rate: Whether the residual follows SGD's learning rate, so that a gradient counts as much as in the step
            that computed it, and what still waits after the last step is applied.

    Raises:
        ValueError: `threshold` is not positive, or not finite, or float32 has no such number.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self, threshold: float = 0.01, once: bool = False, exclude: Sequence[str] = (), follow_rate: bool = True
    ) -> None:
        check_booleans(follow_rate=follow_rate)
        with renamed(step="threshold"):
            codec = SparseCodec(Threshold(threshold), Multiples(threshold, once), Auto())
        super().__init__(weights_by(Gather(codec), True, exclude, follow_rate))


class dryden(Method):
    """Sends the largest of a tensor's positive elements as their mean, and of the negative ones; the rest waits.

    Of each sign the same proportion is sent, so each has a threshold of its own, found anew in each step. Biases and
    norms are sent whole. Any optimizer works: it applies its own momentum to what is shared.

    Bytes per step and rank: for each element sent, its position in the shortest code, such as 8 bits at density 1%, and
    a sign bit; at most 13 for each tensor, 32 of headers, 8 of length; 4 for each element of biases and norms.

    Source: Dryden et al. 2016, Communication Quantization for Data-Parallel Training of Deep Neural Networks. The
    residual follows the learning rate, and what waits in the end is applied; `follow_rate=False` leaves that to the
    optimizer.

    >>> dryden(density=0.02)
    dryden(density=0.02)

    Args:
        density: Fraction of a tensor's elements of each sign that is sent, in (0, 1], or a schedule of it.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        follow_rate: Whether the residual follows SGD's learning rate, so that a gradient counts as much as in the step
            that computed it, and what still waits after the last step is applied.

    Raises:
        ValueError: A density outside (0, 1].
        TypeError: `follow_rate` is neither True nor False.
    """

    def __init__(self, density: Density = 0.01, exclude: Sequence[str] = (), follow_rate: bool = True) -> None:
        check_booleans(follow_rate=follow_rate)
        codec = SparseCodec(TwoSidedTopK(density), SignedMeans(2), Auto())
        super().__init__(weights_by(Gather(codec), True, exclude, follow_rate))


class adacomp(Method):
    """Sends from each bin of a tensor's residual what the next step could make its largest; the rest waits.

    What is sent becomes ± one magnitude for each tensor: the mean of its bins' largest. How much is sent adapts to how
    fast the residual grows. Biases and norms are sent whole. Any optimizer works: it applies its own momentum to what
    is shared.

    Bytes per step and rank: for each element sent, its position in the shortest code, and a sign bit; at most 9 for
    each tensor, 32 of headers, 8 of length; 4 for each element of biases and norms.

    Source: Chen et al. 2018, AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed Training.
    The residual follows the learning rate, and what waits in the end is applied; `follow_rate=False` leaves that to the
    optimizer.

    >>> adacomp(bin_size=1000)
    adacomp(bin_size=1000)

    Args:
        bin_size: Consecutive elements in a bin.
        convolution_bin_size: The same for weights of three or more dimensions.
        all_bins: Whether elements below half of that magnitude are sent too, as in the paper, which makes them larger
            than they are. Otherwise they wait.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        follow_rate: Whether the residual follows SGD's learning rate, so that a gradient counts as much as in the step
            that computed it, and what still waits after the last step is applied.

    Raises:
        ValueError: A size below 1.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        bin_size: int = 500,
        convolution_bin_size: int = 50,
        all_bins: bool = True,
        exclude: Sequence[str] = (),
        follow_rate: bool = True,
    ) -> None:
        check_booleans(follow_rate=follow_rate)
        exchange = Gather(AdaptiveBins(bin_size, convolution_bin_size, all_bins))
        super().__init__(weights_by(exchange, True, exclude, follow_rate))
