"""Over a high-latency link, messages go straight to whoever needs them, with the same results to the bit."""

import contextlib
import itertools
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from lightning_sparsecomm.basis.far import FAR_SECONDS, FarWire, far_of, straight
from lightning_sparsecomm.basis.groups import round_trip
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from tests.distributed.launch import run_ranks
from tests.distributed.scaled import METHODS, needs_adam
from tests.distributed.test_laws import quick_and_slow
from tests.distributed.test_reference import SIZES, Parameters, flat, gradients_of

# Whole tensors, and pieces of such as do not divide evenly.
ELEMENTS = [0, 1, 2, 7, 1_000, 400_003]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]


def _numbers(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(elements, generator=torch.Generator().manual_seed(rank + elements), dtype=torch.float64)
    return drawn.to(dtype) if dtype.is_floating_point else (drawn.abs() * 20).to(dtype)


def _results(rank: int, far: float) -> list[list[np.ndarray]]:
    """For each dtype and length: a gather, a sum, a sum that is waited for later, and an OR."""
    wire, found = FarWire(), []
    wire.far = far
    for dtype in DTYPES:
        for elements in ELEMENTS:
            x = _numbers(rank, elements, dtype)
            # Its elements are not next to each other.
            later = torch.stack([x, x], 1)[:, 0]
            wait = wire.all_reduce_later_(later)
            gathered, total = wire.all_gather(x), wire.all_reduce_(x.clone())
            wait()
            results = [gathered, total, later]
            if dtype == torch.uint8:
                results.append(wire.all_reduce_or_(x.clone()))
            found.append([result.double().numpy() for result in results])
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("far", [0.5, 10.0])
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_results(tmp_path: Path, world_size: int, far: float) -> None:
    """Sums are in rank order, also where ranks add up pieces."""
    calls = {
        len(straight("all_reduce", count * dtype.itemsize, world_size, far)) for count in ELEMENTS for dtype in DTYPES
    }
    assert calls == ({1, 2} if world_size > 2 and far < 1 else {1})
    ranks = iter(zip(*run_ranks(tmp_path, world_size, _results, far)))
    for dtype in DTYPES:
        for elements in ELEMENTS:
            versions = [_numbers(rank, elements, dtype) for rank in range(world_size)]
            total, union = versions[0].clone(), versions[0].clone()
            for version in versions[1:]:
                total += version
                if dtype == torch.uint8:
                    union |= version
            expected = [torch.stack(versions), total, total, union]
            for results in next(ranks):
                for result, wanted in zip(results, expected):
                    np.testing.assert_array_equal(result, wanted.double().numpy())


def _train(rank: int, method: Method, adam: bool, is_far: bool) -> bytes:
    module, wire = Parameters(), FarWire.apart()
    wire.far = 10.0 if is_far else 0.0
    engine = Engine(method, wire)
    engine.registry.add_module(module)
    optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(module.parameters(), lr=0.1)
    engine.register(optimizer)
    for gradient in gradients_of(rank)[:8]:
        with engine.stepping(optimizer):
            for parameter, part in zip(module.parameters(), torch.from_numpy(gradient).split(SIZES)):
                parameter.grad = part.view(parameter.shape)
            engine.synchronize(optimizer)
            optimizer.step()
    engine.settle()
    engine.close()
    if is_far:
        # They would go around the ring.
        assert not any("all_reduce" in row for row in wire.ledger.rows.values())
    return flat(parameter.detach() for parameter in module.parameters()).tobytes()


def _trained(tmp_path: Path, name: str, world_size: int, is_far: bool) -> list[bytes]:
    tmp_path.mkdir(exist_ok=True)
    return run_ranks(
        tmp_path, world_size, _train, METHODS[name], needs_adam(METHODS[name]) or name == "des_loc", is_far
    )


# The two share gradients in DDP's hook, or parameters of other names.
OTHERS = [name for name in METHODS if name not in ("dense", "split")]
QUICK = "dgc", "powersgd", "s2_reducer", "streaming_diloco"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", quick_and_slow(OTHERS, QUICK))
def test_training_has_the_same_bits(tmp_path: Path, name: str) -> None:
    """With two ranks, whose sums do not depend on the order."""
    near, far = (_trained(tmp_path / str(is_far), name, 2, is_far) for is_far in (False, True))
    assert near == far


@pytest.mark.parametrize("name", quick_and_slow(OTHERS, ("sketched_sgd",)))
def test_replicas_are_equal(tmp_path: Path, name: str) -> None:
    assert len(set(_trained(tmp_path, name, 3, True))) == 1


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("far", [0.004, 0.016, 0.128])
def test_round_trips_are_saved_where_bytes_take_less(world_size: int, far: float) -> None:
    whole, pieces = 1, 2
    ways = [len(straight("all_reduce", 2.0**power, world_size, far)) for power in range(34)]
    if world_size == 2:
        # As many bytes in one round trip less.
        assert set(ways) == {whole}
    else:
        assert [way for way, _ in itertools.groupby(ways)] == [whole, pieces, 0]
        gathers = [len(straight("all_gather", 2.0**power, world_size, far)) for power in range(34)]
        assert [way for way, _ in itertools.groupby(gathers)] == [1, 0]
    assert straight("all_reduce", 8, world_size, 0.0) == straight("broadcast", 8, world_size, far) == []
    assert straight("all_to_all", 2**40, world_size, far) == [("all_to_all", 2**40)]


@pytest.mark.parametrize(
    ("seconds", "saved", "expected"),
    [(0.1, 0.0, 0.128), (0.005, 0.0, 0.0), (0.003, 0.004, 0.004), (0.0005, 0.004, 0.0), (0.1, 0.064, 0.064)],
)
def test_a_link_stays_as_far_as_it_was(wire: Wire, seconds: float, saved: float, expected: float) -> None:
    """A resumed run has the bits of one that never stopped, unless it runs on another network."""
    here = FarWire()
    here.round_trip, here.far = seconds, far_of(seconds)
    engine = Engine(METHODS["dgc"], here)
    engine.state.load_state_dict(engine.state.state_dict() | {"far": saved}, as_many_ranks=True)
    assert here.far == expected
    assert engine.state.state_dict()["far"] == expected
    engine.close()


def _forward(source: socket.socket, to: socket.socket, seconds: float) -> None:
    with source, contextlib.suppress(OSError):
        while data := source.recv(65536):
            time.sleep(seconds)
            to.sendall(data)
        to.shutdown(socket.SHUT_RDWR)


def _proxy(port: int, seconds: float) -> socket.socket:
    """Listens, and passes on to another port what one client sends, and back, each so many seconds later."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        client, server = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
        for ends in ((client, server), (server, client)):
            threading.Thread(target=_forward, args=(*ends, seconds), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return listener


def test_a_round_trip_is_measured_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with _proxy(server.port, 0.004) as listener:
        client = TCPStore("127.0.0.1", listener.getsockname()[1], is_master=False, wait_for_workers=False)
        found = []
        for store in (server, client, PrefixStore("any", PrefixStore("more", client))):
            monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda store=store: store)
            found.append(round_trip(FAR_SECONDS))
    assert found[0] > 0
    assert all(each >= 0.008 for each in found[1:])


def test_where_ranks_met_in_a_file_no_way_is_known(wire: Wire) -> None:
    assert round_trip(FAR_SECONDS) == 0
    assert not FarWire.apart().far
