"""Saves replace one another, and their files go with them; here on one rank, or with ranks one after the other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.basis.wire import PeerError
from lightning_sparsecomm.run import saves as module
from lightning_sparsecomm.run.rank_files import RankFile, RankFiles
from lightning_sparsecomm.run.saves import Ranks, Saves, save_alone
from tests.run.test_rank_files import Plugin, content

LOAD = Plugin().load_checkpoint


class Later(Plugin):
    """Writes when `flush` is called, as a thread might."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.queue.append(lambda: Plugin.save_checkpoint(self, checkpoint, path))

    def flush(self, count: int) -> None:
        for _ in range(count):
            self.queue.pop(0)()


# It is known by its name.
AsyncCheckpointIO = type("AsyncCheckpointIO", (Later,), {})


class Run:
    """One run that saves to one path."""

    def __init__(self, path: Path, wire: Wire, number: int, plugin: Any = None) -> None:
        self.path, self.number, self.saves = path, number, Saves()
        self.plugin = plugin or Plugin()
        self.ranks = Ranks(wire, torch.device("cpu"))
        self.files = RankFiles(path, self.plugin)

    def save(self, step: int, to_resume: bool = True) -> RankFile:
        checkpoint = {"step": step, "run": self.number}
        file = RankFile(0, 1, self.saves.number(self.number))
        held = content(checkpoint) if to_resume else None
        write = lambda path: self.plugin.save_checkpoint(checkpoint, path)  # noqa: E731
        self.saves.replace(self.files, file, held, write, LOAD, self.ranks)
        return file

    def remove(self) -> None:
        self.saves.remove(self.files, lambda: self.path.unlink(), LOAD)


def test_numbers_count_the_saves_of_a_run() -> None:
    saves = Saves()
    assert [saves.number(5), saves.number(5), saves.number(2**63 + 6)] == [(5 << 32) + 1, (5 << 32) + 2, (6 << 32) + 3]


def test_a_save_takes_the_place_of_the_one_before(tmp_path: Path, wire: Wire) -> None:
    run = Run(tmp_path / "last.ckpt", wire, 1)
    # The second one is of the same step.
    for step in (1, 1, 2):
        file = run.save(step)
        assert run.files.found() == [file]
    run.save(3, to_resume=False)
    assert not Path(run.files.folder).exists()


def test_a_replaced_checkpoint_of_another_run_takes_its_files_along(tmp_path: Path, wire: Wire) -> None:
    former, run = (Run(tmp_path / "last.ckpt", wire, number) for number in (1, 2))
    former.save(1)
    # Left over from a save that was broken off before its end.
    leftover = RankFile(0, 1, (1 << 32) + 0)
    former.files.write(leftover, content())
    elsewhere = [RankFile(1, 2, (1 << 32) + 1), RankFile(0, 1, (3 << 32) + 1)]
    for file in elsewhere:
        former.files.write(file, content())
    new = run.save(1)
    # The file of a rank that this world does not have goes too. That of a third run stays.
    assert run.files.found() == sorted([new, elsewhere[1]])


def test_a_file_of_a_run_that_is_about_to_write_its_checkpoint_stays(tmp_path: Path, wire: Wire) -> None:
    """Two runs save to one path at once: each removes its own files, and those of the checkpoint that it replaces."""
    former, run, other = (Run(tmp_path / "last.ckpt", wire, number) for number in (1, 2, 3))
    former.save(1)
    begun = RankFile(0, 1, (3 << 32) + 1)
    other.files.write(begun, content({"step": 2, "run": 3}))
    new = run.save(1)
    assert run.files.found() == [new, begun]
    newer = run.save(2)
    assert run.files.found() == [newer, begun]
    last = other.save(2)
    # It has replaced its own file, and knows the one whose checkpoint it has replaced.
    assert run.files.found() == [last]
    run.save(3)
    run.remove()
    assert run.files.found() == [last]


def test_a_removed_checkpoint_takes_its_files_along(tmp_path: Path, wire: Wire) -> None:
    former, run = (Run(tmp_path / "last.ckpt", wire, number) for number in (1, 2))
    former.save(1)
    run.remove()
    assert not list(tmp_path.glob("last*"))
    run.save(1)
    run.remove()
    assert not list(tmp_path.glob("last*"))


def test_files_beside_a_checkpoint_that_cannot_be_read_stay(tmp_path: Path, wire: Wire) -> None:
    former, run = (Run(tmp_path / "last.ckpt", wire, number) for number in (1, 2))
    old = former.save(1)
    run.path.write_bytes(b"nonsense")
    with pytest.warns(UserWarning, match="stay there, as the checkpoint that they may belong to cannot be read"):
        new = run.save(1)
    assert run.files.found() == [old, new]


@pytest.mark.parametrize("written", ["at once", "one save later", "three saves later"])
def test_a_plugin_that_writes_later_keeps_what_may_be_needed(tmp_path: Path, wire: Wire, written: str) -> None:
    plugin = AsyncCheckpointIO()
    run = Run(tmp_path / "last.ckpt", wire, 1, plugin)
    lag = {"at once": 0, "one save later": 2, "three saves later": 6}[written]
    for step in range(1, 30):
        file = run.save(step)
        # At each moment, the checkpoint that is there has its file.
        while len(plugin.queue) > lag:
            plugin.flush(1)
            if run.path.exists():
                step_there = torch.load(run.path)["step"]
                assert RankFile(0, 1, (1 << 32) + step_there) in run.files.found()
        assert len(run.files.found()) <= 3 + lag // 2
    plugin.flush(len(plugin.queue))
    assert file in run.files.found()


class Full(Plugin):
    """A disk that is full for files whose name holds some text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if self.text in str(path).rpartition("/")[2]:
            raise OSError(28, "No space left on device")
        super().save_checkpoint(checkpoint, path)


@pytest.mark.parametrize("text", ["rank_0", "checkpoint."])
def test_a_full_disk_leaves_the_save_before(tmp_path: Path, wire: Wire, text: str) -> None:
    run = Run(tmp_path / "last.ckpt", wire, 1)
    before = run.save(1)
    run.plugin = Full(text)
    run.files = RankFiles(run.path, run.plugin)
    with pytest.raises(OSError, match="No space left"):
        run.save(2)
    assert torch.load(run.path)["step"] == 1
    assert before in run.files.found()
    run.plugin = Plugin()
    run.files = RankFiles(run.path, run.plugin)
    last = run.save(3)
    assert run.files.found() == [last]


class Lost(Wire):
    def all_gather(self, tensor: torch.Tensor, row: str | None = None) -> torch.Tensor:
        raise PeerError("another rank is gone")


def test_a_file_stays_where_a_peer_is_lost(tmp_path: Path, wire: Wire) -> None:
    """That peer, or a third, may have seen that all files are whole, and have replaced the checkpoint."""
    run = Run(tmp_path / "last.ckpt", wire, 1)
    before = run.save(1)
    run.ranks = Ranks(Lost(), torch.device("cpu"))
    with pytest.raises(PeerError):
        run.save(2)
    assert run.files.found() == [before, before._replace(save=before.save + 1)]


def test_a_folder_that_another_run_removes_is_made_again(tmp_path: Path, wire: Wire) -> None:
    class Racing(Plugin):
        raced = 0

        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            self.raced += 1
            if self.raced <= 2:
                raise FileNotFoundError(path)
            super().save_checkpoint(checkpoint, path)

    run = Run(tmp_path / "last.ckpt", wire, 1, Racing())
    saved = run.save(1)
    assert run.files.found() == [saved]


class Told(Wire):
    """Gathers what rank 0 has sent, as another rank finds it."""

    def __init__(self, texts: list[bytes]) -> None:
        super().__init__()
        self.rank, self.texts = 1, texts

    def all_gather(self, tensor: torch.Tensor, row: str | None = None) -> torch.Tensor:
        text = self.texts[0]
        if tensor.dtype == torch.uint8:
            return torch.frombuffer(bytearray(text), dtype=torch.uint8)[None]
        return torch.tensor([[len(text)]])


def test_a_rank_with_a_disk_of_its_own_removes_what_rank_0_has_removed(tmp_path: Path, wire: Wire) -> None:
    """Rank 0 tells it with its next save. Files of a save that rank 0 keeps stay, and those of other ranks."""
    saves, elsewhere = Saves(), tmp_path / "other disk"
    files_beside = lambda path: RankFiles(elsewhere / Path(path).name, Plugin())  # noqa: E731
    for number, name in enumerate(("gone.ckpt", "kept.ckpt"), start=1):
        for rank in (1, 2):
            files_beside(name).write(RankFile(rank, 3, number), content())
        saves.resumed(RankFiles(tmp_path / name, Plugin()), number)
    text = "\0".join([str(tmp_path / "next.ckpt"), str(tmp_path / "gone.ckpt.sparsecomm")]).encode()
    for removed in (text, text.split(b"\0")[0]):
        ranks = Ranks(Told([removed]), torch.device("cpu"))
        path = saves.agree_on_path(tmp_path / "own.ckpt", ranks, RankFile(1, 3, 3), files_beside)
        assert path == str(tmp_path / "next.ckpt")
        assert files_beside("gone.ckpt").found() == [RankFile(2, 3, 1)]
        assert files_beside("kept.ckpt").found() == [RankFile(1, 3, 2), RankFile(2, 3, 2)]


def test_rank_0_tells_once_what_it_has_removed(tmp_path: Path, wire: Wire) -> None:
    class Heard(Wire):
        def all_gather(self, tensor: torch.Tensor, row: str | None = None) -> torch.Tensor:
            if tensor.dtype == torch.uint8:
                heard.append(bytes(tensor.tolist()).decode().split("\0"))
            return super().all_gather(tensor, row)

    heard: list[list[str]] = []
    run = Run(tmp_path / "last.ckpt", wire, 1)
    # Removed and resumed again: what is there now is another's.
    for _ in range(2):
        run.save(1)
        run.remove()
    run.saves.resumed(RankFiles(tmp_path / "other.ckpt", Plugin()), 5)
    ranks = Ranks(Heard(), torch.device("cpu"))
    for _ in range(2):
        run.saves.agree_on_path("new.ckpt", ranks, RankFile(0, 1, 9), lambda path: RankFiles(path, Plugin()))
    assert heard == [["new.ckpt", run.files.key], ["new.ckpt"]]
    run.save(2)
    run.remove()
    run.saves.resumed(run.files, 7)
    run.saves.agree_on_path("new.ckpt", ranks, RankFile(0, 1, 9), lambda path: RankFiles(path, Plugin()))
    assert heard[2:] == [["new.ckpt"]]


def test_what_is_saved_alone_does_not_replace_a_whole_checkpoint(
    tmp_path: Path, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.0)
    path = tmp_path / "last.ckpt"
    files_of = lambda path: RankFiles(path, Plugin())  # noqa: E731

    def save(number: int, others: bool) -> None:
        if others:
            files_of(path).write(RankFile(1, 2, number), content())
        save_alone(
            files_of(path),
            RankFile(0, 2, number),
            content({"step": number}),
            lambda where: Plugin().save_checkpoint({"step": number}, where),
            files_of,
        )

    save(1, others=False)
    assert torch.load(path)["step"] == 1
    save(2, others=True)
    assert torch.load(path)["step"] == 2
    for version in (1, 2):
        with pytest.warns(UserWarning, match=f"last-v{version}.ckpt was saved after an error.*does not replace .*last"):
            save(2 + version, others=False)
        assert torch.load(path)["step"] == 2
        assert torch.load(tmp_path / f"last-v{version}.ckpt")["step"] == 2 + version
        assert files_of(tmp_path / f"last-v{version}.ckpt").found() == [RankFile(0, 2, 2 + version)]
