"""One strategy's saves: whole before they replace the one before, and removed with the checkpoint they belong to."""

import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lightning_sparsecomm.basis.ledger import SAVING
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.run.checkpoint import saves_of
from lightning_sparsecomm.run.contents import State, fingerprint_of
from lightning_sparsecomm.run.gathered import gather_numbers, gather_texts
from lightning_sparsecomm.run.rank_files import SUFFIX, Load, RankFile, RankFiles

# Bits of a save's number that count the saves of a run. Those above are the run's own.
_COUNT_BITS = 32

# Between paths in a text; no path holds it.
_SEPARATOR = "\0"

# How long a rank that saves after an error waits for the files of others, which may have failed as it did.
_PATIENCE_SECONDS = 5.0


class Ranks(NamedTuple):
    """All ranks, as they call together."""

    wire: Wire
    device: torch.device

    def numbers(self, *own: int) -> list[list[int]]:
        return gather_numbers(own, self.wire, self.device, SAVING)

    def text(self, own: str) -> str:
        """Rank 0's text. A collective."""
        return gather_texts(own if self.wire.rank == 0 else "", self.wire, self.device, SAVING)[0]

    def do(self, action: Callable[[], None], failure: str, undo: Callable[[], None] | None = None) -> None:
        """Does something on each rank. A collective; if it fails on any rank, all `undo` it and raise the same error.

        Raises:
            OSError: It failed on some rank: `failure`, and the error of each such rank. If it failed on all ranks, each
                raises its own error.
        """
        error: Exception | None = None
        try:
            action()
        except Exception as caught:
            error = caught
        text = f"{type(error).__name__}: {error}" if error is not None else ""
        texts = gather_texts(text, self.wire, self.device, SAVING)
        if undo is not None and any(texts):
            undo()
        if error is not None and all(texts):
            raise error
        if any(texts):
            words = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
            raise OSError(f"{failure} ({words}). Look for a full or read-only disk there, and save again.") from error


class Saves:
    """Numbers the saves of one strategy, and knows which of them have files beside which checkpoint.

    A run's files never touch another's, except where a checkpoint that another run has written is replaced or removed:
    then the files of that checkpoint go with it.

    Rank 0 decides what a checkpoint is called and when it is removed, as under ddp: callbacks of other ranks may name
    and choose other ones, such as by a metric of their own.
    """

    def __init__(self) -> None:
        self._count = 0
        # By `RankFiles.key`, oldest first; in a save, equal on all ranks.
        self._made: dict[str, list[int]] = {}
        # Keys of what rank 0 has removed, and not yet told to others.
        self._removed: set[str] = set()

    def number(self, run: int) -> int:
        """The next save's number, from the run's. Equal on all ranks without a collective, as all save together."""
        self._count += 1
        return (run % (1 << _COUNT_BITS) << _COUNT_BITS) + self._count

    def resumed(self, files: RankFiles, save: int) -> None:
        """Notes which save a checkpoint is of, so that its files go when it is replaced. Called on all ranks."""
        self._made[files.key] = [save]
        self._removed.discard(files.key)

    def agree_on_path(self, own: Any, ranks: Ranks, file: RankFile, files_beside: Callable[[str], RankFiles]) -> str:
        """What all ranks call the checkpoint of this save: rank 0's path. A collective.

        With it rank 0 tells what it has removed since the save before. The others remove their files of that, which
        they may have on a disk of their own.

        Args:
            own: What this rank calls it.
            ranks: All ranks.
            file: This rank's name in this save.
            files_beside: Those beside the checkpoint at a path.
        """
        path, *removed = ranks.text(_SEPARATOR.join([os.fspath(own), *sorted(self._removed)])).split(_SEPARATOR)
        for key in removed if file.rank else []:
            _remove(files_beside(key.removesuffix(SUFFIX)), self._made.pop(key, []), _belongs_to(file))
        self._removed.clear()
        return path

    def replace(
        self,
        files: RankFiles,
        file: RankFile,
        content: State | None,
        write: Callable[[Any], None],
        load: Load,
        ranks: Ranks,
        storage_options: Any = None,
    ) -> None:
        """Writes this rank's file and then, on rank 0, the checkpoint by `write`. A collective.

        The checkpoint is replaced once the files of all ranks are whole, and the files of the save before go after
        that. So whoever is killed at any moment, the checkpoint at the path has the files of all ranks.

        Args:
            files: Those beside the checkpoint.
            file: This rank's name in this save.
            content: What to write into it; None where the checkpoint holds everything.
            write: Writes the checkpoint to a path; called on rank 0.
            load: Reads checkpoints and files.
            ranks: All ranks.
            storage_options: For the plugin.

        Raises:
            OSError: A rank cannot write. Raised on all ranks; the checkpoint is then as before.
        """
        made = self._known(files, load, ranks)
        checkpoint = files.folder.removesuffix(SUFFIX)
        if content is not None:
            ranks.do(
                lambda: files.write(file, content, storage_options),
                f"{checkpoint} was not saved, and is as before: some ranks could not write their files",
                # Not after an error of the wire: another rank may know that all files are whole.
                undo=lambda: files.remove([file]),
            )
        ranks.do(
            lambda: files.replace_checkpoint(file.save, write) if file.rank == 0 else None,
            f"{checkpoint} was not saved: its file could not be written",
        )
        made.append(file.save)
        # A plugin that writes later may not have replaced the checkpoint yet.
        kept = ranks.numbers(_kept(files, made))[0][0] if files.written_later else 1
        gone = made[:-kept]
        del made[:-kept]
        # With those of saves that failed.
        _remove(files, [*gone, made[0] - 1], _belongs_to(file))

    def remove(self, files: RankFiles, remove: Callable[[], None], load: Load) -> None:
        """Removes a checkpoint by `remove`, and the files of all ranks that belong to it. Called on rank 0 alone."""
        gone = self._found(files, load)
        remove()
        self._drop(files, gone)

    def replace_alone(self, files: RankFiles, run: int, write: Callable[[Any], None], load: Load) -> None:
        """Writes a checkpoint that needs no files, by `write`. Called on rank 0 alone.

        Files of the one before go, unless a plugin writes later, which may not have replaced that yet.

        Args:
            files: Those beside the checkpoint.
            run: The run's number.
            write: Writes the checkpoint to a path.
            load: Reads checkpoints and files.
        """
        gone = [] if files.written_later else self._found(files, load)
        files.replace_checkpoint(run % (1 << _COUNT_BITS) << _COUNT_BITS, write)
        if not files.written_later:
            self._drop(files, gone)

    def _found(self, files: RankFiles, load: Load) -> list[int]:
        if files.key in self._made:
            return self._made[files.key]
        save = _save_of(files, load)
        return [save] if save else []

    def _drop(self, files: RankFiles, saves: Sequence[int]) -> None:
        _remove(files, saves)
        self._made.pop(files.key, None)
        self._removed.add(files.key)

    def remove_own(self, files: RankFiles, file: RankFile) -> None:
        """Removes this rank's files in a folder that no other rank uses, whatever rank 0 keeps in its own."""
        _remove(files, self._made.get(files.key, []), _belongs_to(file))

    def _known(self, files: RankFiles, load: Load, ranks: Ranks) -> list[int]:
        """The saves that have files beside a checkpoint and belong to it. One of another run is looked for once."""
        if files.key not in self._made:
            save = _save_of(files, load) if ranks.wire.rank == 0 else 0
            save = ranks.numbers(save)[0][0]
            self._made[files.key] = [save] if save else []
        return self._made[files.key]


def save_alone(
    files: RankFiles,
    file: RankFile,
    content: State | None,
    write: Callable[[Any], None],
    again: Callable[[Any], RankFiles],
    storage_options: Any = None,
) -> None:
    """Saves without a collective, as after an error, where other ranks may be gone.

    A checkpoint that has files is replaced only where those of all ranks are written. Otherwise the new one gets
    another name, with `-v1` before its suffix, in files that `again` makes for a path.
    """
    path = files.folder.removesuffix(SUFFIX)
    if file.rank == 0 and content is not None and not _may_replace(files, file):
        stem, suffix = os.path.splitext(path)
        versions = (f"{stem}-v{number}{suffix}" for number in range(1, 10**6))
        kept, path = path, next(each for each in versions if not again(each).has_checkpoint())
        files = again(path)
        warnings.warn(
            f"{path} was saved after an error, when not all ranks could save. So it does not replace {kept}, which has"
            " the state of all ranks.",
            stacklevel=2,
        )
    if content is not None:
        files.write(file, content, storage_options)
    if file.rank == 0:
        files.replace_checkpoint(file.save, write)
        files.remove([])


def _may_replace(files: RankFiles, file: RankFile) -> bool:
    """Whether nothing is lost if rank 0 replaces the checkpoint: it has no files, or all others have written theirs."""
    if not files.has_checkpoint() or all(each.save == file.save for each in files.found()):
        return True
    others = {RankFile(rank, file.world_size, file.save) for rank in range(1, file.world_size)}
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not others <= set(files.found()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _kept(files: RankFiles, made: Sequence[int]) -> int:
    """How many of the newest saves may be needed, where a plugin writes rank 0's files later, in order.

    A file of rank 0 that is there follows the checkpoint of the save before it. So that checkpoint is there, or a newer
    one.
    """
    written = {each.save for each in files.found() if each.rank == 0}
    newest = max((place for place, save in enumerate(made) if save in written), default=0)
    return len(made) - max(newest - 1, 0)


def _save_of(files: RankFiles, load: Load) -> int:
    """The save that the checkpoint is of, from files of another run; 0 if there are none, or it cannot be read."""
    found = files.found()
    if not any(file.rank == 0 for file in found) or not files.has_checkpoint():
        return 0
    try:
        fingerprint = fingerprint_of(load(files.folder.removesuffix(SUFFIX)))
    except Exception as error:
        warnings.warn(
            f"the files in {files.folder}/ stay there, as the checkpoint that they may belong to cannot be read"
            f" ({type(error).__name__}).",
            stacklevel=2,
        )
        return 0
    fitting, _ = saves_of(files, found, fingerprint, load)
    return fitting[0].save if fitting else 0


def _remove(files: RankFiles, saves: Sequence[int], concerns: Callable[[RankFile], bool] = lambda file: True) -> None:
    """Removes the files of some saves, and of earlier ones of their runs, as far as they concern this rank."""
    last = {save >> _COUNT_BITS: save for save in sorted(saves)}
    files.remove(
        [file for file in files.found() if file.save <= last.get(file.save >> _COUNT_BITS, -1) and concerns(file)]
    )


def _belongs_to(own: RankFile) -> Callable[[RankFile], bool]:
    """Whether a file is of this rank; for rank 0, also whether it is of a rank that this world does not have."""
    return lambda file: file.rank == own.rank or (own.rank == 0 and file.rank >= own.world_size)
