"""The quantizers of the literature: every element in a few bits, unbiased or with error feedback."""

from collections.abc import Sequence

from lightning_sparsecomm.basis.arguments import check_booleans
from lightning_sparsecomm.channel import Channel, MomentumCorrection
from lightning_sparsecomm.codecs import PowersOfTwo, SignMeans, StochasticLevels
from lightning_sparsecomm.codecs.stochastic_levels import Norm
from lightning_sparsecomm.exchange import DenseAllReduce, Exchange, Gather, MajorityVote, TernarySum
from lightning_sparsecomm.methods.weights import weights_by
from lightning_sparsecomm.sharing import GradientSync, Method


class qsgd(Method):
    """Rounds each element at random to a few multiples of its bucket's norm, and sends those that are not zero.

    Unbiased, and nothing is kept: what rounding adds is noise. Biases and norms are sent whole. Any optimizer works.

    Bytes per step and rank: about 0.26 for each element of weights with 15 levels and the Euclidean norm, 0.05 with one
    level, where gradients are like normal values; 4 for each bucket, 37 of headers, 8 of length; 4 for each element of
    biases and norms.

    Source: Alistarh et al. 2017, QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding.

    >>> qsgd(levels=7, norm="max")
    qsgd(levels=7, norm='max')

    Args:
        levels: Multiples of the norm above zero: 1 to 255.
        bucket: Consecutive elements that share a norm.
        norm: "l2", the Euclidean norm; or "max", the largest magnitude, with less noise and more bytes.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".

    Raises:
        ValueError: `levels` outside 1 to 255, `bucket` outside 1 to 2^32 − 1, or an unknown norm.
    """

    def __init__(self, levels: int = 15, bucket: int = 512, norm: Norm = "l2", exclude: Sequence[str] = ()) -> None:
        super().__init__(_unbiased(Gather(StochasticLevels(levels, bucket, norm)), exclude))


class terngrad(Method):
    """Rounds each element at random to −s, 0 or s, s being the largest magnitude in its tensor on any rank.

    Unbiased but for clipping, and nothing is kept: what rounding adds is noise. Biases and norms are sent whole. Any
    optimizer works.

    Bytes on the link per step and rank: (W − 1) / W times 0.2 for each element of weights, and 0.33 for its sum with
    two ranks, 0.4 with three or four; 4 (W − 1) for each tensor, 48 (W − 1) of headers; 8 (W − 1) / W for each element
    of biases and norms.

    Source: Wen et al. 2017, TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning.

    >>> terngrad(clip=None)
    terngrad(clip=None)

    Args:
        clip: Elements are limited to this many root mean squares of their tensor; None for no limit.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".

    Raises:
        ValueError: `clip` is not positive.
    """

    def __init__(self, clip: float | None = 2.5, exclude: Sequence[str] = ()) -> None:
        super().__init__(_unbiased(TernarySum(clip), exclude))


class natural(Method):
    """Rounds each element at random to a power of two, and sends its sign and exponent: 9 bits.

    Unbiased, and nothing is kept: rounding adds at most 1/8 of the sum of squares. Biases and norms are sent whole. Any
    optimizer works.

    Bytes per step and rank: 1.125 for each element of weights, 20 of headers; 4 for each element of biases and norms.

    Source: Horváth et al. 2019, Natural Compression for Distributed Deep Learning.

    >>> natural(exclude=["head.*"])
    natural(exclude=['head.*'])

    Args:
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
    """

    def __init__(self, exclude: Sequence[str] = ()) -> None:
        super().__init__(_unbiased(Gather(PowersOfTwo()), exclude))


class onebit_sgd(Method):
    """Sends the sign of each element, and two means for each column of a weight; the rest waits in the residual.

    An element becomes the mean of those of its column that are not negative, or of the negative ones. A column's
    elements differ in the first index only, as weights of one input do. Biases and norms are sent whole. Any optimizer
    works: it applies its own momentum to what is shared.

    Bytes per step and rank: 1/8 for each element of weights, 8 for each column, 25 of headers, at most 10 for each
    tensor; 4 for each element of biases and norms.

    Source: Seide et al. 2014, 1-Bit Stochastic Gradient Descent. There, ranks add up pieces, and sums are rounded
    once more. The residual follows the learning rate, and what waits in the end is applied; `follow_rate=False` is the
    paper's form.

    >>> onebit_sgd(follow_rate=False)
    onebit_sgd(follow_rate=False)

    Args:
        error_feedback: Whether to keep what is rounded off and add it to the next gradient. Training suffers without.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        follow_rate: Whether the residual follows SGD's learning rate, so that a gradient counts as much as in the step
            that computed it, and what still waits after the last step is applied.

    Raises:
        TypeError: A switch is neither True nor False.
    """

    def __init__(self, error_feedback: bool = True, exclude: Sequence[str] = (), follow_rate: bool = True) -> None:
        check_booleans(error_feedback=error_feedback, follow_rate=follow_rate)
        super().__init__(weights_by(Gather(SignMeans("column", 2)), error_feedback, exclude, follow_rate))


class ef_signsgd(Method):
    """Sends the sign of each element, and the mean magnitude of each tensor; the rest waits in the residual.

    Biases and norms are sent whole. Any optimizer works: it applies its own momentum to what is shared.

    Bytes per step and rank: 1/8 for each element of weights, at most 10 for each tensor, 25 of headers; 4 for
    each element of biases and norms.

    Source: Karimireddy et al. 2019, Error Feedback Fixes SignSGD and other Gradient Compression Schemes, algorithm 1,
    whose residual follows the learning rate too. Here, what waits in the end is applied as well.

    >>> ef_signsgd()
    ef_signsgd()

    Args:
        error_feedback: Whether to keep what is rounded off and add it to the next gradient. Training suffers without.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        follow_rate: Whether the residual follows SGD's learning rate, so that a gradient counts as much as in the step
            that computed it, and what still waits after the last step is applied.

    Raises:
        TypeError: A switch is neither True nor False.
    """

    def __init__(self, error_feedback: bool = True, exclude: Sequence[str] = (), follow_rate: bool = True) -> None:
        check_booleans(error_feedback=error_feedback, follow_rate=follow_rate)
        super().__init__(weights_by(Gather(SignMeans("tensor", 1)), error_feedback, exclude, follow_rate))


class signsgd(Method):
    """Shares the sign that most ranks' gradients have, for each element of every parameter: −1, 0 or 1.

    So each step moves each element by the learning rate or not at all. Use a rate as for Adam, such as 0.001 or less.
    Nothing is kept. Any optimizer works with `momentum_correction=False`.

    Bytes on the link per step and rank: 2 (W − 1) / W times 0.2 for each element, 32 (W − 1) of headers.

    Source: Bernstein et al. 2018, signSGD: Compressed Optimisation for Non-Convex Problems (majority vote); Bernstein
    et al. 2019, signSGD with Majority Vote is Communication Efficient and Fault Tolerant, for momentum before the vote.

    >>> signsgd(momentum_correction=False)
    signsgd(momentum_correction=False)

    Args:
        momentum_correction: Whether SGD's momentum is applied before the vote, as in Signum. Otherwise the optimizer,
            which may then be any, applies its own to what is shared: it adds up votes, and SGD's steps grow with it.
        exclude: Patterns of parameter names whose gradients are sent whole, such as "head.*".

    Raises:
        TypeError: `momentum_correction` is neither True nor False.
    """

    def __init__(self, momentum_correction: bool = True, exclude: Sequence[str] = ()) -> None:
        check_booleans(momentum_correction=momentum_correction)
        memories = [MomentumCorrection(False)] if momentum_correction else []
        super().__init__(
            [
                GradientSync(Channel(MajorityVote(), memories), exclude=exclude),
                GradientSync(Channel(DenseAllReduce(), memories), rest=True),
            ]
        )


def _unbiased(exchange: Exchange, exclude: Sequence[str]) -> list[GradientSync]:
    """Weights by an exchange whose mean is that of gradients, so that nothing is kept; all else whole."""
    return weights_by(exchange, error_feedback=False, exclude=exclude, follow_rate=False)
