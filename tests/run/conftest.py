"""An engine whose exchange halves what it is given."""

from collections.abc import Iterator

import pytest

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import GradientSync, Method
from tests.run.training import Halving


@pytest.fixture
def engine(wire: Wire) -> Iterator[Engine]:
    Halving.rounds.clear()
    made = Engine(Method([GradientSync(Channel(Halving()))]), wire)
    yield made
    made.close()
