"""How far a Trainer has come: what a replica that joins takes over from another, so that both end after one step."""

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_sparsecomm.run.contents import State
from lightning_sparsecomm.run.optimizers import rate_in

if TYPE_CHECKING:
    import pytorch_lightning as pl


def progress_of(trainer: "pl.Trainer") -> State:
    """A Trainer's steps, epoch, batches, schedules and learning rates, as they are once its current step is over."""
    loop = trainer.fit_loop.epoch_loop
    batches = loop.batch_progress.current.ready
    over = trainer.num_training_batches <= batches
    return {
        "steps": [counter.ready for counter in _counters(trainer)],
        # At the end of an epoch, its number goes up before the last exchange.
        "epoch": trainer.current_epoch + (over and loop.batch_progress.current.completed < batches),
        "batches": batches,
        "over": over,
        "stepped": loop._batches_that_stepped,
        "schedulers": [plain(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "rates": [[rate_in(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers],
    }


def follow(trainer: "pl.Trainer", state: State) -> None:
    """Lets a Trainer that has not trained yet go on where another one is, from its `progress_of`.

    Which samples it reads is no part of this: see `elastic.deal`.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    for counter, steps in zip(_counters(trainer), state["steps"]):
        counter.ready = counter.completed = steps
    _set(fit.epoch_progress, state["epoch"])
    _set(loop.batch_progress, state["batches"])
    loop._batches_that_stepped = state["stepped"]
    for config, saved in zip(trainer.lr_scheduler_configs, state["schedulers"]):
        config.scheduler.load_state_dict(saved)
    for optimizer, rates in zip(trainer.optimizers, state["rates"]):
        for group, rate in zip(optimizer.param_groups, rates):
            if rate is not None:
                group["lr"] = rate
    # What the other Trainer does after the step in which it was asked.
    loop.update_lr_schedulers("step", update_plateau_schedulers=False)
    if state["over"]:
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        loop._batches_that_stepped += 1
        _set(loop.batch_progress, 0)
    else:
        # The epoch has begun elsewhere. By this, Lightning goes on amid an epoch, as when it resumes.
        loop._restarting = True
        # Of a checkpoint that this replica had begun from, which the other's progress replaces.
        if hasattr(loop, "reset_restart_stage"):
            loop.reset_restart_stage()
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")


class LeastLimits:
    """`min_epochs` and `min_steps` of a Trainer, which do not count where all replicas end together."""

    def __init__(self) -> None:
        self._lifted: tuple[pl.Trainer, int | None, int | None] | None = None

    def lift(self, trainer: "pl.Trainer") -> None:
        """Lets the Trainer stop when it is told to."""
        if self._lifted is None:
            fit = trainer.fit_loop
            self._lifted = trainer, fit.min_epochs, fit.epoch_loop.min_steps
            fit.min_epochs = fit.epoch_loop.min_steps = None

    def restore(self) -> None:
        """Sets what was lifted to what it was."""
        if self._lifted is not None:
            trainer, epochs, steps = self._lifted
            trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = epochs, steps
            self._lifted = None


def plain(state: Any) -> Any:
    """A state with Python's numbers instead of NumPy's, which no replica would load from another one.

    >>> import numpy as np
    >>> plain({"_last_lr": [np.float64(0.5)], "last_epoch": 1})
    {'_last_lr': [0.5], 'last_epoch': 1}
    """
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, dict):
        return {plain(key): plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)) and type(state) in (list, tuple):
        return type(state)(map(plain, state))
    return state


def steps_of(trainer: "pl.Trainer") -> int:
    """The optimizer steps that a Trainer has begun; of another, `max(progress_of(...)["steps"])`."""
    return max(int(counter.ready) for counter in _counters(trainer))


def _counters(trainer: "pl.Trainer") -> list[Any]:
    """The counters of optimizer steps, with automatic optimization and with manual."""
    loop = trainer.fit_loop.epoch_loop
    return [
        loop.automatic_optimization.optim_progress.optimizer.step.total,
        loop.manual_optimization.optim_step_progress.total,
    ]


def _set(progress: Any, count: int) -> None:
    for counter in (progress.current, progress.total):
        for name in ("ready", "started", "processed", "completed"):
            setattr(counter, name, count)
