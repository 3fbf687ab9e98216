"""The files beside a checkpoint: their names, and which of them are read or go; here of one rank, with torch.save."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.run.checkpoint import FORMAT, RankFile, RankFiles, read
from lightning_sparsecomm.run.contents import fingerprint_of

CPU = torch.device("cpu")


class Plugin:
    """Writes and removes as Lightning's plugin does."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(checkpoint, path)

    def remove_checkpoint(self, path: Any) -> None:
        if os.path.isdir(path):
            for name in os.listdir(path):
                os.remove(os.path.join(path, name))
            os.rmdir(path)
        else:
            os.remove(path)


def content(checkpoint: object, **state: Any) -> dict[str, Any]:
    return {"format": FORMAT, "method": "m", "checkpoint": fingerprint_of(checkpoint), "entries": {}, "state": state}


def files_of(path: Path) -> RankFiles:
    return RankFiles(path / "last.ckpt", Plugin())


def load(path: str) -> dict[str, Any]:
    return torch.load(path)  # type: ignore[no-any-return]


# Names


def test_a_name_says_whose_and_of_which_save(tmp_path: Path) -> None:
    file = RankFile(3, 8, 2**64 - 1)
    assert str(file) == "rank_3_of_8.ffffffffffffffff.pt"
    files = files_of(tmp_path)
    assert files.found() == []
    files.write(file, {"a": 1})
    (Path(files.folder) / "notes.txt").write_text("a stranger's")
    (Path(files.folder) / "rank_3_of_8.pt").write_text("another stranger's")
    assert files.found() == [file]
    assert load(files.path(file)) == {"a": 1}


def test_earlier_saves_go_when_the_new_one_is_there(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    old, new = RankFile(1, 2, 1), RankFile(1, 2, 2)
    others = [RankFile(0, 2, 1), RankFile(0, 3, 1)]
    for file in (old, *others):
        files.write(file, {})
    # An asynchronous plugin has not written it yet.
    files.prune(new)
    assert len(files.found()) == 3
    files.write(new, {})
    files.prune(new)
    assert files.found() == sorted([new, *others])
    # Rank 0 also removes what a world of another size has left.
    first = RankFile(0, 2, 2)
    files.write(first, {})
    files.prune(first)
    assert files.found() == [first, new]


def test_removal_by_rank(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    for rank in range(2):
        files.write(RankFile(rank, 2, 1), {})
    files.remove(1)
    assert files.found() == [RankFile(0, 2, 1)]
    files.remove(0)
    assert files.found() == []
    assert not Path(files.folder).exists()
    files.remove(0)


def test_a_link_is_followed_for_reading_only(tmp_path: Path) -> None:
    files = RankFiles(tmp_path / "step.ckpt", Plugin())
    files.write(RankFile(0, 1, 1), {})
    (tmp_path / "step.ckpt").write_text("")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "step.ckpt")
    assert RankFiles(tmp_path / "last.ckpt", Plugin(), follow=True).found() == [RankFile(0, 1, 1)]
    assert RankFiles(tmp_path / "last.ckpt", Plugin()).found() == []


# Reading


def test_a_rank_reads_what_it_has_written(tmp_path: Path, wire: Wire) -> None:
    checkpoint = {"state_dict": {"w": torch.ones(2)}}
    files = files_of(tmp_path)
    # Two saves: that of this checkpoint counts.
    files.write(RankFile(0, 1, 1), content({"another": 1}, x=1))
    files.write(RankFile(0, 1, 2**64 - 1), content(checkpoint, x=torch.tensor(2.0)))
    resumed = read(files, fingerprint_of(checkpoint), load, wire, CPU)
    assert resumed.problem == ""
    assert resumed.state == {"x": torch.tensor(2.0)}
    assert (resumed.method, resumed.world_size) == ("m", 1)


def test_a_larger_world_is_read_as_its_mean(tmp_path: Path, wire: Wire) -> None:
    checkpoint = {"epoch": 1}
    files = files_of(tmp_path)
    for rank in range(3):
        entries = {"ema": torch.ones(2)}
        files.write(RankFile(rank, 3, 7), content(checkpoint, x=torch.tensor(float(rank))) | {"entries": entries})
    resumed = read(files, fingerprint_of(checkpoint), load, wire, CPU)
    assert resumed.state == {"x": torch.tensor(1.0)}
    assert resumed.world_size == 3
    assert resumed.entries == {}


@pytest.mark.filterwarnings("ignore:.*cannot be read")
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("none", "there is no .*last.ckpt.sparsecomm/ beside it"),
        ("not of rank 0", "last.ckpt.sparsecomm/ has none of rank 0"),
        ("of another checkpoint", "rank_0_of_1.0000000000000001.pt belongs to another save"),
        ("a rank is missing", "rank_1_of_2.0000000000000001.pt is missing$"),
        ("of another save", "rank_1_of_2.0000000000000001.pt is missing: that rank "),
        ("damaged", "rank_1_of_2.0000000000000001.pt cannot be read"),
        ("of the future", "rank_1_of_2.0000000000000001.pt has a format "),
    ],
)
def test_why_there_is_nothing_to_resume_from(tmp_path: Path, wire: Wire, case: str, text: str) -> None:
    checkpoint = {"epoch": 1}
    files = files_of(tmp_path)
    if case == "not of rank 0":
        files.write(RankFile(1, 2, 1), content(checkpoint))
    elif case == "of another checkpoint":
        files.write(RankFile(0, 1, 1), content({"epoch": 2}))
    elif case != "none":
        files.write(RankFile(0, 2, 1), content(checkpoint))
    if case == "of another save":
        files.write(RankFile(1, 2, 2), content(checkpoint))
    if case == "damaged":
        Path(files.path(RankFile(1, 2, 1))).write_bytes(b"nonsense")
    if case == "of the future":
        files.write(RankFile(1, 2, 1), content(checkpoint) | {"format": FORMAT + 1})
    resumed = read(files, fingerprint_of(checkpoint), load, wire, CPU)
    assert resumed.state is None
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(resumed.problem)
