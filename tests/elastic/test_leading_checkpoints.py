"""What ModelCheckpoints know of files that another replica has written, without a training."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_sparsecomm.frontends.leading_checkpoints import LeadingCheckpoints
from lightning_sparsecomm.frontends.packages import TRAINERS


def callback_of(package: str, folder: Path) -> Any:
    kind = importlib.import_module(f"{package}.callbacks").ModelCheckpoint
    return kind(folder, monitor="loss", save_top_k=3, save_last=True)


def records_of(callback: Any) -> LeadingCheckpoints:
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[callback])
    return LeadingCheckpoints(trainer, lambda: False)


def fill(callback: Any, folder: Path) -> None:
    """As after four saves."""
    callback.best_k_models = {str(folder / f"{name}.ckpt"): torch.tensor(score) for name, score in SCORES.items()}
    callback.best_model_path, callback.best_model_score = str(folder / "a.ckpt"), torch.tensor(1.5)
    callback.kth_best_model_path, callback.kth_value = str(folder / "c.ckpt"), torch.tensor(3.5)
    callback.last_model_path = str(folder / "last.ckpt")


SCORES = {"a": 1.5, "b": 2.5, "c": 3.5}


@pytest.mark.parametrize("package", TRAINERS)
def test_one_that_takes_the_lead_forgets_what_does_not_exist(package: str, tmp_path: Path) -> None:
    callback = callback_of(package, tmp_path)
    records = records_of(callback)
    records.look()
    fill(callback, tmp_path)
    for name in "bc":
        (tmp_path / f"{name}.ckpt").touch()
    records.take_over(first=False)
    assert callback.best_k_models == {str(tmp_path / "b.ckpt"): 2.5, str(tmp_path / "c.ckpt"): 3.5}
    assert (callback.best_model_path, callback.best_model_score) == (str(tmp_path / "b.ckpt"), 2.5)
    assert (callback.kth_best_model_path, callback.kth_value, callback.last_model_path) == ("", torch.inf, "")


@pytest.mark.parametrize("package", TRAINERS)
def test_a_record_travels_to_callbacks_of_the_same_folder(package: str, tmp_path: Path) -> None:
    leading, joining, elsewhere = (callback_of(package, tmp_path / name) for name in ("one", "one", "other"))
    folder = tmp_path / "one"
    folder.mkdir()
    records = [records_of(each) for each in (leading, joining, elsewhere)]
    records[0].look()
    # On this disk, an earlier run has left files.
    for name in ("c", "last"):
        (folder / f"{name}.ckpt").touch()
    for each in records[1:]:
        each.look()
    fill(leading, folder)
    for name in "abc":
        records[0].saved(folder / f"{name}.ckpt")
    records[1].follow(records[0].to_json())
    records[2].follow(records[0].to_json())
    assert joining.state_dict() == leading.state_dict()
    assert elsewhere.best_k_models == {}
    known = [name for name in ("a", "b", "c", "d", "last") if joining.file_exists(str(folder / f"{name}.ckpt"), None)]
    assert known == ["a", "b", "c"]
    # The leader has a file of its name on its disk. That of the earlier run is not overwritten.
    records[1].take_over(first=False)
    assert list(joining.best_k_models) == [str(folder / "c.ckpt")]
    assert joining.last_model_path == ""
    for each in records:
        each.release()
    assert "file_exists" not in vars(joining)
