"""How long a Trainer's fit will be, as far as can be said at its start."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pytorch_lightning as pl

    from lightning_sparsecomm.run.engine import Engine


class Expected(NamedTuple):
    """The length of a fit, infinite where unknown.

    Attributes:
        steps: The Trainer's steps from the first on; infinite with manual optimization and no `max_steps`.
        epochs: Epochs from the first on.
        left: Steps that each optimizer has still to make; negative if one has made more than its part already.
        estimated: Whether `left` supposes one step of each optimizer for each batch: with manual optimization, only the
            user's code knows.
        may_end_sooner: Whether a callback may stop the fit at any time.
    """

    steps: float
    epochs: float
    left: float
    estimated: bool
    may_end_sooner: bool

    @property
    def epoch_steps(self) -> float:
        """Steps of an epoch; infinite where unknown."""
        return self.steps / self.epochs if self.steps < math.inf and self.epochs else math.inf


def expected(trainer: "pl.Trainer", made: Sequence[int] = ()) -> Expected:
    """Reads the limits of a Trainer that is about to train; `made` are the steps of each optimizer in a saved run."""
    automatic, optimizers = trainer.lightning_module.automatic_optimization, max(1, len(trainer.optimizers))
    max_steps, max_epochs, sooner = _limits(trainer)
    # An epoch's length in batches may be unknown.
    batches = trainer.num_training_batches if 0 < trainer.num_training_batches < math.inf else math.inf
    whole = _steps_in(trainer, batches, 0, max_epochs)
    # Several optimizers share the Trainer's count of steps.
    of_each = min(max_steps / optimizers, whole)
    # A run that resumes is as long as before, also where one optimizer makes more steps than the others.
    resumes = sum(made) == trainer.global_step > 0
    left = of_each - max(made) if resumes else max(0, of_each - trainer.global_step / optimizers)
    if not automatic:
        whole = math.inf
    steps = min(max_steps, whole)
    each = whole / max_epochs if whole < math.inf and max_epochs else _steps_in(trainer, batches, 0, 1)
    if not automatic:
        each = math.inf
    epochs = min(max_epochs, steps / each if each < math.inf else math.inf)
    return Expected(steps, epochs, math.ceil(left) if left < math.inf else left, not automatic, sooner)


def note_place(engine: "Engine", trainer: "pl.Trainer", uneven_inputs: bool) -> None:
    """Tells the engine how many epochs are finished, with a fraction where known, and whether this batch ends one.

    With uneven inputs, not all ranks know that.
    """
    batches = trainer.num_training_batches
    done = trainer.fit_loop.epoch_loop.batch_idx / batches if 0 < batches < math.inf else 0.0
    engine.epoch, engine.ends_epoch = trainer.current_epoch + done, trainer.is_last_batch and not uneven_inputs


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
    follow = _steps_in(trainer, later, trainer.current_epoch + 1, max_epochs)
    of_epochs = math.ceil(batches / each) - done // each + follow
    return max(0, min((max_steps - trainer.global_step) / optimizers, of_epochs))


def _callbacks(trainer: "pl.Trainer") -> list[tuple[Any, set[str]]]:
    """Callbacks, each with the names of its classes: either package's may be in use."""
    return [(each, {kind.__name__ for kind in type(each).__mro__}) for each in vars(trainer)["callbacks"]]


def _steps_in(trainer: "pl.Trainer", batches: float, first: int, end: float) -> float:
    """Steps in the epochs from `first` to before `end`, each of so many batches; infinite where unknown."""
    if math.inf in (batches, end):
        return math.inf if end > first else 0
    schedule = next((each for each, names in _callbacks(trainer) if "GradientAccumulationScheduler" in names), None)
    if schedule is None:
        return max(0, end - first) * math.ceil(batches / trainer.accumulate_grad_batches)
    # It sets the Trainer's number as each epoch begins, and from its last entry on to the same.
    last = max(schedule.scheduling)
    steps = 0.0
    for epoch in range(first, int(min(end, last))):
        steps += math.ceil(batches / schedule.get_accumulate_grad_batches(epoch))
    rest = max(0, end - max(first, last))
    return steps + (rest * math.ceil(batches / schedule.get_accumulate_grad_batches(last)) if rest else 0)


def _limits(trainer: "pl.Trainer") -> tuple[float, float, bool]:
    """Steps and epochs at which a fit ends, and whether a callback may end it sooner."""
    callbacks = _callbacks(trainer)
    max_steps = trainer.max_steps if trainer.max_steps >= 0 else math.inf
    max_epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else math.inf
    for callback, names in callbacks:
        if "StochasticWeightAveraging" in names:
            # It may have added an epoch, which measures for batch norm with the averaged weights, and makes no step.
            max_epochs = min(max_epochs, callback.swa_end + 1)
    return max_steps, max_epochs, any({"EarlyStopping", "Timer"} & names for _, names in callbacks)
