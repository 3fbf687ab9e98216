"""What torch's own DDP sends, counted from outside: the training is what it is without us."""

import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_sparsecomm.basis.ledger import DDP_BUFFERS, DDP_SETUP, GRADIENTS, Ledger

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

# torch's communication hooks that send all elements, by the bytes of each; None for the gradient's own.
_ELEMENT_BYTES = {"allreduce_hook": None, "fp16_compress_hook": 2, "bf16_compress_hook": 2}
_POWER_SGD = ("powerSGD_hook", "batched_powerSGD_hook")


class PlainDDP:
    """Counts gradients at each backward pass that DDP reduces, and takes the time waited from DDP's own samples.

    Sparse gradients are counted as if they were dense.

    Attributes:
        ledger: As a run of our strategies has it; `ddp_bytes` is what goes through DDP without a hook.
    """

    def __init__(self, world_size: int) -> None:
        self.ledger = Ledger(world_size)
        self._model: DistributedDataParallel | None = None
        self._watching: RemovableHandle | None = None
        self._sizes: list[tuple[int, int]] = []
        self._passes = self._timed = 0
        self._looked = time.perf_counter()
        self._power_sgd = 0

    @classmethod
    def of(cls, trainer: "Trainer", callback: str) -> "PlainDDP":
        """A counter for a Trainer whose strategy is not ours.

        Raises:
            TypeError: The strategy is not DDP, and there is more than one process.
        """
        strategy = trainer.strategy
        ddp = any(kind.__name__ == "DDPStrategy" for kind in type(strategy).__mro__)
        wrapped = isinstance(strategy.model, DistributedDataParallel)
        if trainer.world_size > 1 and not (ddp and wrapped):
            raise TypeError(
                f"strategy must be a sparsecomm strategy or 'ddp' with the callback {callback}; got"
                f" {type(strategy).__name__}, whose bytes it cannot count. Use strategy='sparsecomm', or leave the"
                " callback out."
            )
        return cls(trainer.world_size)

    def begin(self, trainer: "Trainer") -> None:
        """Call it when DDP is set up."""
        model = trainer.strategy.model
        if not isinstance(model, DistributedDataParallel):
            return
        self._model = model
        named = [each for each in model.module.named_parameters() if each[0] not in model.parameters_to_ignore]
        self._sizes = [(weight.numel(), weight.element_size()) for _, weight in named if weight.requires_grad]
        buffers = sum(buffer.nbytes for _, buffer in model.module.named_buffers())
        self.ledger.record(DDP_SETUP, "broadcast", sum(weight.nbytes for _, weight in named) + buffers)
        self._watching = model.register_forward_pre_hook(self._before_forward)

    def end(self) -> None:
        """Call it when training has ended: lets go of the model."""
        if self._watching is not None:
            self._watching.remove()
        self._model = self._watching = None

    def after_backward(self) -> None:
        """Call it after each backward pass: DDP has reduced gradients, unless it was told not to."""
        model, ledger = self._model, self.ledger
        if model is None:
            # One process: nothing is sent.
            return
        if not model.require_backward_grad_sync:
            return
        self._passes += 1
        elements, whole = sum(count for count, _ in self._sizes), sum(count * size for count, size in self._sizes)
        ledger.ddp_bytes += whole
        ledger.elements += elements
        sent_elements, handed = self._sent(elements, whole)
        ledger.sent_elements += sent_elements
        ledger.record(GRADIENTS, "all_reduce", handed)

    def look(self) -> None:
        """Brings the seconds waited up to date."""
        if self._model is not None:
            data = self._model._get_ddp_logging_data()
            # Nanoseconds of a backward pass, by DDP's latest sample: its first ten passes, then one of each hundred.
            waited = data.get("backward_comm_time", 0) - data.get("backward_compute_comm_overlap_time", 0)
            # A sample may be of a slow pass, and stands for all since: they did not take longer than there was time.
            now = time.perf_counter()
            seconds = min(max(0, waited) / 1e9 * (self._passes - self._timed), now - self._looked)
            self.ledger.clock.seconds["wait"] += seconds
            self._timed, self._looked = self._passes, now

    def _before_forward(self, model: DistributedDataParallel, arguments: object) -> None:
        if model.will_sync_module_buffers():
            self.ledger.record(DDP_BUFFERS, "broadcast", sum(buffer.nbytes for buffer in model.modules_buffers))

    def _sent(self, elements: int, whole: int) -> tuple[int, int]:
        """Elements and bytes that one pass hands over."""
        assert self._model is not None
        hooks: list[tuple[Callable[..., object], object]] = self._model._comm_hooks
        for hook, state in hooks:
            name = getattr(hook, "__name__", type(hook).__name__)
            if name in _POWER_SGD:
                before, self._power_sgd = self._power_sgd, state.total_numel_after_compression  # type: ignore[attr-defined]
                # 0 in the passes that it does not compress.
                count = self._power_sgd - before
                return (count, 4 * count) if count else (elements, whole)
            if name not in _ELEMENT_BYTES:
                warnings.warn(
                    f"the bytes that the DDP communication hook {name} sends are unknown: counted as without it.",
                    stacklevel=2,
                )
                continue
            each = _ELEMENT_BYTES[name]
            return elements, whole if each is None else each * elements
        return elements, whole
