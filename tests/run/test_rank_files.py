"""The files beside a checkpoint: their names, where they go, and what is found wrong with one."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_sparsecomm.run.contents import fingerprint_of
from lightning_sparsecomm.run.rank_files import RankFile, RankFiles, problem_of, sealed


class Plugin:
    """Writes, reads and removes as Lightning's plugin does."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(checkpoint, path)

    def load_checkpoint(self, path: Any, weights_only: bool | None = None) -> Any:
        return torch.load(path)

    def remove_checkpoint(self, path: Any) -> None:
        os.remove(path)


def content(checkpoint: object = None, **state: Any) -> dict[str, Any]:
    ledger = {"rows": {}}
    whole = {"streams": [], "leading": None, "weights": {}, "scaler": {}, "ledger": ledger, **state}
    return {"method": "m", "checkpoint": fingerprint_of(checkpoint), "entries": {}, "state": whole}


def files_of(path: Path) -> RankFiles:
    return RankFiles(path / "last.ckpt", Plugin())


def test_a_name_says_whose_and_of_which_save(tmp_path: Path) -> None:
    file = RankFile(3, 8, 2**64 - 1)
    assert str(file) == "rank_3_of_8.ffffffffffffffff.pt"
    files = files_of(tmp_path)
    assert files.found() == []
    files.write(file, {"a": 1})
    (Path(files.folder) / "notes.txt").write_text("a stranger's")
    (Path(files.folder) / "rank_3_of_8.pt").write_text("another stranger's")
    assert files.found() == [file]
    read = torch.load(files.path(file))
    assert {key: read[key] for key in ("a", "rank", "world_size", "save")} == {"a": 1, **file._asdict()}


def test_the_folder_goes_with_its_last_file(tmp_path: Path) -> None:
    files, pair = files_of(tmp_path), [RankFile(rank, 2, 1) for rank in range(2)]
    for file in pair:
        files.write(file, {})
    files.remove([pair[1]])
    assert files.found() == [pair[0]]
    files.remove(pair)
    assert not Path(files.folder).exists()
    files.remove(pair)


def test_a_link_is_followed_for_reading_only(tmp_path: Path) -> None:
    files = RankFiles(tmp_path / "step.ckpt", Plugin())
    files.write(RankFile(0, 1, 1), {})
    (tmp_path / "step.ckpt").write_text("")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "step.ckpt")
    assert RankFiles(tmp_path / "last.ckpt", Plugin(), follow=True).found() == [RankFile(0, 1, 1)]
    assert RankFiles(tmp_path / "last.ckpt", Plugin()).found() == []


def test_only_rank_0_lets_a_plugin_write_later(tmp_path: Path) -> None:
    plugin = AsyncCheckpointIO(TorchCheckpointIO())
    files = RankFiles(tmp_path / "last.ckpt", plugin)
    assert files.written_later
    assert not files_of(tmp_path).written_later
    plugin.save_checkpoint = None  # type: ignore[assignment, method-assign]
    files.write(RankFile(1, 2, 1), {})
    assert files.found() == [RankFile(1, 2, 1)]
    with pytest.raises(TypeError):
        files.write(RankFile(0, 2, 1), {})


def test_a_folder_that_a_plugin_may_be_about_to_write_to_stays(tmp_path: Path) -> None:
    for plugin, stays in ((AsyncCheckpointIO(TorchCheckpointIO()), True), (Plugin(), False)):
        files = RankFiles(tmp_path / "last.ckpt", plugin)
        os.makedirs(files.folder)
        files.remove([])
        assert os.path.isdir(files.folder) == stays
        if stays:
            os.rmdir(files.folder)


FILE = RankFile(1, 2, 7)


def resealed(change: Callable[[Any], Any]) -> Any:
    """A content that was changed by someone who knows the format."""
    whole = content()
    return sealed(FILE, {**whole, **change(whole)})


def test_a_whole_file_has_no_problem() -> None:
    assert problem_of(FILE, sealed(FILE, content(x=torch.tensor([1.0, float("nan")])))) == ""
    # Files of format 1 have no checksum.
    assert problem_of(FILE, content() | {"format": 1}) == ""


def test_every_bit_counts() -> None:
    held = torch.arange(1000.0)
    whole = sealed(FILE, content(x=held, n=3))
    for place in (0, 1, 500, 999):
        held.view(torch.int32)[place] ^= 1
        assert problem_of(FILE, whole) == "is damaged: its checksum does not fit"
        held.view(torch.int32)[place] ^= 1
    held[7] = float("nan")
    assert "checksum" in problem_of(FILE, whole)
    held[7] = 7
    assert problem_of(FILE, whole) == ""
    for changed in ({"method": "n"}, {"checksum": ""}, {"extra": 1}):
        assert "checksum" in problem_of(FILE, whole | changed)
    assert "checksum" in problem_of(FILE, {key: value for key, value in whole.items() if key != "checksum"})


def test_a_file_in_anothers_place_is_found() -> None:
    for other in (RankFile(0, 2, 7), RankFile(1, 3, 7), RankFile(1, 2, 8)):
        words = problem_of(FILE, sealed(other, content()))
        assert words == f"was another file: that of rank {other.rank}, world_size {other.world_size}, save {other.save}"


NONSENSE: dict[str, Any] = {
    "nothing": None,
    "a list": [],
    "a tensor": torch.zeros(2),
    "empty": {},
    "a format that is no number": {"format": "2"},
    "the future": content() | {"format": 99},
    "no state": resealed(lambda whole: {"state": None}),
    "no streams": resealed(lambda whole: {"state": {**whole["state"], "streams": None}}),
    "a stream that is none": resealed(lambda whole: {"state": {**whole["state"], "streams": [3]}}),
    "nothing held": resealed(lambda whole: {"state": {**whole["state"], "streams": [{"steps": 1, "members": []}]}}),
    "no ledger": resealed(lambda whole: {"state": {**whole["state"], "ledger": {}}}),
    "entries that are none": resealed(lambda whole: {"entries": []}),
    "format 1 without a state": {key: value for key, value in content().items() if key != "state"} | {"format": 1},
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_found(case: str) -> None:
    assert problem_of(FILE, NONSENSE[case])


def _equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.equal(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and a == b


def altered_bytes(folder: Path, stride: int = 1, mask: int = 1) -> Counter[str]:
    """A rank's file with one byte altered after the other, every `stride` bytes: what became of each."""
    file, files = RankFile(0, 1, 7), files_of(folder)
    held = {"GradientSync.ErrorFeedback": {"weight": torch.linspace(-1, 1, 300).view(30, 10), "bias": torch.ones(10)}}
    files.write(file, content(streams=[{"steps": 12, "members": ["weight", "bias"], "held": held}], leading=0))
    path = Path(files.path(file))
    whole, expected = path.read_bytes(), torch.load(path)
    outcomes: Counter[str] = Counter()
    for at in range(0, len(whole), stride):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :])
        try:
            found = torch.load(path)
            problem = problem_of(file, found)
        except Exception as error:
            problem = f"cannot be read: {type(error).__name__}"
        outcomes["refused" if problem else "no effect" if _equal(found, expected) else "silent"] += 1
    return outcomes


@pytest.mark.parametrize("mask", [1, 0x80])
def test_a_byte_that_is_altered_is_noticed_or_has_no_effect(tmp_path: Path, mask: int) -> None:
    outcomes = altered_bytes(tmp_path, stride=7, mask=mask)
    assert set(outcomes) == {"refused", "no effect"}
    assert outcomes["refused"] > 300
