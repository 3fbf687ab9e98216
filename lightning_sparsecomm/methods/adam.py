"""Adam and AdamW, of whose directions the largest elements are sent."""

from collections.abc import Sequence

from lightning_sparsecomm.basis.schedules import Density, Every, warmed
from lightning_sparsecomm.channel import Channel, ErrorFeedback, LocalAdam
from lightning_sparsecomm.methods.corrected import EACH_STEP, Steps, clipping_at
from lightning_sparsecomm.methods.dropping import ExchangeName, PositionName, ScopeName, ValueName, sparse
from lightning_sparsecomm.methods.weights import RestBits, rest, with_rows
from lightning_sparsecomm.sharing import GradientSync, Method


class local_adam(Method):
    """For Adam and AdamW: each rank keeps the moments of its own gradient, and sends the direction that they give.

    A rank adds its direction, times the learning rate, to a residual, and sends the residual's largest elements. So no
    second moment sees sparse gradients, which trains badly. Learning rate, betas, epsilon and weight decay are read
    from the user's torch.optim.Adam or AdamW in each step. `.grad` holds the shared direction while weights are
    stepped. Tensors of one dimension (biases, norms) are sent whole, and left to the optimizer; but where a rank steps
    along its own directions (with one of the last three options), they have moments and a residual too.

    Bytes per step and rank: 6 for each element sent (2 of position, 4 of value; 4 with float16), 4 for each element of
    the tensors that are sent whole, and 32 of headers; 36 to 132 for each other tensor, in each of the first 300 steps
    and in one of eight later.

    Source: Tang et al. 2021, 1-bit Adam, which sends what local moments say, after steps of dense Adam; its second
    moment is frozen then. Here each rank keeps its own from the first step on, corrected for what the mean over ranks
    leaves of the gradients' noise. The correction is ours.

    >>> local_adam(density=0.01, values="bfloat16")
    local_adam(density=0.01, values='bfloat16')

    Args:
        density: Fraction of the weights' elements sent, in (0, 1], or a schedule of it, which has no further warm-up.
        warmup_steps: Optimizer steps in which the density falls in 4 stages, to density^((stage+1)/5); none by default.
        warmup_epochs: The warm-up in epochs instead, one stage each. Needs a Trainer.
        clip: Largest norm of the averaged gradient; each rank's own is clipped for it. None uses the Trainer's
            gradient_clip_val, if there is one.
        scope: What is ranked together: the elements of each "tensor", of the whole "model", or of each tensor with
            small ones sent more densely ("balanced"), or those that have more to send in each step, by their "norm" or
            their "entropy" (`LayerwiseTopK`).
        values: Dtype of values on the wire; "bfloat16" suits directions of any scale. "one_bit" is a sign, and a
            magnitude for a group; "two_bit" a sign and one of two magnitudes, "three_bit" one of four, and
            "short_three_bit" the same in fewer bits and more time. "few_bits" is "two_bit" where over 60% of the
            elements are sent, else "one_bit"; in as many bytes it trains best. What is rounded off stays in the
            residual.
        positions: How positions are coded: "fast" takes 2 bytes for each element sent; "short" is the shortest of five
            codes, such as 0.8 bytes at a density of 3%.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        exchange: "auto" shares the mean of all ranks' selections, by the way that costs least; "gather" always sends
            each rank's selection to all. The others drop some of that mean, and their bytes on the link hardly grow
            with the number of ranks: with "all_reduce" ranks each add up a piece of every tensor, and send the largest
            elements of its mean; "ok_topk" shares the largest elements of the mean of all.
        rest_bits: Bits for each element of biases and norms, which are sent whole: 32, 8 or 4. What fewer than 32 round
            off is sent later.
        delay: 1 exchanges while the next step computes, for which this rank's own gradient stands in for the mean. So
            no step waits for the network, unless that takes longer than a step computes. 0 waits.
        every: Optimizer steps between two exchanges, or a schedule of it; in between, each rank steps along its own
            directions, from the weights that all share.
        residual_in_weights: Whether a rank computes its gradients ahead of the shared weights by what it has not sent
            yet, and not only by its steps since the last exchange. With more than 4 ranks, both by a part where
            gradients are mostly noise; see `GradientSync`.
        few_rows: Whether tables of embeddings whose gradients have few rows are exchanged row by row, in bfloat16 and
            in each step, so that the optimizer sees there what it sees with ddp. Ranks find them in the first step.

    Raises:
        ValueError: A density outside (0, 1], a clip that is not positive, an unknown scope, dtype, code or exchange, a
            `delay` other than 0 and 1, or `every` below 1, or not 1 with a delay, or `residual_in_weights` with one.
    """

    def __init__(
        self,
        density: Density = 0.01,
        warmup_steps: int | None = None,
        warmup_epochs: int | None = None,
        clip: float | None = None,
        scope: ScopeName = "tensor",
        values: ValueName = "float32",
        exclude: Sequence[str] = (),
        positions: PositionName = "fast",
        exchange: ExchangeName = "auto",
        rest_bits: RestBits = 32,
        delay: int = 0,
        every: Every = 1,
        residual_in_weights: bool = False,
        few_rows: bool = False,
    ) -> None:
        how = sparse(warmed(density, warmup_steps, warmup_epochs), scope, values, positions, exchange)
        before, after = clipping_at(clip), clipping_at(clip)
        whole = [after, LocalAdam(), ErrorFeedback()]
        weights = GradientSync(Channel(how, [before, LocalAdam(), ErrorFeedback()]), exclude=exclude, min_dimensions=2)
        steps: Steps = delay, every, residual_in_weights
        others = rest(rest_bits, *([[after], [after, ErrorFeedback()]] if steps == EACH_STEP else [whole, whole]))
        super().__init__(with_rows([sync.at(*steps) for sync in (weights, others)], few_rows, exclude, [after]))
