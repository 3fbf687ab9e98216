"""DistributedDataParallel whose reducer is idle: gradients stay local, and everything else works as in DDP."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparsecomm.basis.ledger import DDP_BUFFERS, DDP_SETUP
from lightning_sparsecomm.basis.overlaps import apart_from
from lightning_sparsecomm.basis.wire import Wire

# Attributes that plain DDP has not.
_OWN = ("wire", "_parts_of_weights", "_idle", "_was_idle", "_wanted", "_buffers_due", "_broadcasts")


class CountedDataParallel(DistributedDataParallel):
    """DDP that enters its own traffic (set-up broadcast and buffers) in the ledger of `wire`."""

    def __init__(self, module: nn.Module, wire: Wire, **options: object) -> None:
        super().__init__(module, **options)  # type: ignore[arg-type]
        self.wire = wire
        if options.get("init_sync", True):
            # The older of DDP's two options for buffers also excludes them from the set-up broadcast.
            older = options.get("broadcast_buffers") is False and options.get("forward_sync_buffers") is None
            named = (*module.named_parameters(), *(() if older else module.named_buffers()))
            sizes = [tensor.nbytes for name, tensor in named if name not in self.parameters_to_ignore]
            wire.ledger.record(DDP_SETUP, "broadcast", sum(sizes))

    def forward(self, *args: object, **kwargs: object) -> object:
        try:
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            # Torch's words for a reducer that still waits.
            if "Expected to have finished reduction in the prior iteration" not in str(error):
                raise
            raise ValueError(
                "find_unused_parameters must be True where DDP's buckets share gradients, as with methods.auto() and"
                " methods.dense(), and a backward pass reaches only some of the parameters, as in this training; it is"
                " False. Use SparseCommStrategy(methods.auto(), find_unused_parameters=True), for example, or"
                " strategy='sparsecomm', which needs no such option."
            ) from error

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles are plain DDP: a copy averages or evaluates, and is not the module that is trained."""
        state = super().__getstate__()  # type: ignore[no-untyped-call]
        plain = {name: value for name, value in state.items() if name not in _OWN}
        return object.__new__, (DistributedDataParallel,), plain

    # Private to DDP, which refuses to copy where the group is not the default one. A copy has that.
    def _check_default_group(self) -> None:
        pass

    # Private to DDP: collects the buffers that it broadcasts, also before forward passes. One that is a part of a
    # weight moves with that, and a rank may be ahead of others there.
    def _assign_modules_buffers(self) -> None:
        super()._assign_modules_buffers()  # type: ignore[no-untyped-call]
        buffers = dict(self.named_module_buffers)
        if "_parts_of_weights" not in vars(self):
            trained = [weight for weight in self.module.parameters() if weight.requires_grad]
            self._parts_of_weights = buffers.keys() - apart_from(buffers, trained).keys()
        if self._parts_of_weights:
            self.named_module_buffers = {
                name: buffer for name, buffer in buffers.items() if name not in self._parts_of_weights
            }
            self.modules_buffers = list(self.named_module_buffers.values())

    # Private to DDP: the one place where it broadcasts buffers, and no code of the user runs in it.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _sync_buffers(self) -> None:
        with self.wire.calling("broadcast", sum(buffer.nbytes for buffer in self.modules_buffers), DDP_BUFFERS):
            super()._sync_buffers()  # type: ignore[no-untyped-call]


class SwitchedDataParallel(CountedDataParallel):
    """DDP whose reducer can be told to be idle, before any forward pass: then gradients stay local.

    Args:
        idle: Whether it is idle now.
        broadcasts: Whether forward passes broadcast buffers, as DDP's options say; never, otherwise.
    """

    def __init__(
        self, module: nn.Module, wire: Wire, idle: Callable[[], bool], broadcasts: bool = True, **options: object
    ) -> None:
        self._idle = idle
        self._was_idle = False
        self._wanted = self._buffers_due = self._broadcasts = broadcasts
        super().__init__(module, wire, **options)

    def forward(self, *args: object, **kwargs: object) -> object:
        idle = self._idle()
        if self._was_idle and not idle and self.find_unused_parameters:
            # Which parameters were used while it was idle says nothing of the pass that it reduces now.
            self.reducer._reset_state()
        self._was_idle = idle
        return super().forward(*args, **kwargs)

    # DDP and Lightning switch reduction on and off by this attribute. While idle it reads False, so gradients stay
    # local. The value that was set decides whether the next forward pass broadcasts buffers.
    @property
    def require_backward_grad_sync(self) -> bool:
        return self._wanted and not self._idle()

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._wanted = value

    # As in DDP, a forward pass broadcasts buffers if the pass before it would have reduced gradients.
    @property
    def require_forward_param_sync(self) -> bool:
        return self._buffers_due

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._buffers_due = self._broadcasts and self._wanted and torch.is_grad_enabled()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        wanted, self._wanted = self._wanted, False
        try:
            yield
        finally:
            self._wanted = wanted


class LocalDataParallel(SwitchedDataParallel):
    """DDP that never reduces a gradient, as if always in `no_sync()`.

    DDP still broadcasts parameters once, and buffers before forward passes. The options of its reducer (unused
    parameters, static graph, gradient views) would have no effect and are dropped. So it copies nothing into buckets,
    and neither exchanges a map of unused parameters nor complains about them. Without `broadcasts`, buffers are never
    broadcast before forward passes, whatever DDP's options say.
    """

    REDUCER_OPTIONS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")

    def __init__(self, module: nn.Module, wire: Wire, broadcasts: bool = True, **options: object) -> None:
        kept = {name: value for name, value in options.items() if name not in self.REDUCER_OPTIONS}
        super().__init__(module, wire, lambda: True, broadcasts, **kept)
