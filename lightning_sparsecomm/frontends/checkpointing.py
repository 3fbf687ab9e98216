"""A Trainer's checkpoints: written, read and removed with the files of all ranks, and never amid an optimizer step."""

import warnings
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_sparsecomm.basis.ledger import Ledger
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.frontends.loading import loading
from lightning_sparsecomm.frontends.mixin import SynchronizingMixin
from lightning_sparsecomm.frontends.own_callbacks import DeferredSaves, FirstCallback
from lightning_sparsecomm.frontends.reporting import forget_actions, say
from lightning_sparsecomm.frontends.requeue import requeue_at_once, requeue_later
from lightning_sparsecomm.run.checkpoint import Resumed
from lightning_sparsecomm.run.contents import State, fingerprint_of, own_entries, with_entries

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy
else:
    DDPStrategy = object


class CheckpointingMixin(SynchronizingMixin, DDPStrategy):
    """The part of a Trainer's strategy that saves and resumes."""

    _resumed: tuple[Any, Resumed, Ledger] | None = None
    _handed: dict[str, Any] | None = None
    _own_callbacks: tuple[FirstCallback, DeferredSaves] | None = None
    _callbacks: list[Any] = []  # noqa: RUF012
    # Whether validation sees another model than this rank's own; None outside validation.
    _viewing: bool | None = None
    # Whether the last save was put off, so that the barrier after it must not wait.
    _deferred = False

    @property
    def _trainer(self) -> "pl.Trainer":
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _add_callbacks(self, trainer: "pl.Trainer") -> None:
        self._callbacks = vars(trainer)["callbacks"]
        self._own_callbacks = FirstCallback(self.engine, self._view_shared), DeferredSaves(self.engine)
        self._callbacks.insert(0, self._own_callbacks[0])
        self._callbacks.append(self._own_callbacks[1])
        self._viewing = None
        requeue_later(trainer, self._defers, self._own_callbacks[1].then)

    def _remove_callbacks(self) -> None:
        if self._own_callbacks is None:
            # Nothing was added: an error has ended the setup, and the module may have no Trainer any more.
            return
        requeue_at_once(self._trainer)
        for ours in self._own_callbacks:
            # A callback may have set another list meanwhile.
            for callbacks in (self._callbacks, vars(self._trainer)["callbacks"]):
                if ours in callbacks:
                    callbacks.remove(ours)
            forget_actions(vars(self._trainer)["profiler"], f"[Callback]{ours.state_key}.")
        self._callbacks, self._own_callbacks = [], None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        weights_only, self._deferred = "optimizer_states" not in checkpoint, False
        if self._defers():
            assert self._own_callbacks is not None
            self._own_callbacks[1].add(filepath, weights_only, storage_options)
            self._deferred = True
            return
        entries: State = {}
        if self._engine is not None and self._engine.state.differ:
            entries = own_entries(checkpoint, self._handed)
        self._handed = None
        write = super().save_checkpoint
        self._save(
            filepath,
            checkpoint,
            entries,
            not weights_only,
            lambda path: write(checkpoint, path, storage_options),
            not self._interrupted,
            storage_options,
        )

    def remove_checkpoint(self, filepath: Any) -> None:
        remove = super().remove_checkpoint
        self._remove(filepath, lambda: remove(filepath))

    @property
    def _interrupted(self) -> bool:
        # After a fit in forks, the module in the main process has no Trainer.
        trainer = getattr(self.lightning_module, "_trainer", None)
        return trainer is not None and bool(trainer.interrupted)

    def _defers(self) -> bool:
        """Whether a save must wait for the end of the batch; see `DeferredSaves`."""
        if self._engine is None or not self._holds_state or self._trainer.interrupted or self._is_trial():
            return False
        return self._own_callbacks is not None and self._own_callbacks[1].due

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = loading(super().load_checkpoint, weights_only)(checkpoint_path)
        self._resumed = None
        if self.lightning_module is not None and self.lightning_module.trainer.state.fn == "fit":
            # Before hooks that change the loaded checkpoint: they must find this rank's own entries.
            wire = Wire()
            resumed = self._read_state(checkpoint_path, fingerprint_of(checkpoint), weights_only, wire)
            with_entries(checkpoint, resumed.entries)
            self._resumed = checkpoint_path, resumed, wire.ledger
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._engine is not None and self._resumed is not None:
            path, resumed, ledger = self._resumed
            found = self._load_state(path, resumed)
            if found:
                say(found, self)
            self._engine.wire.ledger.add_rows(ledger.state_dict())
            self._warn_of_random_numbers()
        self._resumed = None

    def _warn_of_random_numbers(self) -> None:
        """Warns if a resumed run cannot equal one that never stopped. The same holds under ddp."""
        drawing = [
            name
            for name, module in self._trainer.lightning_module.named_modules()
            if (isinstance(module, _DropoutNd) and module.p > 0)
            or (isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0)
        ]
        if drawing and self.global_rank == 0:
            warnings.warn(
                f"the model draws random numbers in training ({drawing[0]!r}), and Lightning's checkpoints do not hold"
                " the state of generators. So this run will differ from one that never stopped, as under ddp.",
                stacklevel=2,
            )

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        if self._engine is not None:
            self._engine.restart()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model to save; if replicas drift, the one that all ranks share. Called on all ranks."""
        # A save that is put off must not touch the weights, which a signal may have found in any use.
        viewing = (
            self._engine is not None and not self._defers() and self._engine.replicas.view_shared(self._together())
        )
        try:
            state = super().lightning_module_state_dict()
            if viewing:
                state = {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}
        finally:
            if viewing:
                self.engine.replicas.view_own()
        self._handed = state
        return state

    def _view_shared(self) -> None:
        """Writes the shared model into the module for validation.

        Called twice: by our first callback, and by Lightning, for runs without our callbacks.
        """
        if self._engine is not None and self._viewing is None:
            self._engine.wire.place = "validation"
            self._viewing = self._engine.replicas.view_shared(self._together())

    def _together(self) -> bool:
        """Whether all ranks call this during fit: not in its sanity check, and not one rank alone after an error."""
        return self.lightning_module is not None and not (self._trainer.sanity_checking or self._trainer.interrupted)

    def _is_trial(self) -> bool:
        """Whether all callbacks are replaced, as by a learning rate finder."""
        return self._own_callbacks is None or self._own_callbacks[0] not in vars(self._trainer)["callbacks"]
