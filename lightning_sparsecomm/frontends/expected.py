"""How long a Trainer's fit will be, as far as can be said at its start."""

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pytorch_lightning as pl


class Expected(NamedTuple):
    """The length of a fit, infinite where unknown.

    Attributes:
        steps: The Trainer's steps from the first on; infinite with manual optimization and no `max_steps`.
        epochs: Epochs from the first on.
        left: Steps that each optimizer has still to make.
        estimated: Whether `left` supposes one step of each optimizer for each batch: with manual optimization, only the
            user's code knows.
        may_end_sooner: Whether a callback may stop the fit at any time.
    """

    steps: float
    epochs: float
    left: float
    estimated: bool
    may_end_sooner: bool


def expected(trainer: "pl.Trainer") -> Expected:
    """Reads the limits of a Trainer that is about to train."""
    automatic, optimizers = trainer.lightning_module.automatic_optimization, max(1, len(trainer.optimizers))
    max_steps, max_epochs, sooner = _limits(trainer)
    # An epoch's length in batches may be unknown.
    batches = trainer.num_training_batches if 0 < trainer.num_training_batches < math.inf else math.inf
    each = math.ceil(batches / trainer.accumulate_grad_batches) if batches < math.inf else math.inf
    # Several optimizers share the Trainer's count of steps.
    left = min(max_steps / optimizers, max_epochs * each) - trainer.global_step / optimizers
    if not automatic:
        each = math.inf
    steps = min(max_steps, max_epochs * each)
    epochs = min(max_epochs, steps / each if each < math.inf else math.inf)
    return Expected(steps, epochs, max(0, math.ceil(left)) if left < math.inf else left, not automatic, sooner)


def steps_left(trainer: "pl.Trainer", done: int, batches: float, later: int) -> float:
    """Steps that each optimizer has still to make where epochs are unequally long; infinite where unknown.

    Args:
        trainer: Amid an epoch, between two batches.
        done: Batches done in the epoch.
        batches: Its length.
        later: Batches in each of the epochs that follow.
    """
    each, optimizers = trainer.accumulate_grad_batches, max(1, len(trainer.optimizers))
    max_steps, max_epochs, _ = _limits(trainer)
    follow = max_epochs - trainer.current_epoch - 1
    of_epochs = math.ceil(batches / each) - done // each + (follow * math.ceil(later / each) if follow > 0 else 0)
    return max(0, min((max_steps - trainer.global_step) / optimizers, of_epochs))


def _limits(trainer: "pl.Trainer") -> tuple[float, float, bool]:
    """Steps and epochs at which a fit ends, and whether a callback may end it sooner."""
    # By name, as either package's callbacks may be in use.
    callbacks = [(each, {kind.__name__ for kind in type(each).__mro__}) for each in vars(trainer)["callbacks"]]
    max_steps = trainer.max_steps if trainer.max_steps >= 0 else math.inf
    max_epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else math.inf
    for callback, names in callbacks:
        if "StochasticWeightAveraging" in names:
            # It may have added an epoch, which measures for batch norm with the averaged weights, and makes no step.
            max_epochs = min(max_epochs, callback.swa_end + 1)
    return max_steps, max_epochs, any({"EarlyStopping", "Timer"} & names for _, names in callbacks)
