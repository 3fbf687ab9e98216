"""A file per rank, in a folder beside a checkpoint: names, what each holds, and whether it is whole."""

import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_sparsecomm.run.contents import State, checksum_of

FORMAT = 2
SUFFIX = ".sparsecomm"

Load = Callable[[str], State]
"""Reads the file at a path."""

_NAME = re.compile(r"rank_(\d+)_of_(\d+)\.([0-9a-f]{16})\.pt")

# What a content must hold. Format 1 lacks rank, world size, save and checksum.
_TYPES: dict[str, type | tuple[type, ...]] = {"method": str, "checkpoint": str, "entries": dict, "state": dict}
_STATE_TYPES: dict[str, type | tuple[type, ...]] = {
    "streams": list,
    "leading": (int, type(None)),
    "weights": dict,
    "scaler": dict,
    "ledger": dict,
}
_STREAM_TYPES: dict[str, type | tuple[type, ...]] = {"steps": int, "members": list, "held": dict}


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

    Each save writes files with new names. Several saves, and several runs, may have files in one folder.

    Reading follows a path that is a link. Saving does not, since the new checkpoint replaces the link; nor does
    removing, which leaves the link's target.

    Args:
        path: Of the checkpoint.
        io: Reads and writes files.
        follow: Whether to follow a link.
        common: What all ranks call the checkpoint, where each writes into a folder of its own; None for `path`.

    Attributes:
        folder: Where the files are.
        key: Equal on all ranks: the folder beside what all ranks call the checkpoint.
    """

    def __init__(self, path: Any, io: CheckpointIO, follow: bool = False, common: Any = None) -> None:
        self.folder = f"{os.fspath(path)}{SUFFIX}"
        self._io = io
        self._fs, self._root = fsspec.core.url_to_fs(self.folder)
        # Lightning's save_last="link" makes a link to a checkpoint; the folder is beside the link's target.
        if follow and isinstance(self._fs, LocalFileSystem) and os.path.islink(self._checkpoint):
            self.folder = self._root = os.path.realpath(self._checkpoint) + SUFFIX
        self.key = self.folder if common is None else f"{os.fspath(common)}{SUFFIX}"

    @property
    def _checkpoint(self) -> str:
        return str(self._root).removesuffix(SUFFIX)

    def has_checkpoint(self) -> bool:
        """Whether the checkpoint itself is there."""
        return bool(self._fs.exists(self._checkpoint))

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

    @property
    def written_later(self) -> bool:
        """Whether the plugin writes in the background, one file after the other."""
        return _writes_later(self._io)

    def write(self, file: RankFile, content: State, storage_options: Any = None) -> None:
        """Writes a file, sealed. Only rank 0's may be written later: it comes before the checkpoint in any case."""
        io = self._io
        while file.rank and _writes_later(io):
            io = io.checkpoint_io  # type: ignore[attr-defined]
        whole = sealed(file, content)
        for last in (False, False, True):
            try:
                return io.save_checkpoint(whole, self.path(file), storage_options=storage_options)
            except FileNotFoundError:
                # Another run has removed its last file, and the folder, at this moment.
                if last:
                    raise

    def replace_checkpoint(self, save: int, write: Callable[[str], None]) -> None:
        """Replaces the checkpoint by what `write` writes to a path: by another file, renamed once it is whole.

        Only local files can be renamed; plugins that write later, or more than one file, replace it themselves.
        """
        if not isinstance(self._fs, LocalFileSystem) or self.written_later:
            # With its protocol, which the path on the file system lacks.
            write(self.folder.removesuffix(SUFFIX))
            return
        new = f"{self._root}/checkpoint.{save:016x}.new"
        os.makedirs(self._root, exist_ok=True)
        try:
            write(new)
            if os.path.isfile(new):
                os.replace(new, self._checkpoint)
            else:
                write(self._checkpoint)
        finally:
            with suppress(OSError):
                self._io.remove_checkpoint(new)

    def remove(self, files: Collection[RankFile]) -> None:
        """Removes files, and the folder once it is empty. Others may remove them at the same time."""
        for file in files:
            with suppress(FileNotFoundError):
                self._io.remove_checkpoint(self.path(file))
        # Elsewhere, a folder is no more than the names of its files. A plugin that writes later may be about to write.
        if isinstance(self._fs, LocalFileSystem) and not self.written_later:
            with suppress(OSError):
                os.rmdir(self._root)


def _writes_later(io: object) -> bool:
    # By name, as it may be of either Lightning package. Plugins that wrap another hold it as `checkpoint_io`.
    if "AsyncCheckpointIO" in {kind.__name__ for kind in type(io).__mro__}:
        return True
    wrapped = getattr(io, "checkpoint_io", None)
    return wrapped is not None and _writes_later(wrapped)


def sealed(file: RankFile, content: State) -> State:
    """The content with the file's format, rank, world size and save, and a checksum over all of it."""
    content = {"format": FORMAT, **file._asdict(), **content}
    return {**content, "checksum": checksum_of(content)}


def problem_of(file: RankFile, content: object) -> str:
    """Why a content that was read cannot be used, in words; empty if it is whole, and that of this file."""
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        return "is no file of a rank"
    if content["format"] not in (1, FORMAT):
        return f"has format {content['format']}, which this version does not know"
    if content["format"] != 1:
        unsealed = {key: value for key, value in content.items() if key != "checksum"}
        if content.get("checksum") != checksum_of(unsealed):
            return "is damaged: its checksum does not fit"
        if any(content.get(key) != value for key, value in file._asdict().items()):
            return f"was another file: that of {', '.join(f'{key} {content.get(key)}' for key in file._asdict())}"
    return "" if _is_whole(content) else "is damaged: parts of it are missing"


def _is_whole(content: State) -> bool:
    return (
        _has(content, _TYPES)
        and _has(content["state"], _STATE_TYPES)
        and all(isinstance(stream, dict) and _has(stream, _STREAM_TYPES) for stream in content["state"]["streams"])
        and all(isinstance(parts, dict) for each in content["state"]["streams"] for parts in each["held"].values())
        and isinstance(content["state"]["ledger"].get("rows"), dict)
    )


def _has(content: State, types: dict[str, type | tuple[type, ...]]) -> bool:
    return all(isinstance(content.get(key), kind) for key, kind in types.items())
