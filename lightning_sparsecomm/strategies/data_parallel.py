"""DistributedDataParallel with its reducer idle: gradients stay local, everything else is DDP's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparsecomm.wire import DDP_BUFFERS, DDP_SETUP, Wire


def tensor_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class CountedDataParallel(DistributedDataParallel):
    """DDP whose own traffic (set-up broadcast and buffers) is entered in a ledger.

    Args:
        module: The module to train.
        wire: Whose ledger it is.
        options: DDP's own.
    """

    def __init__(self, module: nn.Module, wire: Wire, **options: object) -> None:
        super().__init__(module, **options)  # type: ignore[arg-type]
        self.wire = wire
        if options.get("init_sync", True):
            # The older of DDP's two options for buffers leaves them out here too, the newer one does not.
            older = options.get("broadcast_buffers") is False and options.get("forward_sync_buffers") is None
            named = (*module.named_parameters(), *(() if older else module.named_buffers()))
            state = [tensor for name, tensor in named if name not in self.parameters_to_ignore]
            wire.ledger.record(DDP_SETUP, "broadcast", tensor_bytes(state))

    # DDP's own, and private: the one place where it broadcasts buffers, and nothing of the user's runs.
    def _sync_buffers(self) -> None:
        with self.wire.calling("broadcast", tensor_bytes(self.modules_buffers), DDP_BUFFERS):
            super()._sync_buffers()  # type: ignore[no-untyped-call]


class LocalDataParallel(CountedDataParallel):
    """DDP that never reduces a gradient: it always works as in `no_sync()`.

    What DDP sets up and broadcasts (parameters once, buffers before a forward pass) stays as it is. The options of
    its reducer (buckets, unused parameters, static graph, gradient views) have nothing to act on and are left out:
    so there is no copy into buckets, no map of unused parameters, and no error about them.

    Args:
        module: The module to train.
        wire: Whose ledger the traffic is entered in.
        broadcasts: Whether buffers are broadcast before forward passes, as DDP's options say.
        options: DDP's own.
    """

    REDUCER_OPTIONS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")

    def __init__(self, module: nn.Module, wire: Wire, broadcasts: bool = True, **options: object) -> None:
        self._wanted = self._buffers_due = self._broadcasts = broadcasts
        super().__init__(module, wire, **{k: v for k, v in options.items() if k not in self.REDUCER_OPTIONS})

    # DDP and Lightning switch reduction on and off by this attribute. It reads False, so gradients stay local; what it
    # was set to decides whether the next forward pass broadcasts buffers.
    @property
    def require_backward_grad_sync(self) -> bool:
        return False

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._wanted = value

    # As under DDP, buffers are broadcast before the forward pass that follows one which would have reduced.
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
