"""A small training whose weights are exchanged with a rank that does the same."""

import torch
from torch import nn

from lightning_sparsecomm.basis.mirror import MirrorWire
from lightning_sparsecomm.sharing import DeltaSync, Method
from lightning_sparsecomm.sharing.delta_share import DeltaShare


class Mirrored:
    """Steps of a small network by SGD; what is exchanged when is left to tests.

    Attributes:
        made: Steps that were made.
    """

    def __init__(self, method: Method, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(3)
        self.network = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 2)).to(dtype)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)
        sync = method.syncs[0]
        assert isinstance(sync, DeltaSync)
        share = sync.start(self.optimizer, list(self.network.named_parameters()), MirrorWire(2))
        assert isinstance(share, DeltaShare)
        self.share, self.made, self.dtype = share, 0, dtype

    def step(self) -> None:
        inputs = torch.randn(7, 5, generator=torch.Generator().manual_seed(self.made)).to(self.dtype)
        self.share.before_step()
        self.optimizer.zero_grad()
        self.network(inputs).square().mean().backward()
        self.share.before_update()
        self.optimizer.step()
        self.share.after_update()
        self.share.after_step()
        self.made += 1

    def weights(self) -> torch.Tensor:
        return torch.cat([weight.detach().flatten() for weight in self.network.parameters()])
