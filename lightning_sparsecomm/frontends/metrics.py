"""Metrics of communication, for logging with torchmetrics."""

import torch
from torch import Tensor
from torchmetrics import Metric


class CompressionRatio(Metric):
    """DDP's bytes on the link divided by those that were sent; both are summed over updates and ranks.

    >>> ratio = CompressionRatio()
    >>> ratio.update(sent_bytes=10.0, ddp_bytes=1000.0)
    >>> ratio.update(sent_bytes=30.0, ddp_bytes=1000.0)
    >>> ratio.compute()
    tensor(50., dtype=torch.float64)

    The ratio is `nan` if nothing was sent: before the first update, and with one process.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    sent_bytes: Tensor
    ddp_bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        # float64 holds byte counts exactly up to 9 petabytes.
        self.add_state("sent_bytes", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("ddp_bytes", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, sent_bytes: float, ddp_bytes: float) -> None:
        """Adds the bytes of one or more steps.

        Args:
            sent_bytes: `ledger.sent_link_bytes` of these steps.
            ddp_bytes: `ledger.ddp_link_bytes` of these steps.

        Raises:
            ValueError: A number of bytes is negative.
        """
        for name, value in (("sent_bytes", sent_bytes), ("ddp_bytes", ddp_bytes)):
            if value < 0:
                raise ValueError(
                    f"{name} must not be negative; got {value!r}. Give the bytes of the steps since the last update."
                )
        self.sent_bytes += sent_bytes
        self.ddp_bytes += ddp_bytes

    def compute(self) -> Tensor:
        """The ratio, as float64."""
        return self.ddp_bytes / self.sent_bytes if self.sent_bytes > 0 else torch.full_like(self.sent_bytes, torch.nan)
