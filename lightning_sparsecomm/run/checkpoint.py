"""What a rank holds that ddp's checkpoints have no place for: a file per rank, in a folder beside the checkpoint."""

import os
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from lightning_sparsecomm.basis.ledger import SETUP
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.run.contents import State, mean_with

FORMAT = 1
SUFFIX = ".sparsecomm"

Load = Callable[[str], State]
"""Reads the file at a path."""

_NAME = re.compile(r"rank_(\d+)_of_(\d+)\.([0-9a-f]{16})\.pt")


class CheckpointIO(Protocol):
    """The part that we use of Lightning's plugins for reading and writing files, local or remote."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None: ...
    def remove_checkpoint(self, path: Any) -> None: ...


class RankFile(NamedTuple):
    """The name of one rank's file: whose state it holds, and to which save it belongs."""

    rank: int
    world_size: int
    save: int

    def __str__(self) -> str:
        return f"rank_{self.rank}_of_{self.world_size}.{self.save:016x}.pt"


class RankFiles:
    """The files beside one checkpoint, in the folder `NAME.ckpt.sparsecomm`.

    Each save writes files with new names. A rank removes its files of earlier saves only after all ranks have written.
    So after a crash in between, the earlier checkpoint still has all its files.

    Reading follows a path that is a link. Saving does not, since the new checkpoint replaces the link; nor does
    removing, which leaves the link's target.
    """

    def __init__(self, path: Any, io: CheckpointIO, follow: bool = False) -> None:
        self.folder = f"{os.fspath(path)}{SUFFIX}"
        self._io = io
        self._fs, self._root = fsspec.core.url_to_fs(self.folder)
        checkpoint = self._root.removesuffix(SUFFIX)
        # Lightning's save_last="link" makes a link to a checkpoint; the folder is beside the link's target.
        if follow and isinstance(self._fs, LocalFileSystem) and os.path.islink(checkpoint):
            self.folder = self._root = os.path.realpath(checkpoint) + SUFFIX

    def found(self) -> list[RankFile]:
        """All files in the folder."""
        # Other ranks write there too, so a cached listing may be old. Not every file system's `ls` has `refresh`.
        self._fs.invalidate_cache(self._root)
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = [_NAME.fullmatch(os.path.basename(path)) for path in paths]
        return sorted(RankFile(int(name[1]), int(name[2]), int(name[3], 16)) for name in names if name is not None)

    def path(self, file: RankFile) -> str:
        return f"{self.folder}/{file}"

    def write(self, file: RankFile, content: State, storage_options: Any = None) -> None:
        self._io.save_checkpoint(content, self.path(file), storage_options=storage_options)

    def prune(self, written: RankFile) -> None:
        """Removes this rank's files of earlier saves, and on rank 0 all files of worlds of another size."""
        found = self.found()
        # An asynchronous plugin may not have written the file yet. Then the earlier files stay until the next save.
        if written not in found:
            return
        for file in found:
            earlier = file.rank == written.rank and file.save != written.save
            if file != written and (earlier or (written.rank == 0 and file.world_size != written.world_size)):
                self._remove(self.path(file))

    def remove(self, rank: int) -> None:
        """Removes the folder on rank 0. Other ranks remove their own files, as the folder may be on their own disk."""
        own = (self.path(file) for file in self.found() if file.rank == rank)
        for path in [self.folder] if rank == 0 else own:
            self._remove(path)

    def _remove(self, path: str) -> None:
        # Another rank may remove its file meanwhile, which stops the removal of the folder.
        for _ in range(10):
            with suppress(FileNotFoundError):
                self._io.remove_checkpoint(path)
                return


class Resumed(NamedTuple):
    """What was found beside a checkpoint.

    Attributes:
        state: This rank's state, or the mean over all old ranks if their number was another; None if there is none.
        entries: This rank's own entries of the checkpoint; empty if the number of ranks was another.
        method: The `repr` of the method that saved it.
        world_size: Number of ranks that saved it.
        problem: Why there is no state, in words; equal on all ranks.
    """

    state: State | None
    entries: State = {}  # noqa: RUF012
    method: str = ""
    world_size: int = 0
    problem: str = ""


_NONE, _FOREIGN, _FOUND = range(3)
_READ, _MISSING, _OTHER_SAVE, _UNREADABLE, _OTHER_FORMAT = range(5)
_PROBLEMS = {
    _MISSING: "is missing",
    _OTHER_SAVE: "is missing: that rank saved after another step, or did not finish",
    _UNREADABLE: "cannot be read",
    _OTHER_FORMAT: "has a format that this version does not know",
}


def read(files: RankFiles, fingerprint: str, load: Load, wire: Wire, device: torch.device) -> Resumed:
    """Reads what the ranks saved beside a checkpoint. A collective: either all ranks get a state, or none does.

    If as many ranks saved it as read it now, each reads its own file; otherwise each reads all files, one by one.
    `fingerprint` is that of the checkpoint on rank 0.
    """
    found = files.found()
    # Rank 0 reads the same file twice: once to choose the save, once for its state.
    load = lru_cache(maxsize=1)(load)

    def agreed(*numbers: int) -> list[list[int]]:
        # A save's number needs all 64 bits, so it travels as a signed integer.
        bits = [number - 2**64 if number >= 2**63 else number for number in numbers]
        gathered = wire.all_gather(torch.tensor(bits, device=device), SETUP)
        return [[number % 2**64 for number in row] for row in gathered.tolist()]

    status, world_size, save = agreed(*_chosen(files, found, fingerprint, load, wire))[0]
    if status == _NONE:
        problem = f"{files.folder}/ has none of rank 0" if found else f"there is no {files.folder}/ beside it"
        return Resumed(None, problem=problem)
    if status == _FOREIGN:
        return Resumed(None, problem=f"{files.path(RankFile(0, world_size, save))} belongs to another save")
    as_many = world_size == wire.world_size
    outcome, failed, content, state = _READ, 0, None, None
    for count, rank in enumerate([wire.rank] if as_many else range(world_size), start=1):
        outcome, content = _read_one(files, RankFile(rank, world_size, save), found, load)
        if content is None:
            failed = rank
            break
        state = content["state"] if state is None else mean_with(state, content["state"], count)
    for ended, rank in agreed(outcome, failed):
        if ended != _READ:
            return Resumed(None, problem=f"{files.path(RankFile(rank, world_size, save))} {_PROBLEMS[ended]}")
    assert content is not None
    return Resumed(state, content["entries"] if as_many else {}, content["method"], world_size)


def _chosen(files: RankFiles, found: list[RankFile], fingerprint: str, load: Load, wire: Wire) -> tuple[int, int, int]:
    """On rank 0: whether one of its files belongs to the checkpoint, and if so, its world size and save number."""
    own = [file for file in found if file.rank == 0]
    if wire.rank or not own:
        return _NONE, 0, 0
    for file in own:
        _, content = _read_one(files, file, found, load)
        if content is not None and content["checkpoint"] == fingerprint:
            return _FOUND, file.world_size, file.save
    return _FOREIGN, own[0].world_size, own[0].save


def _read_one(files: RankFiles, file: RankFile, found: list[RankFile], load: Load) -> tuple[int, State | None]:
    if file not in found:
        earlier = any((file.rank, file.world_size) == (each.rank, each.world_size) for each in found)
        return _OTHER_SAVE if earlier else _MISSING, None
    try:
        content = load(files.path(file))
    except Exception as error:
        # A plugin may raise anything for a damaged file. All ranks must learn of it, or the others would wait.
        warnings.warn(f"{files.path(file)} cannot be read: {type(error).__name__}: {error}", stacklevel=2)
        return _UNREADABLE, None
    if content.get("format") != FORMAT:
        return _OTHER_FORMAT, None
    return _READ, content
