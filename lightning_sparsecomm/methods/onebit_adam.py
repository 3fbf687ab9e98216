"""1-bit Adam: Adam as with ddp at first; then the second moment is frozen, and signs of the first are sent."""

from collections.abc import Sequence

from lightning_sparsecomm.basis.arguments import renamed
from lightning_sparsecomm.basis.schedules import Every, PartOfRun
from lightning_sparsecomm.channel import Channel, ClipLocalNorm, ErrorFeedback, SharedAdam
from lightning_sparsecomm.codecs import SignMeans
from lightning_sparsecomm.exchange import CompressedAllReduce, DenseAllReduce, Staged
from lightning_sparsecomm.sharing import GradientSync, Method


class onebit_adam(Method):
    """For Adam and AdamW: sends gradients whole at first, then the signs of each rank's first moment, and a mean each.

    In the first 15% of the run it is Adam with ddp. Then the second moment is frozen. Each rank sends β1·m + (1 − β1)·g
    as signs and the mean magnitude of each tensor; ranks each add up a piece, and send signs of its mean. What signs
    leave out, on both ways, is sent later. Learning rate, betas, epsilon and weight decay are read from the user's
    torch.optim.Adam or AdamW in each step. `.grad` holds the direction m̂ / √v̂ while weights are stepped. Tensors of one
    dimension (biases, norms) are sent whole, and left to the optimizer.

    Bytes on the link per step and rank: those of ddp at first; then 2 (W − 1) / W times 1/8 for each element of
    weights, up to 14 for each tensor in each of 2 (W − 1) messages, 25 of headers there, and 8 (W − 1) / W for each
    element of biases and norms.

    Source: Tang et al. 2021, 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed,
    algorithm 1. The floor of the second moment is ours, and so is a mean for each tensor and piece.

    >>> onebit_adam(warmup_steps=500)
    onebit_adam(warmup_steps=500)

    Args:
        warmup_steps: Optimizer steps in which gradients are sent whole, at least 1, or a schedule of that number. None
            is 15% of the run, or 1,000 where its length is not known.
        clip: Largest norm of the averaged gradient; each rank's own is clipped for it. None uses the Trainer's
            gradient_clip_val, if there is one.
        floor: The least root of a second moment, relative to the root mean square of its tensor's, once moments are
            sent. 0 is the paper's form, with which elements of small gradients can take steps without bound.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*". Embeddings of which
            few rows have a gradient in each step suit no scale for a whole tensor.

    Raises:
        ValueError: `warmup_steps` below 1, a clip that is not positive, or a floor outside [0, 1].
    """

    def __init__(
        self,
        warmup_steps: Every | None = None,
        clip: float | None = None,
        floor: float = 0.01,
        exclude: Sequence[str] = (),
    ) -> None:
        first_steps = PartOfRun(0.15) if warmup_steps is None else warmup_steps
        with renamed(steps="warmup_steps", max_norm="clip"):
            before, moments = ClipLocalNorm(clip), SharedAdam(first_steps, floor)
            how = Staged(DenseAllReduce(), CompressedAllReduce(SignMeans()), first_steps)
        weights = Channel(how, [before, moments, ErrorFeedback(follow_rate=False)])
        super().__init__(
            [
                GradientSync(weights, exclude=exclude, min_dimensions=2),
                GradientSync(Channel(DenseAllReduce(), [ClipLocalNorm(clip)]), rest=True),
            ]
        )
