"""torchft's own DiLoCo, to compare with: its Manager, its process group and its loop, in which nothing of ours is."""

import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import DataLoader

from lightning_sparsecomm.elastic.quorum import address_towards

OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
"""The outer optimizer of DiLoCo's paper."""

LONGEST = timedelta(minutes=5)


def steps(
    learner: Any,
    loader: "DataLoader[tuple[Tensor, ...]]",
    lighthouse: str,
    replica: str,
    every: int,
    fragments: Sequence[nn.Module] = (),
    delay: int = 0,
    alike: bool = False,
) -> Iterator[int]:
    """Trains one replica for ever; yields after each step the exchanges that lead to its weights.

    Args:
        learner: A LightningModule with an optimizer and perhaps a scheduler of it.
        loader: Its data, read again and again.
        lighthouse: Address of the lighthouse.
        replica: A name for messages.
        every: Steps between two exchanges of a fragment.
        fragments: Parts of its network that are exchanged one after another; the whole network by default.
        delay: Steps between the start of an exchange and its use.
        alike: Whether all replicas begin at once, with equal weights, so that none gets them from another. torchft
            serves them under the machine's name, which hosts of the lab do not know.
    """
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    network, configured = learner.network, learner.configure_optimizers()
    inner, schedule = configured, None
    if isinstance(configured, dict):
        inner, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    parts = list(fragments) or [network]
    kept = {"network": network, "inner": inner} | ({} if schedule is None else {"schedule": schedule})

    def load(state: dict[str, Any]) -> None:
        for name, each in kept.items():
            each.load_state_dict(state[name])

    host = address_towards(lighthouse)
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LONGEST),
        load_state_dict=load,
        state_dict=lambda: {name: each.state_dict() for name, each in kept.items()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=LONGEST,
        quorum_timeout=LONGEST,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=replica,
        hostname=host,
        init_sync=not alike,
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    outer = [torch.optim.SGD(part.parameters(), **OUTER) for part in parts]
    try:
        with DiLoCo(manager, parts, inner, outer, sync_every=every, fragment_sync_delay=delay):
            for batch in batches:
                inner.zero_grad()
                learner.training_step(batch, 0).backward()
                inner.step()
                if schedule is not None:
                    schedule.step()
                yield manager.current_step()
    finally:
        manager.shutdown(wait=False)
