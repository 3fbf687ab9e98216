"""What arrives at one rank is altered: training stops with an error on all ranks, or the change has no effect."""

import contextlib
import queue
import random
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparsecomm.basis import peers
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.methods import (
    adacomp,
    aligned_topk,
    demo,
    des_loc,
    dgc,
    diloco,
    dryden,
    ef21,
    ef_signsgd,
    federated_averaging,
    gradient_dropping,
    local_adam,
    muloco,
    natural,
    ok_topk,
    omnireduce,
    onebit_adam,
    onebit_sgd,
    parallax,
    post_local_sgd,
    powersgd,
    qsgd,
    quantized,
    random_k,
    s2_reducer,
    sbc,
    signsgd,
    sketched_sgd,
    sparcml,
    sparse_loco,
    streaming_diloco,
    strom,
    terngrad,
)
from lightning_sparsecomm.run.agreement import digest_of
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from tests.distributed.launch import run_ranks
from tests.distributed.summed import in_regions, summed

STEPS = 6

METHODS: dict[str, Callable[[], Method]] = {
    "dgc": lambda: dgc(0.3, warmup_steps=0),
    "gradient_dropping": lambda: gradient_dropping(0.3),
    "local_adam": lambda: local_adam(0.3),
    "dgc, summed": lambda: summed(dgc, 0.5, warmup_steps=0),
    "dgc, regions": lambda: in_regions(dgc(0.3, warmup_steps=0)),
    "dgc, late": lambda: dgc(0.3, warmup_steps=0, delay=1),
    "dgc, local steps": lambda: dgc(0.3, warmup_steps=0, every=2),
    "dgc, ahead": lambda: dgc(0.3, warmup_steps=0, residual_in_weights=True),
    "local_adam, summed": lambda: summed(local_adam, 0.5),
    "federated_averaging": lambda: federated_averaging(every=2),
    "diloco": lambda: diloco(every=2),
    "sparse_loco": lambda: sparse_loco(every=2),
    "sbc": lambda: sbc(0.3, every=2),
    "sketched_sgd": lambda: sketched_sgd(density=0.3, columns=20, candidates=2),
    "powersgd": powersgd,
    "quantized": quantized,
    "random_k": lambda: random_k(0.3),
    "ok_topk": lambda: ok_topk(0.3, balance_every=2),
    "aligned_topk": lambda: aligned_topk(0.3, block_size=4),
    "ef21": lambda: ef21(0.3),
    "demo": lambda: demo(k=4, side=4),
    "streaming_diloco": lambda: streaming_diloco(every=2, delay=1),
    "muloco": lambda: muloco(every=2),
    "des_loc": lambda: des_loc(every=2, first_every=1, second_every=1),
    "s2_reducer": s2_reducer,
    "s2_reducer, sketched": lambda: s2_reducer(sketch_ratio=0.5),
    "qsgd": qsgd,
    "terngrad": terngrad,
    "natural": natural,
    "onebit_sgd": onebit_sgd,
    "ef_signsgd": ef_signsgd,
    "signsgd": signsgd,
    "strom": strom,
    "dryden": lambda: dryden(0.05),
    "adacomp": lambda: adacomp(bin_size=20),
    "onebit_adam": lambda: onebit_adam(warmup_steps=2),
    "parallax": lambda: parallax(tables=["*.weight"]),
    "omnireduce": omnireduce,
    "sparcml": lambda: sparcml(density=0.3, bucket=16),
    "post_local_sgd": lambda: post_local_sgd(dense_steps=2, every=2),
    "heavymix": lambda: sketched_sgd(density=0.3, columns=20, recovery="heavymix"),
    "clients": lambda: federated_averaging(every=2, fraction=0.5, weights=[1, 2]),
}

STOPS = ("PayloadError", "ReplicaError", "PeerError", "NonFiniteGradientError")


class Altered:
    """Counts the collectives of this process, and alters what one of them has received."""

    def __init__(self, call: int, chance: random.Random) -> None:
        self.call, self.chance, self.calls = call, chance, 0
        self.before: list[Tensor] = []

    def received(self, tensor: Tensor) -> None:
        data = tensor.view(-1).view(torch.uint8)
        if self.calls == self.call:
            kind = self.chance.choice(["bit", "bytes", "replay"])
            replayed = [each for each in self.before if len(each) == len(data)]
            at = self.chance.randrange(len(data))
            if kind == "replay" and replayed:
                data.copy_(replayed[-1])
            elif kind == "bytes":
                noise = [self.chance.randrange(256) for _ in data[at : at + 8]]
                data[at : at + 8] = torch.tensor(noise, dtype=torch.uint8)
            else:
                data[at] ^= 1 << self.chance.randrange(8)
        self.before.append(data.clone())
        self.calls += 1

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        def reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
            work = all_reduce(tensor, *args, **options)
            if work is not None:
                work.wait()
            self.received(tensor)
            return work

        def gather(output: Tensor, tensor: Tensor, *args: Any, **options: Any) -> None:
            all_gather(output, tensor, *args, **options)
            self.received(output)

        def exchange(output: Tensor, tensor: Tensor, *args: Any, **options: Any) -> Any:
            work = all_to_all(output, tensor, *args, **options)
            if work is not None:
                work.wait()
            self.received(output)
            return work

        # The second name is that of torch before 2.13.
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        all_reduce, all_gather = dist.all_reduce, getattr(dist, name)
        all_to_all = dist.all_to_all_single
        with (
            patch.object(dist, "all_reduce", reduce),
            patch.object(dist, name, gather),
            patch.object(dist, "all_to_all_single", exchange),
        ):
            yield


def _train(rank: int, world_size: int, name: str, altered: Altered) -> tuple[str, str]:
    """How a training ended, and a digest of its weights. Each rank draws gradients of its own."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    optimizer = (torch.optim.Adam if "adam" in name or name == "des_loc" else torch.optim.SGD)(
        module.parameters(), lr=0.1
    )
    generator = torch.Generator().manual_seed(rank)
    wire = Wire.apart()
    engine = Engine(METHODS[name](), wire) if name != "ddp" else None
    ended = "trained"
    try:
        if engine is not None:
            engine.registry.add_module(module)
            engine.agreement.on_setup()
            engine.register(optimizer)
        with altered.in_use():
            for _ in range(STEPS):
                for parameter in module.parameters():
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
                if engine is None:
                    # What DDP does with a gradient.
                    for parameter in module.parameters():
                        dist.all_reduce(parameter.grad.div_(world_size))
                    optimizer.step()
                else:
                    with engine.stepping(optimizer):
                        engine.closure(optimizer, lambda: None)()
                        optimizer.step()
            if engine is not None:
                engine.settle()
    except Exception as error:
        ended = type(error).__name__
        if ended not in STOPS:
            ended += f": {error}"
    finally:
        # A process that ends closes its connections too.
        (engine or wire).close()
    return ended, "".join(digest_of(weight) for weight in module.parameters())


def _attack(rank: int, world_size: int, name: str, seed: int) -> tuple[str, str]:
    torch.set_num_threads(1)
    chance, counted = random.Random(seed), Altered(-1, random.Random(0))
    assert _train(rank, world_size, name, counted)[0] == "trained"
    victim, call = chance.randrange(world_size), chance.randrange(counted.calls)
    with patch.object(peers, "_PATIENCE_WHEN_CLOSED", peers._PATIENCE_WHEN_CLOSED / 100):
        return _train(rank, world_size, name, Altered(call if rank == victim else -1, chance))


def outcome_of(tmp_path: Path, name: str, seed: int) -> str:
    """What an attack led to: "no effect", the errors of the ranks, "silent", or "hung or aborted"."""
    # Two ranks do not add up pieces.
    world_size = 3 if name.endswith((", summed", ", regions")) else 2
    try:
        found = run_ranks(
            tmp_path, world_size, _attack, world_size, name, seed, timeout=20, patience=timedelta(seconds=2)
        )
    except queue.Empty:
        return "hung or aborted"
    ends = [ended for ended, _ in found]
    if ends == ["trained"] * world_size:
        return "no effect" if len({weights for _, weights in found}) == 1 else "silent"
    # A rank that has ended learns of nothing: the altered call may be the last one, in which ranks compare weights.
    return "stopped" if all(each in (*STOPS, "trained") for each in ends) else " / ".join(ends)


def outcomes(tmp_path: Path, name: str, seeds: range) -> Counter[str]:
    """How often attacks on a method led to what."""
    return Counter(outcome_of(tmp_path, name, seed) for seed in seeds)


# One for each kind of exchange: payloads, sketches, blocks, updates of weights. All others are slow ones.
_QUICK = {"dgc", "dgc, summed", "s2_reducer", "sbc", "quantized"}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in METHODS]
)
def test_altered_collectives_stop_the_training(tmp_path: Path, name: str) -> None:
    found = outcomes(tmp_path, name, range(3))
    assert set(found) <= {"stopped", "no effect"}, found
    assert found["stopped"]


def test_ddp_does_not_notice(tmp_path: Path) -> None:
    """So that the attack is one."""
    assert outcomes(tmp_path, "ddp", range(3))["silent"]
