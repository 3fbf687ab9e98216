"""What all tests share: compiled kernels, a fixed seed, and a process group of one rank."""

import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from lightning_sparsecomm.basis.groups import destroy_all
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.codecs import CountSketch
from lightning_sparsecomm.kernels import Update, kernels_for, position_kernels_for

# Tests fork their ranks. A thread pool started before a fork is dead in the child, so none is ever started here.
torch.set_num_threads(1)
# Lightning sets it too, in each fit, unless this is set. With more threads, ranks that are forked later would hang.
os.environ["OMP_NUM_THREADS"] = "1"

# A first call may compile a kernel, and a machine may be busy: pytest's timeout is deadline enough.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def _compile_updates() -> None:
    x = torch.ones(2)
    kernels = kernels_for(x.device, x.dtype)
    kernels.update_(Update(x.clone(), x, x.clone()), 0.5, 2)
    kernels.reaching(x, 0.5, 2)
    kernels.kth_largest(x, 1)
    kernels.largest(x, 1, 0)
    kernels.add_up(torch.tensor([0, 1]), x)
    kernels.energies(x, torch.tensor([0, 2]))


def _compile_positions() -> None:
    indices = torch.tensor([0, 3])
    positions = position_kernels_for(indices.device)
    positions.read_golomb(positions.write_golomb(indices, 1), 2, 4, 1)
    positions.read_run_lengths(positions.write_run_lengths(indices), 2)
    positions.read_bitmap(positions.write_bitmap(indices, 4), 2)
    positions.spans(indices, indices)


def _compile_sketches() -> None:
    x = torch.ones(2)
    sketch = CountSketch(1, 2)
    sketch.insert_(table := sketch.empty(x.device, x.dtype), x, 0)
    sketch.query(table, 2, 0)
    sketch.largest(table, 2, 1, 0)


@pytest.fixture(scope="session", autouse=True)
def _kernels() -> None:
    """Compiles the kernels, or loads them, once for all the ranks that tests fork."""
    parts = [_compile_updates, _compile_positions, _compile_sketches]
    # What one worker has compiled, others find on disk, if they begin at different ends.
    for part in parts if os.environ.get("PYTEST_XDIST_WORKER") != "gw1" else reversed(parts):
        part()
    # What is loaded by now stays. Forked ranks need not look through it for garbage, which would copy its memory.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tests marked `few`, makes all cases slow but so many, evenly spread, with the first among them."""
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("few") is not None and item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        marker = group[0].get_closest_marker("few")
        assert marker is not None
        (count,) = marker.args
        kept = {number * len(group) // count for number in range(count)}
        for number, item in enumerate(group):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    # Asks the driver, and starts no CUDA: tests fork.
    if marker is not None and (there := torch.cuda.device_count()) < marker.args[0]:
        pytest.skip(f"needs {marker.args[0]} NVIDIA GPUs; torch finds {there}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    """A wire in this process alone: a group of one rank, on Gloo."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Wire()
    destroy_all()
