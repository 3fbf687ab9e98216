"""What ModelCheckpoints of replicas that come and go know to be saved, though only the one that leads saves."""

import importlib
import json
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_sparsecomm.frontends.packages import TRAINERS

if TYPE_CHECKING:
    import pytorch_lightning as pl

# Of a ModelCheckpoint: what it knows of the files that it has saved.
_RECORD = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)


class LeadingCheckpoints:
    """The ModelCheckpoints of a Trainer, of which those of the replica that leads write.

    Lightning names a file anew, such as `last-v1.ckpt`, where one of this name exists that the callback has not saved
    itself. On a replica that does not lead, files exist that the leader has just written. So there, callbacks do not
    look: as far as they know, a file exists if it did as training began, or if they would have saved it. Thus all have
    the leader's names. A replica that joins gets the leader's record. One that takes the lead forgets what does not
    exist: its disk may be another, or its metrics differed.

    Args:
        trainer: With the callbacks as the user has made them, not set up yet.
        leads: Whether this replica leads.
    """

    def __init__(self, trainer: "pl.Trainer", leads: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._leads = leads
        kinds = tuple(importlib.import_module(f"{package}.callbacks").ModelCheckpoint for package in TRAINERS)
        self._callbacks: list[Any] = [each for each in trainer.checkpoint_callbacks if isinstance(each, kinds)]
        self._placed_by_logger = [each for each in self._callbacks if each.dirpath is None]
        # Paths that exist, as far as this replica knows; that it found as it began; and that only it found.
        self._known = set[str]()
        self._found = set[str]()
        self._foreign = set[str]()
        for callback in self._callbacks:
            callback.file_exists = partial(self._exists, callback)
            callback._link_checkpoint = partial(self._link, callback)

    def look(self) -> None:
        """Notes what there is, before any replica saves in this run."""
        self._found = {path for callback in self._callbacks for path in _files(callback)}
        self._known = set(self._found)

    def saved(self, path: object) -> None:
        """Notes a save, by this replica or by that which leads."""
        self._known.add(str(path))

    def removed(self, path: object) -> None:
        self._known.discard(str(path))

    def release(self) -> None:
        """Lets the callbacks look again."""
        for callback in self._callbacks:
            for name in ("file_exists", "_link_checkpoint"):
                vars(callback).pop(name, None)

    def to_json(self) -> str:
        """What a replica that joins has to know: for each callback its record, and which files there are."""
        states = [
            {
                "key": callback.state_key,
                "folder": str(callback.dirpath),
                "known": [path for path in self._known if os.path.dirname(path) == str(callback.dirpath)],
                "record": {name: _plain(getattr(callback, name)) for name in _RECORD},
            }
            for callback in self._callbacks
        ]
        return json.dumps(states)

    def follow(self, text: str) -> None:
        """Takes over what `to_json` of another replica has returned, of callbacks that save to the same folder."""
        for callback, state in zip(self._callbacks, json.loads(text)):
            folder = str(callback.dirpath)
            if (state["key"], state["folder"]) != (callback.state_key, folder):
                continue
            known = set(state["known"])
            mine = {path for path in self._known if os.path.dirname(path) == folder}
            self._foreign |= (mine & self._found) - known
            self._known = (self._known - mine) | known
            for name, value in state["record"].items():
                setattr(callback, name, _tensors(value))
        # What others save and remove later on is theirs.
        self._found = set()

    def take_over(self, first: bool) -> None:
        """Begins to save. The loggers, which the folder may be named after, are those of a replica that leads by now.

        Args:
            first: Whether this replica leads from the beginning.
        """
        for callback in self._placed_by_logger:
            folder, callback.dirpath = callback.dirpath, None
            callback.dirpath = callback._ModelCheckpoint__resolve_ckpt_dir(self._trainer)
            if callback.dirpath != folder:
                self._known |= set(_files(callback))
        if not first:
            for callback in self._callbacks:
                self._keep_what_exists(callback)

    def _keep_what_exists(self, callback: Any) -> None:
        def exists(path: str) -> bool:
            return bool(path) and path not in self._foreign and bool(callback._fs.exists(path))

        for name in ("last_model_path", "_last_checkpoint_saved"):
            if not exists(getattr(callback, name)):
                setattr(callback, name, "")
        best = {path: score for path, score in callback.best_k_models.items() if exists(path)}
        if callback.monitor is None:
            callback.best_model_path = callback.best_model_path if exists(callback.best_model_path) else ""
        elif len(best) < len(callback.best_k_models):
            callback.best_k_models, callback.kth_best_model_path = best, ""
            better, worst = (min, torch.inf) if callback.mode == "min" else (max, -torch.inf)
            callback.kth_value = torch.tensor(worst)
            callback.best_model_path = better(best, key=lambda path: float(best[path]), default="")
            callback.best_model_score = best.get(callback.best_model_path)

    def _exists(self, callback: Any, path: Any, trainer: "pl.Trainer") -> bool:
        if self._leads():
            return bool(type(callback).file_exists(callback, path, trainer))
        return str(path) in self._known

    def _link(self, callback: Any, trainer: "pl.Trainer", path: str, link: str) -> None:
        self.saved(link)
        if self._leads():
            type(callback)._link_checkpoint(trainer, path, link)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {path: _plain(score) for path, score in value.items()}
    return float(value) if isinstance(value, torch.Tensor) else value


def _tensors(value: Any) -> Any:
    """Inverse of `_plain`."""
    if isinstance(value, dict):
        return {path: _tensors(score) for path, score in value.items()}
    return torch.tensor(value) if isinstance(value, float) else value


def _files(callback: Any) -> list[str]:
    """The checkpoints in a callback's folder, by the names that it would give them."""
    folder = str(callback.dirpath)
    names = [os.path.basename(str(path).rstrip("/")) for path in _listed(callback._fs, folder)]
    return [os.path.join(folder, name) for name in names if name.endswith(callback.FILE_EXTENSION)]


def _listed(files: Any, folder: str) -> list[Any]:
    return list(files.ls(folder, detail=False)) if files.exists(folder) else []
