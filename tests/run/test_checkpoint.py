"""Reading what ranks saved beside a checkpoint, or why there is nothing to resume from; here on one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.run.checkpoint import Resumed, read
from lightning_sparsecomm.run.contents import fingerprint_of
from lightning_sparsecomm.run.rank_files import FORMAT, RankFile, RankFiles
from tests.run.test_rank_files import Plugin, content, files_of

CHECKPOINT = {"state_dict": {"w": torch.ones(2)}}


def resume(files: RankFiles, wire: Wire) -> Resumed:
    return read(files, fingerprint_of(CHECKPOINT), Plugin().load_checkpoint, wire, torch.device("cpu"))


def test_a_rank_reads_what_it_has_written(tmp_path: Path, wire: Wire) -> None:
    files = files_of(tmp_path)
    # Two saves: that of this checkpoint counts.
    files.write(RankFile(0, 1, 1), content({"another": 1}, x=1))
    files.write(RankFile(0, 1, 2**64 - 1), content(CHECKPOINT, x=torch.tensor(2.0)))
    resumed = resume(files, wire)
    assert resumed.problem == ""
    assert resumed.state is not None and resumed.state["x"] == torch.tensor(2.0)
    assert (resumed.method, resumed.world_size, resumed.save) == ("m", 1, 2**64 - 1)


def test_format_1_is_read(tmp_path: Path, wire: Wire) -> None:
    files = files_of(tmp_path)
    Plugin().save_checkpoint(content(CHECKPOINT, x=5) | {"format": 1}, files.path(RankFile(0, 1, 3)))
    state = resume(files, wire).state
    assert state is not None and state["x"] == 5


def test_a_larger_world_is_read_as_its_mean(tmp_path: Path, wire: Wire) -> None:
    files = files_of(tmp_path)
    for rank in range(3):
        entries = {"ema": torch.ones(2)}
        files.write(RankFile(rank, 3, 7), content(CHECKPOINT, x=torch.tensor(float(rank))) | {"entries": entries})
    resumed = resume(files, wire)
    assert resumed.state is not None and resumed.state["x"] == torch.tensor(1.0)
    assert resumed.world_size == 3
    assert resumed.entries == {}


def test_of_two_saves_of_one_state_the_newest_whole_one_counts(tmp_path: Path, wire: Wire) -> None:
    """A save is repeated without a step in between, and killed before or after it has replaced the checkpoint."""
    files = files_of(tmp_path)
    for save in (1, 2):
        for rank in range(2):
            files.write(RankFile(rank, 2, save), content(CHECKPOINT, x=torch.tensor(1.0)))
    assert resume(files, wire).save == 2
    files.remove([RankFile(1, 2, 2)])
    assert resume(files, wire).save == 1
    files.write(RankFile(1, 2, 2), content(CHECKPOINT, x=torch.tensor(1.0)))
    files.remove([RankFile(1, 2, 1)])
    assert resume(files, wire).save == 2


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("none", "there is no .*last.ckpt.sparsecomm/ beside it"),
        ("not of rank 0", "last.ckpt.sparsecomm/ has none of rank 0"),
        ("of another checkpoint", "rank_0_of_1.0000000000000001.pt belongs to another save"),
        ("rank 0's is damaged", r"rank_0_of_2.0000000000000001.pt cannot be read \("),
        ("a rank is missing", "rank_1_of_2.0000000000000001.pt is missing$"),
        ("of another save", "rank_1_of_2.0000000000000001.pt is missing: that rank "),
        ("damaged", r"rank_1_of_2.0000000000000001.pt cannot be read \(UnpicklingError"),
        ("exchanged", "rank_1_of_2.0000000000000001.pt was another file: that of rank 0"),
        ("of the future", "rank_1_of_2.0000000000000001.pt has format 3, which"),
    ],
)
def test_why_there_is_nothing_to_resume_from(tmp_path: Path, wire: Wire, case: str, text: str) -> None:
    files = files_of(tmp_path)
    first, second = (Path(files.path(RankFile(rank, 2, 1))) for rank in range(2))
    if case == "not of rank 0":
        files.write(RankFile(1, 2, 1), content(CHECKPOINT))
    elif case == "of another checkpoint":
        files.write(RankFile(0, 1, 1), content({"epoch": 2}))
    elif case != "none":
        files.write(RankFile(0, 2, 1), content(CHECKPOINT))
    if case == "of another save":
        files.write(RankFile(1, 2, 2), content(CHECKPOINT))
    if case == "damaged":
        second.write_bytes(b"nonsense")
    if case == "rank 0's is damaged":
        first.write_bytes(first.read_bytes()[:100])
    if case == "exchanged":
        second.write_bytes(first.read_bytes())
    if case == "of the future":
        written: dict[str, Any] = content(CHECKPOINT) | {"format": FORMAT + 1}
        Plugin().save_checkpoint(written, second)
    resumed = resume(files, wire)
    assert resumed.state is None
    assert resumed.found == (case != "none")
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(resumed.problem)
