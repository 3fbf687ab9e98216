"""The method of `strategy="sparsecomm"`."""

import math
from typing import NamedTuple

from lightning_sparsecomm.basis.arguments import check_whole_number
from lightning_sparsecomm.basis.schedules import LIKELY_STEPS, ByLength
from lightning_sparsecomm.methods.adam import local_adam
from lightning_sparsecomm.methods.dropping import dgc
from lightning_sparsecomm.methods.quantized import quantized
from lightning_sparsecomm.sharing import Method


def default(delay: int = 0, every: int | None = None, residual_in_weights: bool = False) -> Method:
    """The method of `strategy="sparsecomm"`: dgc for SGD, local_adam for Adam and AdamW, and another for all others.

    The density follows from the run's length, and small tensors are sent more densely. Values take one to three bits,
    and positions the shortest code. Ranks each add up a piece of every tensor; biases and norms are sent whole, in 8
    bits. There are about 10 times fewer bytes than with ddp in a run of 300 steps, 20 times in 1,000 and 50 times in
    4,000; by Adam and AdamW on more than 4 ranks down to half of that, in runs of 563 to 5,000 steps.

    In longer runs of a Trainer, ranks exchange only in every second or fourth step, and send more of the elements then,
    in about as many bytes altogether. In between, each rank steps along its own gradients. In runs of up to 5,000 steps
    (by Adam and AdamW from 563 on), a rank's weights also contain what it has not sent yet. `every` says when.

    Other optimizers are given the whole gradient, in 8 bits: 4 times fewer bytes than with ddp. So are all optimizers
    where the Trainer clips by value, as that needs the mean gradient. Tables of embeddings of which a step meets few
    rows travel row by row, and are trained as with ddp.

    >>> default().fallback.fallback
    quantized(few_rows=True)

    Args:
        delay: 1 exchanges while the next step computes, as `dgc` and `local_adam` say; other optimizers wait. 0 waits.
        every: Optimizer steps between two exchanges by SGD, Adam and AdamW, as `dgc` and `local_adam` say; others
            exchange in each. None lets a Trainer's run choose at its start. By SGD: 1 in fewer than 2,000 steps, 2 up
            to 5,000, both with `residual_in_weights`; then 4 without. By Adam and AdamW: 1 in fewer than 563 steps,
            without; up to 5,000, with it, 2, or 1 on more than 4 ranks; then 2 without. A run of unknown length
            counts as one of 5,000. With `delay`, in Fabric, between nodes, between replicas that come and go, and
            where two optimizers hold the same parameter, it is 1, without.
        residual_in_weights: With `every`, whether a rank is ahead of the shared weights by its residual too, as `dgc`
            and `local_adam` say.

    Raises:
        ValueError: `delay` is neither 0 nor 1, or `every` no whole number of at least 1, or both are more than that, or
            `residual_in_weights` with a delay or without `every`.
    """
    if every is not None:
        check_whole_number("every", every, 1, "optimizer steps between two exchanges", "Use 2, for example.")
        local = _Local(every, residual_in_weights)
        return _exchanging(delay, local, local)
    if residual_in_weights:
        raise ValueError(
            "residual_in_weights must be False where the run's length chooses `every`, and this with it; got"
            f" {residual_in_weights!r}. Give every too, such as every=2."
        )
    method = _exchanging(delay, _Local(1), _Local(1))
    return method if delay else method.following(_for_run)


class _Local(NamedTuple):
    """Steps between two exchanges, and whether residuals are in the weights."""

    every: int
    in_weights: bool = False


# A run makes local steps from so many steps on, by SGD, and by Adam and AdamW.
_LOCAL_SGD, _LOCAL_ADAM = 2000, 563

# With so many ranks, the direction of one by Adam may be mostly noise, so that they exchange in each step.
_MANY_RANKS = 5


def _for_run(steps: float, ranks: int) -> Method:
    """The default of a Trainer's run of so many steps, infinite where unknown, on so many ranks."""
    if LIKELY_STEPS < steps < math.inf:
        # Residuals wait for too long to be in the weights. A run of unknown length sends as if it were no longer.
        return _exchanging(0, _Local(4), _Local(2))
    of_sgd = _Local(1 if steps < _LOCAL_SGD else 2, in_weights=True)
    of_adam = _Local(1) if steps < _LOCAL_ADAM else _Local(1 if ranks >= _MANY_RANKS else 2, in_weights=True)
    return _exchanging(0, of_sgd, of_adam)


def _exchanging(delay: int, of_sgd: _Local, of_adam: _Local) -> Method:
    """The default with such local steps by SGD, and by Adam and AdamW."""
    # Sparse gradients would leave the moments of other optimizers too far from ddp's.
    others = quantized(bits=8, few_rows=True)
    adam = local_adam(
        _density(0.45, 1.0, (0.74, 0.77), of_adam.every, 1.16),
        scope="balanced",
        values="few_bits",
        positions="short",
        exchange="all_reduce",
        rest_bits=8,
        delay=delay,
        every=of_adam.every,
        residual_in_weights=of_adam.in_weights,
        few_rows=True,
    )
    # With an exchange in each step, a GPT's bytes are then 20 times fewer than ddp's after 1,000 steps.
    often, seldom = 0.212, 0.23
    sgd = dgc(
        _density(often if of_sgd.every == 1 else seldom, 0.88, (0.58, 0.62), of_sgd.every, 1.55),
        scope="balanced",
        values="three_bit",
        positions="short",
        exchange="all_reduce",
        rest_bits=8,
        delay=delay,
        every=of_sgd.every,
        residual_in_weights=of_sgd.in_weights,
        few_rows=True,
    )
    return sgd.with_fallback(adam.with_fallback(others))


def _density(after_1000: float, exponent: float, most: tuple[float, float], every: int, growth: float) -> ByLength:
    """A density that follows the run's length; with local steps that of a run which is `every`^growth times shorter.

    `most` is without local steps, and with them.
    """
    steps = round(1000 * every**growth)
    return ByLength(after_1000, exponent, least=0.002, most=most[every > 1], steps=steps)
