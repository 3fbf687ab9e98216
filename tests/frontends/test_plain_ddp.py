"""What torch's own DDP waited, from its samples."""

import time
from typing import Any

from lightning_sparsecomm.frontends.plain_ddp import PlainDDP


class Sampled:
    """Stands for DistributedDataParallel, whose latest sample took a whole second."""

    def _get_ddp_logging_data(self) -> dict[str, int]:
        return {"backward_comm_time": 1_500_000_000, "backward_compute_comm_overlap_time": 500_000_000}


def test_a_slow_sample_never_stands_for_more_time_than_has_passed() -> None:
    counter: Any = PlainDDP(2)
    begin = time.perf_counter()
    counter._model, counter._passes = Sampled(), 1000
    counter.look()
    passed = time.perf_counter() - begin
    waited = counter.ledger.clock.seconds["wait"]
    assert 0 < waited <= passed + 0.1
    counter._passes += 1
    counter._looked -= 60
    counter.look()
    assert 1 <= counter.ledger.clock.seconds["wait"] - waited < 1.001
