"""What a share of one's own gets from its base class."""

from torch import nn
from torch.optim import SGD, Optimizer

from lightning_sparsecomm.basis import Layout, Warmup, Wire
from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.channel.saved import Saved
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.exchange import DenseAllReduce, Gather
from lightning_sparsecomm.sharing import Share, Turn
from lightning_sparsecomm.sharing.gradients import NamedParameters


class Idle(Share):
    """A share that never communicates."""

    def __init__(self, optimizer: Optimizer, parameters: NamedParameters, wire: Wire) -> None:
        self.channel = Channel(Gather(SparseCodec(TopK(0.5))), [ErrorFeedback()])
        super().__init__(optimizer, parameters, wire)

    def due(self, turn: Turn) -> bool:
        return turn.kind == "gradients"

    def prepare(self, turn: Turn) -> None:
        self.context = self._context(turn, "thing")

    def commit(self) -> None: ...

    def abort(self) -> None: ...

    def state_dict(self) -> Saved:
        return {}

    def load_state_dict(self, saved: Saved) -> None: ...


def test_it_knows_its_parameters_and_the_round(wire: Wire) -> None:
    module = nn.Linear(3, 2)
    named = list(module.named_parameters())
    share = Idle(SGD(module.parameters(), lr=0.1), named[:1], wire)
    assert share.layout == Layout([("weight", (2, 3))])
    share.extend(named)
    assert share.layout == Layout([("weight", (2, 3)), ("bias", (2,))])
    warmup = Warmup(steps=10)
    share.prepare(Turn("gradients", step=3, epoch=1.5, seed=9, warmup=warmup))
    context = share.context
    assert (context.layout, context.step, context.epoch, context.seed) == (share.layout, 3, 1.5, 9)
    assert (context.rank, context.world_size, context.warmup, context.quantity) == (0, 1, warmup, "thing")


def test_by_default_it_starts_nothing_early_and_keeps_no_shared_weights(wire: Wire) -> None:
    module = nn.Linear(3, 2)
    share = Idle(SGD(module.parameters(), lr=0.1), list(module.named_parameters()), wire)
    assert not share.overlaps
    share.channel.exchange = DenseAllReduce()
    assert share.overlaps
    assert share.residual_norm() == 0
    assert share.shared_weights() is None
    share.before_step()
    share.skip()
    share.after_step()
