"""The strategy for a Trainer. The bindings combine it with the DDPStrategy of their package."""

import math
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparsecomm.basis.groups import broadcast_object
from lightning_sparsecomm.basis.ledger import LIGHTNING, Collective
from lightning_sparsecomm.basis.wire import Waiting
from lightning_sparsecomm.frontends.checkpointing import CheckpointingMixin
from lightning_sparsecomm.frontends.expected import expected, note_place
from lightning_sparsecomm.frontends.reporting import get_ready, profile_of, say_start
from lightning_sparsecomm.frontends.stopping import NoQuestion, StopQuestion
from lightning_sparsecomm.frontends.uneven import UnevenMixin
from lightning_sparsecomm.run.clipping import warn_of_late_clipping

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy
else:
    DDPStrategy = object

T = TypeVar("T")


class TrainerMixin(UnevenMixin, CheckpointingMixin, DDPStrategy):
    """Trains by DDP, with a method that shares the gradients.

    To switch from `strategy="ddp"`, change nothing else: the LightningModule, its optimizers, the Trainer's clipping
    and accumulation stay as they are. Two hooks see other gradients: `on_after_backward` finds this rank's own, and
    `on_before_optimizer_step` the mean of what ranks sent, which with dgc already contains momentum. In longer runs the
    default exchanges every few steps only, and that hook finds this rank's own in between.

    >>> import pytorch_lightning as pl
    >>> from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
    >>> strategy = SparseCommStrategy(methods.dgc(density=0.01, warmup_steps=100))
    >>> pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False).strategy.method
    dgc(density=0.01, warmup_steps=100)

    Attributes:
        ledger: What this rank has sent. Where `fit` started processes of its own, rank 0's, once they have ended.
        announced: What was said at the start: a line for each optimizer; on rank 0.
    """

    # Of the package that a Trainer comes from: starts processes by fork or spawn, and brings the ledger back.
    reporting_launcher: ClassVar[Any] = None

    announced: Sequence[str] = ()
    come_and_go = False  # whether ranks may join and leave amid a run
    _unsettled = False
    _idle_since = 0.0
    _question = NoQuestion()
    _length_before_trial = math.inf, False

    def setup(self, trainer: "pl.Trainer") -> None:
        if trainer.state.fn != "fit":
            return super().setup(trainer)
        self._begin(self.root_device, getattr(self.precision_plugin, "scaler", None))
        super().setup(trainer)
        self.engine.agreement.on_optimizers(self.optimizers)
        self.engine.registry.check()
        threshold = _threshold_of(trainer)
        self.engine.registry.clips_by_value = threshold is not None and trainer.gradient_clip_algorithm == "value"
        for optimizer in self.optimizers:
            self.engine.register(optimizer)
        if threshold is not None:
            self.engine.take_over_clipping(threshold)
        self._share_before_clipping()
        warn_of_late_clipping(self.engine.registry.optimizers, type(trainer.lightning_module), self.is_global_zero)
        self._add_callbacks(trainer)
        self._unsettled = True
        self.engine.wire.ledger.clock.profile = profile_of(vars(trainer)["profiler"], type(self).__name__)
        return None

    @property
    def taking_part(self) -> int:
        """How many ranks share what they train."""
        return self.world_size

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = self.reporting_launcher(self, start_method=self._start_method)

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

    def on_train_start(self) -> None:
        super().on_train_start()
        self._idle_since = time.monotonic()
        trainer, engine = self._trainer, self.engine
        found = expected(trainer, [each.steps for each in engine.registry.optimizers])
        before = engine.length, engine.may_end_sooner
        engine.expect(found.left, found.may_end_sooner)
        if self._is_trial():
            # A fit that has begun goes on after it.
            self._length_before_trial = before
            return
        self._question = StopQuestion(trainer, engine)
        length = engine.follow_length()
        get_ready(self, trainer)
        if trainer.is_global_zero:
            say_start(self, trainer, found, length)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        with self.engine.guards.backward():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        # StochasticWeightAveraging's last epoch only measures for batch norm. Lightning steps once in it, with the
        # gradients of the epoch before: that would move the averaged weights.
        if getattr(self._trainer.fit_loop, "_skip_backward", False):
            result = closure()
            self.engine.reunite()  # Each rank has averaged its own weights.
            return result
        engine = self.engine
        # A hook at an epoch's end, which finds the shared model, may step too.
        engine.replicas.view_own()
        note_place(engine, self._trainer, self.uneven_inputs)
        with engine.stepping(optimizer):
            result = super().optimizer_step(optimizer, engine.closure(optimizer, closure), model, **kwargs)
        self._idle_since = time.monotonic()
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._chooser is not None:
            self._chooser.before_batch()
        self._question.count(self._idle_since)
        # The user's code may share gradients in it.
        note_place(self.engine, self._trainer, self.uneven_inputs)
        result = super().training_step(*args, **kwargs)
        self._idle_since = time.monotonic()
        return result

    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._engine is None:
            return super().broadcast(obj, src)
        wire = self._engine.wire
        with wire.calling("broadcast", len(pickle.dumps(obj)) + 8, LIGHTNING):
            # Not in the default group, where Lightning broadcasts before each batch.
            return broadcast_object(obj, src, wire.group)  # type: ignore[return-value]

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
        self._question.before_validation()
        self._view_shared()

    def on_validation_end(self) -> None:
        if self._viewing and self._engine is not None:
            self._engine.replicas.view_own()
        self._viewing = None
        super().on_validation_end()
        if self._engine is not None:
            self._engine.wire.place = None
        self._idle_since = time.monotonic()

    def on_train_end(self) -> None:
        if self._is_trial():
            self.engine.settle()
            self.engine.length, self.engine.may_end_sooner = self._length_before_trial
            super().on_train_end()
            return
        self._question.end()
        # Callbacks have run by now, and may have replaced the weights by averages of each rank's own.
        self.engine.reunite()
        self._unsettled = False
        super().on_train_end()
        self._question.leave()

    def teardown(self) -> None:
        # A resumed fit with nothing left to do ends without a hook, and may have begun with replicas that differ.
        if self._unsettled and self._engine is not None and self._together():
            self.engine.settle()
        self._unsettled = False
        self._remove_callbacks()
        self._question.restore()
        self._question = NoQuestion()
        vars(self.precision_plugin).pop("clip_gradients", None)
        super().teardown()


def _threshold_of(trainer: "pl.Trainer") -> float | None:
    """By which gradients are clipped. As in Lightning, 0 and less mean no clipping."""
    threshold = trainer.gradient_clip_val
    return None if threshold is None or threshold <= 0 else float(threshold)
