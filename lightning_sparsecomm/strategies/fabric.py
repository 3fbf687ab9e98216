"""The strategy for Fabric; the bindings join it to the DDPStrategy of their package."""

import math
import os
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparsecomm.checkpoint import RankFiles, fingerprint_of
from lightning_sparsecomm.method import Method, parts_in
from lightning_sparsecomm.schedules import Schedule
from lightning_sparsecomm.strategies.mixin import SynchronizingMixin
from lightning_sparsecomm.synchronizer import Synchronizer

if TYPE_CHECKING:
    from lightning_fabric.strategies.ddp import DDPStrategy
else:
    DDPStrategy = object


class FabricMixin(SynchronizingMixin, DDPStrategy):
    """Trains by DDP, with the gradients synchronized by a method, in a Fabric loop.

    `fabric.backward`, `fabric.clip_gradients`, `fabric.no_backward_sync` and `optimizer.step` are used as with ddp.
    Code that reads or changes `.grad` by itself before the step calls `fabric.strategy.synchronize(optimizer)` first.
    Where replicas go apart (with a local mode, or a method that exchanges weights every so many steps),
    `fabric.strategy.settle()` after the last step leaves one model, and `with fabric.strategy.shared_model():` is for
    measuring and saving it in between.

    Args:
        method: How gradients are synchronized; by default `methods.dgc()` for SGD, and for other optimizers
            `methods.gradient_dropping(density=0.01)`.
        seed: Seed of the method's own randomness, if it has any; equal on all ranks.
        check_replicas_every: Optimizer steps between two comparisons of the trained weights between ranks, which should
            be equal to the bit: a difference raises `ReplicaError` on all ranks, naming the first parameter that
            differs. None compares them only in `settle()`, as is always done with several ranks.
            With methods that exchange weights every H steps the shared anchor is compared, and where local gradients
            let replicas go apart, their next average. It costs 32 bytes, and hashing at 0.6 GB/s on one core: 0.16 s
            for 25 M float32.
        **kwargs: Options of DDPStrategy and of DistributedDataParallel.

    Raises:
        TypeError: `method` is not a Method.
        ValueError: `check_replicas_every` is not a whole number of at least 1.
    """

    def __init__(
        self, method: Method | None = None, seed: int = 0, check_replicas_every: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._prepare(method, seed, check_replicas_every)
        self._checked = False
        self._resumed_from: str | None = None

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        if self._synchronizer is None:
            self._begin(self.root_device, getattr(self.precision, "scaler", None))
            self._resumed_from = None
            self._refuse_epochs()
        self._checked = False
        device_ids = self._determine_ddp_device_ids()
        # As Lightning does: https://pytorch.org/docs/stable/notes/cuda.html#id5
        stream = torch.cuda.stream(torch.cuda.Stream()) if device_ids is not None else nullcontext()
        with stream:
            return self._wrap(module, device_ids=device_ids, **self._ddp_kwargs)

    def _refuse_epochs(self) -> None:
        for schedule in parts_in(self.synchronizer.methods, Schedule):  # type: ignore[type-abstract]
            if schedule.warmup is not None and schedule.warmup.epochs:
                raise ValueError(
                    f"warmup_epochs={schedule.warmup.epochs} needs a Trainer, which counts epochs; Fabric does not."
                    " Use warmup_steps."
                )

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        # One that is set up before any module is registered at its first step.
        if self._synchronizer is not None:
            self._synchronizer.register(optimizer)
        return super().setup_optimizer(optimizer)

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        # The first moment at which all modules are known to be set up.
        if not self._checked:
            self.synchronizer.agree_on_optimizers()
            self.synchronizer.check()
            self._checked = True
        with self.synchronizer.backward():
            super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        synchronizer: Synchronizer = self.synchronizer
        closure = kwargs.pop("closure", None)
        with synchronizer.stepping(optimizer):
            if closure is None:
                synchronizer.synchronize(optimizer)
            else:
                kwargs["closure"] = synchronizer.closure(optimizer, closure)
            return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips the shared gradient; or, where the method clips so, each rank's own, whose norm it then returns."""
        if self.synchronizer.clips(self._bare(optimizer)):
            if norm_type != 2:
                raise ValueError(
                    f"norm_type must be 2 with a method that clips each rank's own gradient; got {norm_type}."
                )
            self._clip(optimizer, float(max_norm), by_value=False)
            norm = self.synchronizer.clipped_norm(self._bare(optimizer))
            if not math.isinf(norm):
                return torch.tensor(norm)
            # A step that is skipped: as under ddp, on all ranks.
        self.synchronize(optimizer)
        return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        if not self._clip(optimizer, clip_val, by_value=True):
            super().clip_gradients_value(module, optimizer, clip_val)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(module, state_dict, strict)
        if self._synchronizer is not None:
            self._synchronizer.forget()

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        # As Lightning does it, so that what is written is known beforehand.
        content = self._convert_stateful_objects_in_state(state, filter=filter or {})
        self._write_state(path, content, {}, self._trains(state), storage_options)
        super().save_checkpoint(path, content, storage_options)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        remainder = super().load_checkpoint(path, state, strict, weights_only)
        files, ready = RankFiles(path, self.checkpoint_io, follow=True), self._synchronizer is not None
        if state is None:
            if ready and files.found():
                warnings.warn(
                    f"what the method held is in {files.folder}/, and is not taken over where a checkpoint is loaded by"
                    " hand: memories start empty. To resume, give fabric.load() model and optimizer in its state.",
                    stacklevel=2,
                )
            return remainder
        # A model that is loaded after its optimizer, from the same checkpoint, has made us forget what came with that.
        again = ready and self._resumed_from == os.fspath(path)
        if not self._trains(state) and not again:
            return remainder
        if not ready:
            if files.found():
                warnings.warn(
                    f"{path} was loaded before fabric.setup(), so what the method held is lost, and memories start"
                    " empty. Call fabric.load() after fabric.setup().",
                    stacklevel=2,
                )
            return remainder
        # Lightning keeps to itself what it has read.
        checkpoint: dict[str, Any] = {}
        if self.global_rank == 0:
            checkpoint = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        resumed = self._read_state(path, fingerprint_of(checkpoint), weights_only, self.synchronizer.wire)
        self._take_over_state(path, resumed)
        self._resumed_from = os.fspath(path)
        return remainder

    def _trains(self, state: Any) -> bool:
        """Whether what is saved or loaded is a training, not only a model."""
        return isinstance(state, dict) and any(isinstance(each, Optimizer) for each in state.values())

    def settle(self) -> None:
        """Makes replicas that have gone apart one, for good: by their average, or by a last exchange of what their
        weights have changed. Call it on all ranks after the last step, as a Trainer's strategy does by itself; where
        replicas are equal, it only makes sure of that.

        Raises:
            ReplicaError: Weights differ between ranks all the same; on all of them.
        """
        self.synchronizer.settle()

    def teardown(self) -> None:
        self._end()
        super().teardown()
