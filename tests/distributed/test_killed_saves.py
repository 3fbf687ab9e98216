"""One rank is killed at every point of a save, and at random moments: the checkpoint has the files of all ranks."""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_sparsecomm.basis.wire import PeerError, Wire
from lightning_sparsecomm.run import rank_files
from lightning_sparsecomm.run.checkpoint import read
from lightning_sparsecomm.run.contents import fingerprint_of
from lightning_sparsecomm.run.rank_files import RankFile, RankFiles
from lightning_sparsecomm.run.saves import Ranks, Saves
from tests.distributed.launch import FORK, run_ranks
from tests.run.test_rank_files import Plugin, content

RANKS = 2
PATIENCE = timedelta(seconds=20)
CPU = torch.device("cpu")


class Fatal:
    """Ends the process at one of the points that it passes; counts them."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.passed, self.armed = at, 0, False

    def __call__(self) -> None:
        if self.armed:
            if self.passed == self.at:
                os._exit(1)
            self.passed += 1

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            self()
            result = function(*args, **options)
            self()
            return result

        return called


class FatalPlugin(Plugin):
    """Passes points before, in the middle of, and after each write and removal."""

    def __init__(self, fatal: Fatal) -> None:
        self.fatal = fatal

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.fatal()
        super().save_checkpoint(checkpoint, path)
        whole = Path(path).read_bytes()
        Path(path).write_bytes(whole[: len(whole) // 2])
        self.fatal()
        Path(path).write_bytes(whole)
        self.fatal()

    def remove_checkpoint(self, path: Any) -> None:
        self.fatal()
        super().remove_checkpoint(path)
        self.fatal()


class Later(FatalPlugin):
    """Writes what rank 0 saved earlier at the beginning of the next save. A plugin is known by its class's name."""

    def __init__(self, fatal: Fatal) -> None:
        super().__init__(fatal)
        self.checkpoint_io, self.queue = FatalPlugin(fatal), []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.queue.append((checkpoint, path))

    def flush(self) -> None:
        for checkpoint, path in self.queue:
            # As Lightning does: whole before it is there.
            super().save_checkpoint(checkpoint, f"{path}.part")
            os.rename(f"{path}.part", path)
            self.fatal()
        self.queue.clear()


AsyncCheckpointIO = type("AsyncCheckpointIO", (Later,), {})


def save(path: Path, wire: Wire, saves: Saves, plugin: Any, step: int, run: int = 1) -> None:
    checkpoint = {"step": step, "run": run}
    file = RankFile(wire.rank, wire.world_size, saves.number(run))
    held = content(checkpoint, x=torch.tensor(step + float(wire.rank)))
    write = lambda where: plugin.save_checkpoint(checkpoint, where)  # noqa: E731
    saves.replace(RankFiles(path, plugin), file, held, write, Plugin().load_checkpoint, Ranks(wire, CPU))


def saved(path: Path) -> int:
    """The step of a checkpoint, which must be whole: read with the state of all ranks that belongs to it."""
    (step,) = run_ranks(path.parent, 1, _saved, path)
    return int(step)


def _saved(rank: int, path: Path) -> int:
    checkpoint = torch.load(path)
    resumed = read(RankFiles(path, Plugin()), fingerprint_of(checkpoint), Plugin().load_checkpoint, Wire(), CPU)
    assert resumed.problem == ""
    assert resumed.state is not None
    assert resumed.state["x"] == checkpoint["step"] + 0.5, "the mean over two ranks"
    return int(checkpoint["step"])


def _saving(rank: int, path: Path, victim: int, at: int | None, later: bool, steps: list[int]) -> int:
    fatal = Fatal(at if rank == victim else None)
    plugin = (AsyncCheckpointIO if later else FatalPlugin)(fatal)
    wire, saves = Wire(), Saves()
    wire.all_gather = fatal.around(wire.all_gather)  # type: ignore[method-assign]
    rank_files.os.replace = fatal.around(os.replace)  # type: ignore[attr-defined]
    save(path, wire, saves, plugin, steps[0])
    if later:
        plugin.flush()
    fatal.armed = True
    try:
        for step in steps[1:]:
            save(path, wire, saves, plugin, step)
            if later:
                plugin.flush()
    except PeerError:
        assert at is not None
    return fatal.passed


# Saves after the first: of later steps, or of the same step again.
CASES = {
    "another step": (False, [1, 2]),
    "the same step": (False, [1, 1]),
    "written later": (True, [1, 2, 3, 4]),
}


QUICK = (0, "another step"), (1, "the same step")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("victim", "case"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for each in itertools.product(range(RANKS), CASES)
    ],
)
def test_killed_at_every_point(tmp_path: Path, victim: int, case: str) -> None:
    later, steps = CASES[case]
    points = run_ranks(tmp_path, RANKS, _saving, tmp_path / "whole.ckpt", victim, None, later, steps)[victim]
    assert saved(tmp_path / "whole.ckpt") == steps[-1]
    found = set()
    for at in range(points):
        path = tmp_path / str(at) / "last.ckpt"
        run_ranks(tmp_path, RANKS, _saving, path, victim, at, later, steps, patience=PATIENCE, lost=[victim])
        found.add(saved(path))
    assert points >= (9 if victim else 15)
    assert found == set(steps)


class Full(Plugin):
    def __init__(self, text: str) -> None:
        self.text = text

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if self.text in str(path).rpartition("/")[2]:
            Path(path).write_bytes(b"a part")
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path)


def _full(rank: int, path: Path, text: str) -> str:
    wire, saves = Wire(), Saves()
    save(path, wire, saves, Plugin(), 1)
    with pytest.raises(OSError, match="No space left") as raised:
        save(path, wire, saves, Full(text), 2)
    assert sorted(path.parent.glob("last*")) == [path, Path(f"{path}.sparsecomm")]
    dist.barrier()
    words = str(raised.value)
    before = len(list(Path(f"{path}.sparsecomm").iterdir()))
    dist.barrier()
    save(path, wire, saves, Plugin(), 3)
    dist.barrier()
    return f"{words} [{before} files before, {len(list(Path(f'{path}.sparsecomm').iterdir()))} after]"


@pytest.mark.parametrize("text", ["rank_0", "rank_1", "checkpoint."])
def test_a_full_disk_is_said_on_all_ranks(tmp_path: Path, text: str) -> None:
    path = tmp_path / "last.ckpt"
    first, second = run_ranks(tmp_path, RANKS, _full, path, text)
    assert first == second
    victim = int(text == "rank_1")
    assert f"(rank {victim}: OSError: [Errno 28] No space left on device). Look for a full" in first
    left = 4 if text == "checkpoint." else 2
    assert first.endswith(f"[{left} files before, 2 after]")
    assert saved(path) == 3


def _beside_another(rank: int, path: Path, run: int, count: int) -> None:
    wire, saves = Wire(), Saves()
    for step in range(count):
        save(path, wire, saves, Plugin(), step, run)


def test_two_runs_save_to_one_path(tmp_path: Path) -> None:
    """Neither finds an error, and in the end the checkpoint of either is whole."""
    for pair in range(5):
        path = tmp_path / str(pair) / "last.ckpt"
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(run_ranks, tmp_path, RANKS, _beside_another, path, run, 20) for run in (1, 2)]
        for each in runs:
            each.result()
        assert saved(path) == 19
        # Each run's last.
        assert len(list(Path(f"{path}.sparsecomm").iterdir())) <= 2 * RANKS


def _for_ever(rank: int, path: Path, store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    wire, saves = Wire(), Saves()
    for step in itertools.count(1):
        save(path, wire, saves, Plugin(), step // 2)
        # A few pages of disk take no time at all.
        time.sleep(0.002 * (step % 3))


@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_killed_at_random_moments(tmp_path: Path, kills: int) -> None:
    moments = random.Random(7)
    for kill in range(kills):
        path, store = tmp_path / str(kill) / "last.ckpt", tmp_path / f"store-{kill}"
        ranks = [FORK.Process(target=_for_ever, args=(rank, path, store)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        while not path.exists() and all(process.is_alive() for process in ranks):
            time.sleep(0.001)
        time.sleep(0.1 * moments.random())
        victims = moments.choice([ranks[:1], ranks[1:], ranks])
        for process in victims:
            os.kill(process.pid, signal.SIGKILL)
        for process in ranks:
            process.join()
        saved(path)
