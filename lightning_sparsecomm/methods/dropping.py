"""Each rank sends the largest elements of its gradient, and keeps the rest for later steps."""

import warnings
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from lightning_sparsecomm.basis.arguments import check_booleans, check_one_of, renamed
from lightning_sparsecomm.basis.schedules import Density, Every, warmed
from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.codecs import (
    Auto,
    BFloat16,
    FewBits,
    Float16,
    Float32,
    IndexCoding,
    LayerwiseTopK,
    OneBit,
    RunLength16,
    Selector,
    ShortThreeBit,
    SparseCodec,
    ThreeBit,
    TopK,
    TwoBit,
    ValueCoding,
)
from lightning_sparsecomm.exchange import CompressedAllReduce, DenseAllReduce, Exchange, Gather, OkTopK, Sparse
from lightning_sparsecomm.methods.corrected import corrected
from lightning_sparsecomm.methods.weights import RestBits, with_rows
from lightning_sparsecomm.sharing import Averaging, GradientSync, Method
from lightning_sparsecomm.sharing.local_mode import LOCAL_MODES, LocalName

ValueName = Literal["float32", "float16", "bfloat16", "one_bit", "two_bit", "three_bit", "short_three_bit", "few_bits"]
ScopeName = Literal["model", "tensor", "balanced", "norm", "entropy"]
PositionName = Literal["fast", "short"]
ExchangeName = Literal["auto", "gather", "all_reduce", "ok_topk"]


class gradient_dropping(Method):
    """Sends the largest elements of gradient plus residual, and keeps the rest in the residual.

    Bytes per step and rank: 6 for each element sent (2 of position, 4 of value; 4 with float16), 32 of headers, and a
    bit for each tensor. With a local mode also the parameters, every `average_every` steps and for each validation and
    checkpoint.

    Source: Aji & Heafield 2017, Sparse Communication for Distributed Gradient Descent. Local modes, averaging and
    warm-up: Combining Global Sparse Gradients with Local Gradients. As in DDP, gradients are divided by the number of
    ranks; the papers add them up.

    >>> gradient_dropping(density=0.01, values="float16", exclude=["*.bias"])
    gradient_dropping(density=0.01, values='float16', exclude=['*.bias'])
    >>> gradient_dropping(density=100)
    Traceback (most recent call last):
    ValueError: density must be in (0, 1]: the fraction of elements sent; got 100. Did you mean 0.01?

    Args:
        density: Fraction of elements sent, in (0, 1], or a schedule of it.
        scope: What is ranked together: the elements of the whole "model", as in the paper, of each "tensor", or of each
            tensor with small ones sent more densely ("balanced"), or those that have more to send in each step, by
            their "norm" or their "entropy" (`LayerwiseTopK`).
        values: Dtype of values on the wire; "bfloat16" suits gradients of any scale. "one_bit" is a sign, and a
            magnitude for a group; "two_bit" a sign and one of two magnitudes, "three_bit" one of four, and
            "short_three_bit" the same in fewer bits and more time. "few_bits" is "two_bit" where over 60% of the
            elements are sent, else "one_bit". What is rounded off stays in the residual.
        positions: How positions are coded: "fast" takes 2 bytes for each element sent; "short" is the shortest of five
            codes, such as 0.8 bytes at a density of 3%.
        error_feedback: Whether to keep what is not sent and add it to the next gradient. Training suffers without.
        exclude: Patterns of parameter names whose gradients are sent whole, such as "*.bias".
        local: What the optimizer sees, for a rank's own gradient g, what it sent, S, and what all sent, G: "none" is
            G, "sum" is (G + g)/2, "partial" is G − S + g, "error" is "partial" without error feedback; each by W.
        average_every: With a local mode, steps between two averages of the parameters over ranks; None for no average.
        average_buffers: Whether to average floating-point buffers with the parameters.
        average_optimizer_state: Whether to average the optimizer's state with the parameters.
        warmup_steps: T in the drop ratio (1 − density)^max(1, T/t) at step t, which sends nearly all at first; 0 for
            none.
        momentum_masking: Whether to set the optimizer's momentum (SGD's, Adam's first) to zero where something was
            sent.
        follow_rate: Whether the residual follows SGD's learning rate, so that a gradient counts as much as in the step
            that computed it, and what still waits after the last step is applied. The paper's does not.
        exchange: As for `dgc`.
        few_rows: Whether tables of embeddings whose gradients have few rows are exchanged row by row, in bfloat16, so
            that the optimizer sees there what it sees with ddp. Ranks find them in the first step.

    Raises:
        ValueError: A density outside (0, 1], an unknown scope, dtype, code or local mode, `average_every` below 1, or
            buffers or state to average without a local mode.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        density: Density = 0.01,
        scope: ScopeName = "model",
        values: ValueName = "float32",
        error_feedback: bool = True,
        exclude: Sequence[str] = (),
        local: LocalName = "none",
        average_every: int | None = 500,
        average_buffers: bool = False,
        average_optimizer_state: bool = False,
        warmup_steps: int = 0,
        momentum_masking: bool = False,
        follow_rate: bool = True,
        positions: PositionName = "fast",
        exchange: ExchangeName = "auto",
        few_rows: bool = False,
    ) -> None:
        _check(momentum_masking, exchange, error_feedback=error_feedback, follow_rate=follow_rate)
        mode, averaging = _local(local, average_every, average_buffers, average_optimizer_state)
        memories = [ErrorFeedback(follow_rate=follow_rate)] if error_feedback and local != "error" else []
        how = sparse(warmed(density, warmup_steps, None, shape="inverse_time"), scope, values, positions, exchange)
        sync = GradientSync(Channel(how, memories), exclude=exclude, local=mode, mask_momentum=momentum_masking)
        super().__init__(with_rows([sync, *_whole(exclude)], few_rows, exclude), averaging)


class dgc(Method):
    """Deep Gradient Compression: sends the largest elements of each tensor's residual, which accumulates momentum.

    It also clips each rank's own gradient, and starts with higher densities.
    Tensors of one dimension (biases, norms) are sent whole, with the same momentum. Momentum, dampening, Nesterov's
    method and weight decay are read from the user's torch.optim.SGD in each step, and switched off there while it
    steps.

    Bytes per step and rank: 6 for each element sent (2 of position, 4 of value; 4 with float16), 4 for each element of
    the tensors that are sent whole, and 32 of headers.

    Source: Lin et al. 2018, Deep Gradient Compression. Selection is the exact top-k, found by a sampled threshold that
    over-selects.

    >>> dgc(density=0.001, warmup_epochs=4)
    dgc(density=0.001, warmup_epochs=4)

    Args:
        density: Fraction of each tensor's elements sent, in (0, 1], or a schedule of it, which has no further warm-up.
        warmup_steps: Optimizer steps in which the density falls in 4 stages, to density^((stage+1)/5); 0 for none. By
            default 1,000, unless the warm-up is given in epochs.
        warmup_epochs: The warm-up in epochs instead, one stage each; the paper uses 4. Needs a Trainer.
        clip: Largest norm of the averaged gradient; each rank's own is clipped for it. None uses the Trainer's
            gradient_clip_val, if there is one.
        momentum_correction: Whether to apply momentum before the exchange. Otherwise the optimizer, which may then be
            any, applies its own after it.
        momentum_masking: Whether to set momentum to zero where something was sent, as in the paper. What it throws away
            is lost: with momentum 0.9 nine tenths of the gradient at density 1, and 9% at 0.01.
        scope: What is ranked together: the elements of each "tensor", as in the paper, of the whole "model", or of each
            tensor with small ones sent more densely ("balanced"), or those that have more to send in each step, by
            their "norm" or their "entropy" (`LayerwiseTopK`).
        values: Dtype of values on the wire; "bfloat16" suits gradients of any scale. "one_bit" is a sign, and a
            magnitude for a group; "two_bit" a sign and one of two magnitudes, "three_bit" one of four, and
            "short_three_bit" the same in fewer bits and more time. "few_bits" is "two_bit" where over 60% of the
            elements are sent, else "one_bit". What is rounded off stays in the residual.
        positions: How positions are coded: "fast" takes 2 bytes for each element sent; "short" is the shortest of five
            codes, such as 0.8 bytes at a density of 3%.
        exclude: Patterns of more parameter names whose gradients are sent whole, such as "head.*".
        follow_rate: Whether the residual follows SGD's learning rate, so that a gradient counts as much as in the step
            that computed it, and what still waits after the last step is applied. The paper's does not.
        exchange: "auto" shares the mean of all ranks' selections, as the paper does, by the way that costs least;
            "gather" always sends each rank's selection to all. The others drop some of that mean, and their bytes on
            the link hardly grow with the number of ranks: with "all_reduce" ranks each add up a piece of every tensor,
            and send the largest elements of its mean; "ok_topk" shares the largest elements of the mean of all.
        rest_bits: Bits for each element of biases and norms, which are sent whole: 32, 8 or 4. What fewer than 32 round
            off is sent later.
        delay: 1 exchanges while the next step computes, for which this rank's own gradient stands in for the mean. So
            no step waits for the network, unless that takes longer than a step computes. 0 waits.
        every: Optimizer steps between two exchanges, or a schedule of it; in between, each rank steps along its own
            velocities, from the weights that all share.
        residual_in_weights: Whether a rank computes its gradients ahead of the shared weights by all that it has not
            sent yet, and not only by its steps since the last exchange; see `GradientSync`.
        few_rows: Whether tables of embeddings whose gradients have few rows are exchanged row by row, in bfloat16 and
            in each step, so that the optimizer sees there what it sees with ddp. Ranks find them in the first step.

    Raises:
        ValueError: A density outside (0, 1], a clip that is not positive, an unknown scope, dtype, code or exchange,
            momentum masking with exchange="all_reduce" or "ok_topk", a `delay` other than 0 and 1, or `every` below 1,
            or with a delay not 1, or `residual_in_weights` with a delay or without `follow_rate`.
        TypeError: A switch is neither True nor False.
    """

    def __init__(
        self,
        density: Density = 0.001,
        warmup_steps: int | None = None,
        warmup_epochs: int | None = None,
        clip: float | None = None,
        momentum_correction: bool = True,
        momentum_masking: bool = False,
        scope: ScopeName = "tensor",
        values: ValueName = "float32",
        exclude: Sequence[str] = (),
        follow_rate: bool = True,
        positions: PositionName = "fast",
        exchange: ExchangeName = "auto",
        rest_bits: RestBits = 32,
        delay: int = 0,
        every: Every = 1,
        residual_in_weights: bool = False,
        few_rows: bool = False,
    ) -> None:
        _check(momentum_masking, exchange)
        how = sparse(warmed(density, warmup_steps, warmup_epochs, 1000), scope, values, positions, exchange)
        others = exclude, follow_rate, rest_bits, (delay, every, residual_in_weights), few_rows
        super().__init__(corrected(how, clip, momentum_correction, momentum_masking, *others))


def _local(
    local: LocalName, every: int | None, buffers: bool, optimizer_state: bool
) -> tuple[Literal["none", "sum", "partial"], Averaging | None]:
    """How local gradients are used, and what averages parameters then."""
    check_booleans(average_buffers=buffers, average_optimizer_state=optimizer_state)
    remedy = "Use 'partial' with parameter averaging, which worked best in the paper."
    check_one_of("local", local, (*LOCAL_MODES, "error"), remedy)
    if local == "none" and (buffers or optimizer_state):
        raise ValueError(
            "average_buffers and average_optimizer_state need a local mode, with which ranks' parameters are"
            " averaged; got local='none'. Use the callback ParameterAveraging, which averages with any method."
        )
    averaging = None
    if every is not None:
        with renamed(every="average_every"):
            averaging = Averaging(every, buffers, optimizer_state)
    elif local != "none":
        warnings.warn(
            f"local={local!r} lets every rank's parameters go their own way, and with average_every=None nothing"
            " averages them before the end of fit. Use average_every=500, as the paper does.",
            stacklevel=3,
        )
    return "partial" if local == "error" else local, averaging if local != "none" else None


def _whole(exclude: Sequence[str]) -> list[GradientSync]:
    """What sends the parameters of these names whole, if there are any."""
    return [GradientSync(Channel(DenseAllReduce()), parameters=exclude)] if exclude else []


def _check(momentum_masking: bool, exchange: ExchangeName, **switches: bool) -> None:
    """Raises `TypeError` for a switch, or `ValueError` where ranks would mask momentum that they have not sent."""
    check_booleans(momentum_masking=momentum_masking, **switches)
    if momentum_masking and exchange in ("all_reduce", "ok_topk"):
        raise ValueError(
            f"momentum_masking must be False with exchange={exchange!r}, with which a rank answers for all that it"
            " adds up itself, and would mask momentum it has not sent; got True. Use exchange='auto', which shares"
            " what the paper does."
        )


def sparse(
    density: Density, scope: ScopeName, values: ValueName, positions: PositionName, exchange: ExchangeName = "auto"
) -> Exchange:
    """An exchange of the largest elements. Raises `ValueError` for an unknown exchange, or as `codec_of`."""
    exchanges: dict[str, Callable[[SparseCodec], Exchange]] = {
        "auto": Sparse,
        "gather": Gather,
        "all_reduce": CompressedAllReduce,
        "ok_topk": OkTopK,
    }
    check_one_of(
        "exchange",
        exchange,
        exchanges,
        "'auto' and 'gather' share the mean of what ranks have selected; 'all_reduce' and 'ok_topk' its largest"
        " elements, whose bytes hardly grow with the number of ranks.",
    )
    return exchanges[exchange](codec_of(selector_of(density, scope), values, positions))


def codec_of(selector: Selector, values: ValueName, positions: PositionName) -> SparseCodec:
    """The codec of what a selector selects. Raises `ValueError` for an unknown dtype or code."""
    return SparseCodec(selector, *value_coding(values, positions))


def value_coding(values: ValueName, positions: PositionName) -> tuple[ValueCoding, IndexCoding]:
    """How values and positions are coded. Raises `ValueError` for an unknown dtype or code."""
    codecs: dict[str, ValueCoding] = {
        "float32": Float32(),
        "float16": Float16(),
        "bfloat16": BFloat16(),
        "one_bit": OneBit(),
        "two_bit": TwoBit(),
        "three_bit": ThreeBit(),
        "short_three_bit": ShortThreeBit(),
        "few_bits": FewBits(),
    }
    check_one_of("values", values, codecs, "Use 'float32' to send them exactly.")
    check_one_of("positions", positions, ("fast", "short"), "Use 'short' for a slow network.")
    return codecs[values], RunLength16() if positions == "fast" else Auto()


def selector_of(density: Density, scope: ScopeName) -> Selector:
    """What selects the largest elements. Raises `ValueError` for an unknown scope."""
    check_one_of(
        "scope",
        scope,
        get_args(ScopeName),
        "'model' ranks all elements together, 'tensor' each tensor by itself; 'balanced' sends small ones more densely,"
        " 'norm' and 'entropy' those that have more to send.",
    )
    return LayerwiseTopK(density, scope) if scope == "norm" or scope == "entropy" else TopK(density, scope)
