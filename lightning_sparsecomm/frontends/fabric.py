"""The strategy for Fabric. The bindings combine it with the DDPStrategy of their package."""

import math
import os
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.basis.schedules import ByLength, Schedule, check_every
from lightning_sparsecomm.frontends.loading import loading
from lightning_sparsecomm.frontends.mixin import SynchronizingMixin
from lightning_sparsecomm.frontends.reporting import get_fabric_ready, say
from lightning_sparsecomm.frontends.uneven import UnevenLoader
from lightning_sparsecomm.run.agreement import CHECK_REPLICAS_EVERY
from lightning_sparsecomm.run.contents import fingerprint_of
from lightning_sparsecomm.run.rank_files import RankFiles
from lightning_sparsecomm.run.shared_gradients import clipped_before, clipping, refuse_amid_step
from lightning_sparsecomm.sharing.method import Method

if TYPE_CHECKING:
    from lightning_fabric.strategies.ddp import DDPStrategy
else:
    DDPStrategy = object


class FabricMixin(SynchronizingMixin, DDPStrategy):
    """Trains by DDP in a Fabric loop, with a method that shares the gradients.

    Use `fabric.backward`, `fabric.clip_gradients`, `fabric.no_backward_sync` and `optimizer.step` as with ddp. Code of
    your own that reads or changes `.grad` before the step calls `fabric.strategy.synchronize(optimizer)` first.

    Call `fabric.strategy.settle()` after the last step: it applies what residuals still hold, unless `length` tells
    when that is, and makes replicas equal with methods that let them drift (a local mode, weights exchanged every few
    steps). With these, use `with fabric.strategy.shared_model():` to evaluate or save the model before that.

    >>> from lightning_fabric import Fabric
    >>> from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy
    >>> fabric = Fabric(accelerator="cpu", devices=2, strategy=SparseCommStrategy(methods.dgc(0.01), length=5000))
    """

    _checked = False
    _resumed_from: str | None = None
    _uneven: UnevenLoader | None = None

    def __init__(
        self,
        method: Method | None = None,
        seed: int = 0,
        check_replicas_every: int | None = CHECK_REPLICAS_EVERY,
        length: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes what a Trainer's strategy takes, and the run's length, which a Trainer knows by itself.

        Args:
            method: As for a Trainer.
            seed: As for a Trainer.
            check_replicas_every: As for a Trainer.
            length: Steps that each optimizer will make in the whole run, equal on all ranks, for densities that depend
                on it; what still waits after the last one is applied then. None where unknown: then it is applied in
                `settle()`.
            **kwargs: Options of DDPStrategy and of DistributedDataParallel.

        Raises:
            TypeError: As for a Trainer; or `uneven_inputs` is given.
            ValueError: As for a Trainer; or `length` is not a whole number of at least 1.
        """
        if kwargs.pop("uneven_inputs", False):
            raise TypeError(
                "uneven_inputs is for a Trainer, which knows its training dataloader. In Fabric, leave it out and"
                " iterate over fabric.strategy.uneven(loader)."
            )
        super().__init__(method, seed, check_replicas_every, **kwargs)
        if length is not None:
            check_every("length", length)
        self._length = length
        self._early: list[Optimizer] = []

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        if self._engine is None:
            self._begin(self.root_device, getattr(self.precision, "scaler", None))
            self.engine.length = self._length or math.inf
            self.engine.agreement.arguments["length"] = self._length
            by_length = next(parts_in(self.engine.registry.methods, ByLength), None)
            if self._length is None and by_length is not None and self.global_rank == 0:
                warnings.warn(
                    "the density follows the run's length, which Fabric does not know: it supposes four times the"
                    " steps made, from 1,000 to 5,000. Give length=…, the number of optimizer steps, to"
                    f" {type(self).__module__}.SparseCommStrategy; or call fabric.strategy.settle() after the last one,"
                    " which applies what waits.",
                    stacklevel=2,
                )
            self._resumed_from = None
            self._refuse_epochs()
        self._checked = False
        return self._wrap(module, self._determine_ddp_device_ids())

    def _refuse_epochs(self) -> None:
        for schedule in parts_in(self.engine.registry.methods, Schedule):  # type: ignore[type-abstract]
            if schedule.warmup is not None and schedule.warmup.epochs:
                raise ValueError(
                    f"warmup_epochs={schedule.warmup.epochs} needs a Trainer, which counts epochs; Fabric does not."
                    " Use warmup_steps."
                )

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if self._engine is not None:
            self._engine.register(optimizer)
        else:
            # Before any module: its parameters are known by the first backward pass.
            self._early.append(optimizer)
        return super().setup_optimizer(optimizer)

    def _register_early(self) -> None:
        """Registers optimizers that were set up before their module, where that is known by now."""
        early, self._early = self._early, []
        for each in early:
            if self.engine.registry.held_by(each):
                self.engine.register(each)
            else:
                self._early.append(each)

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        # Only by the first backward pass are all modules known to be set up.
        if not self._checked:
            registry = self.engine.registry
            self._register_early()
            self.engine.agreement.on_optimizers([tracked.optimizer for tracked in registry.optimizers])
            registry.check()
            self._checked = True
            get_fabric_ready(self)
            if self._chooser is not None:
                self._chooser.begin(in_backward=True)
        if self._uneven is not None and self._uneven.filling:
            tensor = tensor * 0
        with self.engine.guards.backward():
            super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        engine, closure = self.engine, kwargs.pop("closure", None)
        with engine.stepping(optimizer):
            if closure is None:
                engine.synchronize(optimizer)
            else:
                kwargs["closure"] = engine.closure(optimizer, closure)
            return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips the shared gradient. Some methods clip each rank's own; then this returns the norm of that."""
        if norm_type != 2 and self.engine.clips(self._bare(optimizer)):
            raise ValueError(f"norm_type must be 2 with a method that clips each rank's own gradient; got {norm_type}.")
        locally = self._clip(optimizer, float(max_norm), by_value=False)
        tracked = self.engine.register(self._bare(optimizer))
        # Where the loss scaler skips this step: clip as under ddp, on all ranks.
        if locally and not math.isinf(tracked.norm):
            return torch.tensor(tracked.norm, device=self.root_device)
        if (norm := clipped_before(tracked)) is None:
            with clipping(tracked):
                norm = super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
            tracked.clipped_norm = norm
        return norm.to(self.root_device)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        if not self._clip(optimizer, clip_val, by_value=True):
            with clipping(self.engine.register(self._bare(optimizer))):
                super().clip_gradients_value(module, optimizer, clip_val)

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(module, state_dict, strict)
        if self._engine is not None:
            self._engine.restart()

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        if self._engine is not None and self._holds_state:
            refuse_amid_step(path, self._engine.registry.optimizers, self._engine.guards)
        # As in Lightning. We need the content before it is written.
        content = self._convert_stateful_objects_in_state(state, filter=filter or {})
        write = super().save_checkpoint
        self._save(
            path,
            content,
            {},
            self._trains(state),
            lambda path: write(path, content, storage_options),
            storage_options=storage_options,
        )

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        remainder = loading(super().load_checkpoint, weights_only)(path, state, strict)
        ready, trains = self._engine is not None, self._trains(state)
        # Loading a model after its optimizer, from the same checkpoint, has discarded the method's state.
        again = state is not None and self._resumed_from == os.fspath(path)
        if ready and (trains or again):
            self._register_early()
            # Lightning does not return all that it has read.
            checkpoint: dict[str, Any] = {}
            if self.global_rank == 0:
                checkpoint = loading(self.checkpoint_io.load_checkpoint, weights_only)(path)
            resumed = self._read_state(path, fingerprint_of(checkpoint), weights_only, self.engine.wire)
            found = self._load_state(path, resumed)
            if found:
                say(found, self)
            self._resumed_from = os.fspath(path)
            return remainder
        if ready and state is None:
            lost = "by hand. To resume, give fabric.load() model and optimizer in its state."
        elif trains and not ready:
            lost = "before fabric.setup(). Call fabric.load() after fabric.setup()."
        else:
            return remainder
        files = RankFiles(path, self.checkpoint_io, follow=True)
        if files.found():
            warnings.warn(
                f"memories start empty, and what the method held, in {files.folder}/, is not loaded: {path} was loaded"
                f" {lost}",
                stacklevel=2,
            )
        return remainder

    def _trains(self, state: Any) -> bool:
        """Whether a state that is saved or loaded holds an optimizer, and not only a model."""
        return isinstance(state, dict) and any(isinstance(each, Optimizer) for each in state.values())

    def uneven(self, loader: Iterable[Any]) -> UnevenLoader:
        """A loader of equally many batches on all ranks, for a training loop whose ranks have different numbers.

        A rank that has run out repeats its last batch, and `fabric.backward` multiplies its loss by zero: it counts as
        gradient zero, as with torch's `Join`. Call it on all ranks, after `fabric.setup`, and iterate on all ranks.

        Raises:
            ValueError: A rank has no batch at all. Raised on all ranks.
        """
        self._uneven = UnevenLoader(loader, self.engine.wire, self.root_device)
        return self._uneven

    def settle(self) -> None:
        """Makes replicas that have drifted equal: by their average, or by a last exchange of weight changes.

        Call it on all ranks after the last step; a Trainer's strategy does so by itself. It also compares the weights.

        Raises:
            ReplicaError: Weights still differ between ranks. Raised on all of them.
        """
        self.engine.wire.place = "settle()"
        self.engine.settle()
        self.engine.wire.place = None
