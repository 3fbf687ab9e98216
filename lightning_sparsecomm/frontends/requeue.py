"""SLURM's automatic requeue: Lightning saves a checkpoint and requeues the job, in a handler of a signal."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytorch_lightning as pl

# Lightning's handler, which it looks up when a fit begins.
_HANDLER = "_slurm_sigusr_handler_fn"


def requeue_later(
    trainer: "pl.Trainer", must_wait: Callable[[], bool], wait: Callable[[Callable[[], None]], None]
) -> None:
    """Makes Lightning's handler wait where its checkpoint `must_wait`, until `wait` calls what it is given.

    Otherwise SLURM could end the job before its checkpoint is written. Call it before Lightning sets up its handlers.
    """
    connector: Any = trainer._signal_connector
    save_and_requeue = getattr(connector, _HANDLER)

    def save_and_requeue_later(signal_number: int, frame: Any) -> None:
        if must_wait():
            # Without the frame: by it, one sees that a signal handler is calling.
            wait(lambda: save_and_requeue(signal_number, None))
        else:
            save_and_requeue(signal_number, frame)

    setattr(connector, _HANDLER, save_and_requeue_later)


def requeue_at_once(trainer: "pl.Trainer") -> None:
    """Gives Lightning its own handler back."""
    vars(trainer._signal_connector).pop(_HANDLER, None)
