"""The strategy for a Trainer. The bindings combine it with the DDPStrategy of their package."""

import math
import pickle
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparsecomm.basis.ledger import LIGHTNING, Collective, Ledger
from lightning_sparsecomm.basis.wire import Waiting, Wire
from lightning_sparsecomm.frontends.mixin import SynchronizingMixin
from lightning_sparsecomm.frontends.own_callbacks import DeferredSaves, EndOfTraining
from lightning_sparsecomm.run.checkpoint import Resumed
from lightning_sparsecomm.run.contents import State, fingerprint_of, own_entries, with_entries
from lightning_sparsecomm.run.length import warn_of_short_run

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy
else:
    DDPStrategy = object

T = TypeVar("T")


class TrainerMixin(SynchronizingMixin, DDPStrategy):
    """Trains by DDP, with a method that shares the gradients.

    To switch from `strategy="ddp"`, change nothing else: the LightningModule, its optimizers, the Trainer's clipping
    and accumulation stay as they are. Two hooks see other gradients: `on_after_backward` finds this rank's own, and
    `on_before_optimizer_step` the mean of what ranks sent, which with dgc already contains momentum.
    """

    _viewing = False
    _resumed: tuple[Any, Resumed, Ledger] | None = None
    _handed: dict[str, Any] | None = None
    _callbacks: list[Any] = []  # noqa: RUF012
    _own_callbacks: tuple[EndOfTraining, DeferredSaves] | None = None
    _deferred = False
    _unsettled = False

    def setup(self, trainer: "pl.Trainer") -> None:
        if trainer.state.fn != "fit":
            return super().setup(trainer)
        self._begin(self.root_device, getattr(self.precision_plugin, "scaler", None))
        super().setup(trainer)
        self.engine.agreement.on_optimizers(self.optimizers)
        self.engine.registry.check()
        for optimizer in self.optimizers:
            self.engine.register(optimizer)
        # As in Lightning, 0 and less mean no clipping.
        if trainer.gradient_clip_val is not None and not trainer.gradient_clip_val <= 0:
            self.engine.take_over_clipping(float(trainer.gradient_clip_val), trainer.gradient_clip_algorithm == "value")
        self._share_before_clipping()
        self._callbacks = vars(trainer)["callbacks"]
        self._own_callbacks = EndOfTraining(self.engine), DeferredSaves(self.engine)
        self._callbacks.insert(0, self._own_callbacks[0])
        self._callbacks.append(self._own_callbacks[1])
        self._unsettled = True
        return None

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return self._wrap(model, self.determine_ddp_device_ids())

    def _register_ddp_hooks(self) -> None:
        """Does nothing: `_wrap` has registered the method's hook. (Lightning would register hooks on CUDA only.)"""

    def _share_before_clipping(self) -> None:
        """Makes `clip_gradients` share gradients first, whether Lightning or the user calls it."""
        clip = self.precision_plugin.clip_gradients

        def share_and_clip(
            optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm", **kwargs: Any
        ) -> None:
            if not clip_val > 0:
                self.synchronize(optimizer)
            elif self._clip(optimizer, float(clip_val), gradient_clip_algorithm == "value"):
                return
            clip(optimizer, clip_val, gradient_clip_algorithm, **kwargs)  # type: ignore[arg-type]

        self.precision_plugin.clip_gradients = share_and_clip  # type: ignore[method-assign]

    @property
    def _trainer(self) -> "pl.Trainer":
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def on_train_start(self) -> None:
        super().on_train_start()
        trainer = self._trainer
        if self._is_trial():
            return
        # An epoch's length in steps may be unknown.
        batches = trainer.num_training_batches if trainer.lightning_module.automatic_optimization else math.inf
        each = math.ceil(batches / trainer.accumulate_grad_batches) if 0 < batches < math.inf else math.inf
        steps = trainer.max_steps if trainer.max_steps >= 0 else math.inf
        epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else math.inf
        steps, epochs = min(steps, epochs * each), min(epochs, steps / each if each < math.inf else math.inf)
        # Several optimizers share the Trainer's count of steps.
        known = trainer.lightning_module.automatic_optimization and len(self.optimizers) == 1
        self.engine.expect(steps - trainer.global_step if known else math.inf)
        # By name, as either package's callbacks may be in use.
        stoppers = {"EarlyStopping", "Timer"}
        self.engine.may_end_sooner = any(
            stoppers & {kind.__name__ for kind in type(callback).__mro__} for callback in vars(trainer)["callbacks"]
        )
        if trainer.is_global_zero:
            warn_of_short_run(self.engine.registry, self.engine.warmup, steps, epochs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        with self.engine.guards.backward():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        engine = self.engine
        engine.epoch = self._epoch()
        with engine.stepping(optimizer):
            return super().optimizer_step(optimizer, engine.closure(optimizer, closure), model, **kwargs)

    def _epoch(self) -> float:
        """Epochs finished, including a fraction if the length of an epoch is known."""
        batches = self._trainer.num_training_batches
        done = self._trainer.fit_loop.epoch_loop.batch_idx / batches if 0 < batches < math.inf else 0.0
        return self._trainer.current_epoch + done

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # From 2.6 on, Lightning broadcasts before each batch whether rank 0 was told to stop: one 64-bit integer.
        if hasattr(self._trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
            self.engine.wire.ledger.record(LIGHTNING, "broadcast", 8)
        return super().training_step(*args, **kwargs)

    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._engine is None:
            return super().broadcast(obj, src)
        with self.engine.wire.calling("broadcast", len(pickle.dumps(obj)) + 8, LIGHTNING):
            return super().broadcast(obj, src)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        with self._calling("all_reduce", tensor):
            return super().reduce(tensor, *args, **kwargs)

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with self._calling("all_gather", tensor):
            return super().all_gather(tensor, *args, **kwargs)

    def _calling(self, collective: Collective, tensor: Any) -> AbstractContextManager[None]:
        if self._engine is None or not isinstance(tensor, Tensor):
            return nullcontext()
        return self._engine.wire.calling(collective, tensor.numel() * tensor.element_size(), LIGHTNING)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._engine is None:
            return super().barrier(*args, **kwargs)
        if self._deferred:
            # Lightning waits for all ranks after a save, which is still to come.
            self._deferred = False
            return None
        wire = self._engine.wire
        # A rank that has lost a peer may still save a checkpoint, but must not wait for the others afterwards.
        if not wire.failures:
            with Waiting(wire, f"barrier ({', '.join(map(str, args)) or LIGHTNING})"):
                super().barrier(*args, **kwargs)
        return None

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._engine is not None:
            self._viewing = self._engine.replicas.view_shared(self._together())

    def on_validation_end(self) -> None:
        if self._viewing and self._engine is not None:
            self._engine.replicas.view_own()
        self._viewing = False
        super().on_validation_end()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        weights_only = "optimizer_states" not in checkpoint
        if self._defers():
            assert self._own_callbacks is not None
            self._own_callbacks[1].add(filepath, weights_only, storage_options)
            self._deferred = True
            return
        entries: State = {}
        if self._engine is not None and self._engine.state.drifts:
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
        self._remove(filepath, lambda: remove(filepath), not self._interrupted)

    @property
    def _interrupted(self) -> bool:
        return self.lightning_module is not None and self._trainer.interrupted

    def _defers(self) -> bool:
        """Whether a save must wait for the end of the batch; see `DeferredSaves`."""
        if self._engine is None or not self._holds_state or self._trainer.interrupted or self._is_trial():
            return False
        return self._own_callbacks is not None and self._own_callbacks[1].due

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
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
            self._load_state(path, resumed)
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

    def _together(self) -> bool:
        """Whether all ranks call this during fit: not in its sanity check, and not one rank alone after an error."""
        return self.lightning_module is not None and not (self._trainer.sanity_checking or self._trainer.interrupted)

    def _is_trial(self) -> bool:
        """Whether all callbacks are replaced, as by a learning rate finder."""
        return self._own_callbacks is None or self._own_callbacks[0] not in vars(self._trainer)["callbacks"]

    def on_train_end(self) -> None:
        if self._is_trial():
            self.engine.settle()
        # Callbacks have run by now, and may have replaced the weights by averages of each rank's own.
        self.engine.reunite()
        self._unsettled = False
        super().on_train_end()

    def teardown(self) -> None:
        # A resumed fit with nothing left to do ends without a hook, and may have begun with replicas that differ.
        if self._unsettled and self._engine is not None and self._together():
            self.engine.settle()
        self._unsettled = False
        for ours in self._own_callbacks or ():
            if ours in self._callbacks:
                self._callbacks.remove(ours)
        self._callbacks, self._own_callbacks = [], None
        vars(self.precision_plugin).pop("clip_gradients", None)
        super().teardown()
