"""The strategy for a Trainer; the bindings join it to the DDPStrategy of their package."""

import math
import pickle
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparsecomm.checkpoint import RankFiles, Resumed, State, fingerprint_of, own_entries, with_entries
from lightning_sparsecomm.method import Method
from lightning_sparsecomm.strategies.mixin import SynchronizingMixin
from lightning_sparsecomm.strategies.settling import Settling
from lightning_sparsecomm.wire import LIGHTNING, Collective, Ledger, Waiting, Wire

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy
else:
    DDPStrategy = object

T = TypeVar("T")


def _with_result(closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure for a precision plugin with a loss scaler, which makes no step where a closure, such as one of the
    user's own in `optimizer_step`, gives None. But by then gradients are shared, and other ranks may step."""

    def with_result() -> Any:
        result = closure()
        return result if result is not None else torch.zeros(())

    return with_result


class TrainerMixin(SynchronizingMixin, DDPStrategy):
    """Trains by DDP, with the gradients synchronized by a method.

    Switching from `strategy="ddp"` changes nothing else: the LightningModule, its optimizers, the Trainer's clipping
    and accumulation stay as they are. A few hooks see a different moment: `on_after_backward` finds this rank's own
    gradients, `on_before_optimizer_step` what the optimizer is given: the mean of what ranks sent, which with dgc
    carries momentum already.

    Args:
        method: How gradients are synchronized; by default `methods.dgc()` for SGD, and for other optimizers
            `methods.gradient_dropping(density=0.01)`.
        seed: Seed of the method's own randomness, if it has any; equal on all ranks.
        check_replicas_every: Optimizer steps between two comparisons of the trained weights between ranks, which should
            be equal to the bit: a difference raises `ReplicaError` on all ranks, naming the first parameter that
            differs. None compares them only at the end of fit, as is always done with several ranks.
            With methods that exchange weights every H steps the shared anchor is compared, and where local gradients
            let replicas go apart, their next average. It costs 32 bytes, and hashing at 0.6 GB/s on one core: 0.16 s
            for 25 M float32.
        **kwargs: Options of DDPStrategy and of DistributedDataParallel.

    Raises:
        TypeError: `method` is not a Method.
        ValueError: A communication hook is given besides a method, or `check_replicas_every` is not a whole number of
            at least 1.
    """

    def __init__(
        self, method: Method | None = None, seed: int = 0, check_replicas_every: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._prepare(method, seed, check_replicas_every)
        self._viewing = False
        self._resumed: tuple[Any, Resumed, Ledger] | None = None
        self._handed: dict[str, Any] | None = None
        self._settling: tuple[list[Any], Settling | None] = [], None
        self._unsettled = False

    def setup(self, trainer: "pl.Trainer") -> None:
        fitting = trainer.state.fn == "fit"
        if fitting:
            self._begin(self.root_device, getattr(self.precision_plugin, "scaler", None))
        super().setup(trainer)
        if fitting:
            self.synchronizer.agree_on_optimizers(self.optimizers)
            self.synchronizer.check()
            for optimizer in self.optimizers:
                self.synchronizer.register(optimizer)
            # As Lightning has it: 0 and less mean no clipping.
            if trainer.gradient_clip_val is not None and not trainer.gradient_clip_val <= 0:
                by_value = trainer.gradient_clip_algorithm == "value"
                self.synchronizer.take_over_clipping(float(trainer.gradient_clip_val), by_value)
            self._share_before_clipping()
            callbacks: list[Any] = vars(trainer)["callbacks"]
            self._settling = callbacks, Settling(self.synchronizer)
            callbacks.insert(0, self._settling[1])
            self._unsettled = True

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        # As Lightning does: https://pytorch.org/docs/stable/notes/cuda.html#id5
        stream = torch.cuda.stream(torch.cuda.Stream()) if device_ids is not None else nullcontext()
        with stream:
            return self._wrap(model, device_ids=device_ids, **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        """Nothing: the hook, where the method has one, came with `_wrap`. (Lightning registers hooks on CUDA only.)"""

    def _share_before_clipping(self) -> None:
        """Lets every call of `clip_gradients`, Lightning's own or the user's, find shared gradients."""
        clip = self.precision_plugin.clip_gradients

        def share_and_clip(
            optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm", **kwargs: Any
        ) -> None:
            if clip_val > 0:
                if self._clip(optimizer, float(clip_val), gradient_clip_algorithm == "value"):
                    return
            else:
                self.synchronize(optimizer)
            clip(optimizer, clip_val, gradient_clip_algorithm, **kwargs)  # type: ignore[arg-type]

        self.precision_plugin.clip_gradients = share_and_clip  # type: ignore[method-assign]

    def on_train_start(self) -> None:
        super().on_train_start()
        self._warn_of_short_run()

    def _warn_of_short_run(self) -> None:
        """Says so where the run ends before a warm-up, or before the first exchange."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if not trainer.is_global_zero or self._is_trial():
            return
        # Not where an epoch's length in steps is unknown.
        batches = trainer.num_training_batches if self.lightning_module.automatic_optimization else math.inf
        each = math.ceil(batches / trainer.accumulate_grad_batches) if 0 < batches < math.inf else math.inf
        steps = trainer.max_steps if trainer.max_steps >= 0 else math.inf
        epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else math.inf
        steps, epochs = min(steps, epochs * each), min(epochs, steps / each if each < math.inf else math.inf)
        self.synchronizer.warn_of_long_every(steps)
        for words in self.synchronizer.outlasted(steps, epochs):
            warnings.warn(
                f"the warm-up does not end before the training: {words}. The density that was asked for is never"
                " reached. Shorten warmup_steps or warmup_epochs.",
                stacklevel=2,
            )

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        with self.synchronizer.backward():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        synchronizer = self.synchronizer
        synchronizer.epoch = self._epoch()
        closure = synchronizer.closure(optimizer, closure)
        if synchronizer.scaling is not None:
            closure = _with_result(closure)
        with synchronizer.stepping(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _epoch(self) -> float:
        """Epochs finished, with fraction; whole ones only where the length of an epoch is not known."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        batches = trainer.num_training_batches
        done = trainer.fit_loop.epoch_loop.batch_idx / batches if 0 < batches < float("inf") else 0.0
        return trainer.current_epoch + done

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # Before each batch, Lightning from 2.6 on broadcasts whether rank 0 was told to stop: one 64-bit integer.
        assert self.lightning_module is not None
        if hasattr(self.lightning_module.trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
            self.synchronizer.wire.ledger.record(LIGHTNING, "broadcast", 8)
        return super().training_step(*args, **kwargs)

    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._synchronizer is None:
            return super().broadcast(obj, src)
        with self.synchronizer.wire.calling("broadcast", len(pickle.dumps(obj)) + 8, LIGHTNING):
            return super().broadcast(obj, src)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        with self._calling("all_reduce", tensor):
            return super().reduce(tensor, *args, **kwargs)

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with self._calling("all_gather", tensor):
            return super().all_gather(tensor, *args, **kwargs)

    def _calling(self, collective: Collective, tensor: Any) -> AbstractContextManager[None]:
        if self._synchronizer is None or not isinstance(tensor, Tensor):
            return nullcontext()
        return self._synchronizer.wire.calling(collective, tensor.numel() * tensor.element_size(), LIGHTNING)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._synchronizer is None:
            return super().barrier(*args, **kwargs)
        wire = self._synchronizer.wire
        # Who has lost a peer may have a checkpoint to save, and has nobody to wait for after it.
        if not wire.failures:
            with Waiting(wire, f"barrier ({', '.join(map(str, args)) or LIGHTNING})"):
                super().barrier(*args, **kwargs)
        return None

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._synchronizer is not None:
            self._viewing = self._synchronizer.replicas.view_shared(self._together())

    def on_validation_end(self) -> None:
        if self._viewing and self._synchronizer is not None:
            self._synchronizer.replicas.view_own()
        self._viewing = False
        super().on_validation_end()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        # Ours first: where the checkpoint is there, so is what belongs to it. Called on all ranks.
        entries: State = {}
        if self._synchronizer is not None and self._synchronizer.drifts:
            entries = own_entries(checkpoint, self._handed)
        self._handed = None
        self._write_state(filepath, checkpoint, entries, "optimizer_states" in checkpoint, storage_options)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        RankFiles(filepath, self.checkpoint_io).remove(self.global_rank)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._resumed = None
        if self.lightning_module is not None and self.lightning_module.trainer.state.fn == "fit":
            # Before the hooks of those who change it when it is loaded, and who are to find this rank's own entries.
            wire = Wire()
            resumed = self._read_state(checkpoint_path, fingerprint_of(checkpoint), weights_only, wire)
            with_entries(checkpoint, resumed.entries)
            self._resumed = checkpoint_path, resumed, wire.ledger
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._synchronizer is not None and self._resumed is not None:
            path, resumed, ledger = self._resumed
            self._take_over_state(path, resumed)
            self._synchronizer.wire.ledger.load_state_dict(ledger.state_dict())
            self._warn_of_random_numbers()
        self._resumed = None

    def _warn_of_random_numbers(self) -> None:
        """Says so where a resumed run cannot equal one that was never stopped, under ddp neither."""
        assert self.lightning_module is not None
        drawing = [
            name
            for name, module in self.lightning_module.named_modules()
            if (isinstance(module, _DropoutNd) and module.p > 0)
            or (isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0)
        ]
        if drawing and self.global_rank == 0:
            warnings.warn(
                f"the model draws random numbers in training ({drawing[0]!r}), and Lightning's checkpoints do not hold"
                " the state of generators: from here on the run is not the one that would have followed without a"
                " stop, as under ddp.",
                stacklevel=2,
            )

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        if self._synchronizer is not None:
            self._synchronizer.forget()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What is saved of the model: where replicas go apart, the one that they share. Called on all ranks."""
        if self._synchronizer is None or not self._synchronizer.replicas.view_shared(self._together()):
            self._handed = super().lightning_module_state_dict()
            return self._handed
        try:
            state = super().lightning_module_state_dict()
            self._handed = {
                name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()
            }
            return self._handed
        finally:
            self.synchronizer.replicas.view_own()

    def _together(self) -> bool:
        """Whether all ranks are in the midst of a fit: not in its sanity check, and not one alone, after an error."""
        if self.lightning_module is None:
            return False
        trainer = self.lightning_module.trainer
        return not trainer.sanity_checking and not trainer.interrupted

    def _is_trial(self) -> bool:
        """Whether someone, such as a learning rate finder, has put other callbacks in the place of them all."""
        assert self.lightning_module is not None
        return self._settling[1] not in vars(self.lightning_module.trainer)["callbacks"]

    def on_train_end(self) -> None:
        if self._is_trial():
            self.synchronizer.settle()
        # Callbacks have had their say by now, and may have put averages of each rank's own weights in their place.
        self.synchronizer.reunite()
        self._unsettled = False
        super().on_train_end()

    def teardown(self) -> None:
        # A fit that is resumed where nothing is left to do ends without a word; it may have begun with replicas apart.
        if self._unsettled and self._synchronizer is not None and self._together():
            self.synchronizer.settle()
        self._unsettled = False
        callbacks, settling = self._settling
        if settling in callbacks:
            callbacks.remove(settling)
        self._settling = [], None
        vars(self.precision_plugin).pop("clip_gradients", None)
        self._end()
        super().teardown()
