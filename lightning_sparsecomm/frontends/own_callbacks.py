"""Callbacks of the strategy itself: the first of all, which ends training, and the last, which saves what waited."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

from lightning_sparsecomm.frontends.packages import Callback
from lightning_sparsecomm.run.engine import Engine

# Ranks get a signal at about the same time. How long one waits for the others at a batch's end, and at how many ends.
_PATIENCE_SECONDS, _TRIES = 2.0, 10


class FirstCallback(Callback):
    """Acts before all other callbacks: a strategy's own hooks run after them.

    When validation starts, the module holds the shared model, so that a callback that swaps in other weights, such as a
    moving average, finds it there and is not overwritten. So it does from an epoch's end to the next one's start, but
    where weights would have to be averaged for that. When training ends, replicas are settled. It also tells the wire
    where the run is, for messages.

    Args:
        engine: The run's engine.
        view: Writes the shared model into the module. A collective.
    """

    def __init__(self, engine: Engine, view: Callable[[], None]) -> None:
        self._engine = engine
        self._view = view

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._view()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._engine.wire.place = "the end of training"
        self._engine.settle()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._engine.replicas.view_own()
        self._engine.wire.place = None

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._engine.wire.place = "the end of an epoch"
        self._engine.replicas.view_shared(averages=False)


class DeferredSaves(Callback):
    """Carries out saves when a batch has ended in which an optimizer stepped, after all other callbacks.

    Between an exchange and the end of its step, memories have forgotten what was sent, and the weights have not moved
    yet. Between batches whose gradients are accumulated, `.grad` holds what no checkpoint does. A signal handler may
    run at another point on each rank. So all ranks first meet at the end of one batch: there a checkpoint is what a
    ModelCheckpoint would save.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: dict[Any, tuple[bool, Any]] = {}
        self._afterwards: Callable[[], None] | None = None
        self._tries = 0
        self._ended = False
        self._steps_before = 0

    @property
    def due(self) -> bool:
        """Whether a save that is asked for now has to wait."""
        return not self._ended and (self._engine.guards.in_step or in_signal_handler())

    def add(self, path: Any, weights_only: bool, storage_options: Any) -> None:
        """Notes a save, instead of an earlier one of the same path."""
        self._waiting[path] = weights_only, storage_options

    def then(self, call: Callable[[], None]) -> None:
        """Notes what to call when all ranks meet next, and saves that wait have been carried out."""
        self._afterwards = call

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self._steps_before = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self._asked and not self._engine.guards.in_step and trainer.global_step > self._steps_before:
            self._carry_out(trainer, f"batch {trainer.fit_loop.epoch_loop.total_batch_idx}")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._tries = _TRIES
        if self._asked:
            self._carry_out(trainer, "end")
        self._ended = True

    @property
    def _asked(self) -> bool:
        return bool(self._waiting) or self._afterwards is not None

    def _carry_out(self, trainer: Any, place: str) -> None:
        if self._engine.wire.meet(f"{self._engine.agreement.run} {place}", _PATIENCE_SECONDS):
            # Paths may differ between ranks, and even their number: rank 0's count, as under ddp.
            waiting = trainer.strategy.broadcast(list(self._waiting.items()))
            self._waiting, self._tries = {}, 0
            for path, (weights_only, storage_options) in waiting:
                trainer.save_checkpoint(path, weights_only, storage_options)
            afterwards, self._afterwards = self._afterwards, None
            if afterwards is not None:
                afterwards()
            return
        self._tries += 1
        if self._tries >= _TRIES:
            wanted = [f"{path} was not saved" for path in self._waiting]
            wanted += ["the job was not saved and requeued"] if self._afterwards is not None else []
            warnings.warn(
                f"{', '.join(wanted)}: not all ranks were asked to. Call trainer.save_checkpoint, or send the signal"
                " that does, on all ranks.",
                stacklevel=2,
            )
            self._waiting, self._afterwards, self._tries = {}, None, 0


def in_signal_handler() -> bool:
    """Whether a Python signal handler is calling: one that was handed the frame that it has interrupted."""
    frame = sys._getframe()
    while frame.f_back is not None:
        code, held = frame.f_code, frame.f_locals
        given = [held.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 1]]
        # As arguments of its own, or together in `*args`.
        given += [each for group in given if type(group) is tuple for each in group]
        if any(each is frame.f_back for each in given):
            return True
        frame = frame.f_back
    return False
