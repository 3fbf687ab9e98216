"""What a checkpoint of ddp has no place for: a file for each rank, in a folder beside it."""

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from lightning_sparsecomm.wire import SETUP, Wire

FORMAT = 1
SUFFIX = ".sparsecomm"

_NAME = re.compile(r"rank_(\d+)_of_(\d+)\.([0-9a-f]{16})\.pt")
# Elements of each tensor that tell one checkpoint from another: all weights have moved between two of them.
_SAMPLE = 64

State = dict[str, Any]


class CheckpointIO(Protocol):
    """What is needed of Lightning's plugins that read and write files, local or remote."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None: ...
    def remove_checkpoint(self, path: Any) -> None: ...


class RankFile(NamedTuple):
    """The name of a file says whose state it holds, and to which save it belongs."""

    rank: int
    world_size: int
    save: int

    def __str__(self) -> str:
        return f"rank_{self.rank}_of_{self.world_size}.{self.save:016x}.pt"


class RankFiles:
    """The files beside one checkpoint, in the folder `NAME.ckpt.sparsecomm`.

    A rank writes its file under a name of its own for each save, and removes those of earlier saves to the same path
    only when all ranks have written theirs: a crash in between leaves the earlier ones to the earlier checkpoint.

    Args:
        path: The checkpoint's.
        io: Lightning's plugin that reads and writes it.
        follow: For reading: where the path is a link, the files are those of what it points at. Without it they are the
            link's own: a save takes the link's place, and a removal leaves what it points at.
    """

    def __init__(self, path: Any, io: CheckpointIO, follow: bool = False) -> None:
        self.folder = f"{os.fspath(path)}{SUFFIX}"
        self._io = io
        self._fs, self._root = fsspec.core.url_to_fs(self.folder)
        checkpoint = self._root.removesuffix(SUFFIX)
        # Lightning's save_last="link" makes a link to a checkpoint; the folder is beside what it points at.
        if follow and isinstance(self._fs, LocalFileSystem) and os.path.islink(checkpoint):
            self.folder = self._root = os.path.realpath(checkpoint) + SUFFIX

    def found(self) -> list[RankFile]:
        """All files that are there."""
        # Other ranks write there too. Not every file system's `ls` knows `refresh`.
        self._fs.invalidate_cache(self._root)
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = [_NAME.fullmatch(os.path.basename(path)) for path in paths]
        return sorted(RankFile(int(name[1]), int(name[2]), int(name[3], 16)) for name in names if name is not None)

    def path(self, file: RankFile) -> str:
        """Where a file is."""
        return f"{self.folder}/{file}"

    def write(self, file: RankFile, content: State, storage_options: Any = None) -> None:
        """Writes one file, as Lightning writes the checkpoint."""
        self._io.save_checkpoint(content, self.path(file), storage_options=storage_options)

    def prune(self, written: RankFile) -> None:
        """Removes what earlier saves have left of this rank, and, on rank 0, of worlds of another size. All ranks have
        written theirs by then."""
        found = self.found()
        # An asynchronous plugin may be about to write it: then the others stay until the next save.
        if written not in found:
            return
        for file in found:
            earlier = file.rank == written.rank and file.save != written.save
            if file != written and (earlier or (written.rank == 0 and file.world_size != written.world_size)):
                self._remove(self.path(file))

    def remove(self, rank: int) -> None:
        """Removes the folder, if called on rank 0; else this rank's files in it, should the folder be its own."""
        if rank == 0:
            self._remove(self.folder)
            return
        for file in self.found():
            if file.rank == rank:
                self._remove(self.path(file))

    def _remove(self, path: str) -> None:
        # Another rank may remove its own file meanwhile, at which a removal of the folder stops.
        for _ in range(10):
            with suppress(FileNotFoundError):
                self._io.remove_checkpoint(path)
                return


def fingerprint_of(checkpoint: object) -> str:
    """Tells one checkpoint's content from another's, before it is written and after it is read: a hash of all its
    numbers and texts, and of some elements of each tensor."""
    digest = hashlib.blake2b(digest_size=16)
    for text in _texts(checkpoint):
        digest.update(text if isinstance(text, bytes) else f"{text!r};".encode())
    return digest.hexdigest()


def _texts(item: object) -> Iterator[object]:
    if isinstance(item, Tensor):
        yield str(item.dtype), tuple(item.shape)
        if item.layout == torch.strided and item.numel():
            flat = item.detach().reshape(-1)
            yield flat[:: flat.numel() // _SAMPLE | 1].cpu().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(item, Mapping):
        for key, value in item.items():
            yield from _texts(key)
            yield from _texts(value)
    elif isinstance(item, (list, tuple)):
        yield len(item)
        for value in item:
            yield from _texts(value)
    elif isinstance(item, (str, int, float, bool, type(None))):
        yield item


# What a Trainer itself puts into a checkpoint, apart from what callbacks hold.
_TRAINERS = ("state_dict", "loops", "callbacks", "optimizer_states", "lr_schedulers")


def own_entries(checkpoint: State, handed: State | None) -> State:
    """What in a checkpoint is each rank's own where replicas go apart: averages of weights over time, which callbacks
    keep in their state, put beside it, or in the place of the weights.

    Args:
        checkpoint: As this rank has put it together.
        handed: The weights in it, before callbacks had their say.
    """
    entries = {key: value for key, value in checkpoint.items() if key not in _TRAINERS and _holds_weights(value)}
    if checkpoint["state_dict"] is not handed:
        entries["state_dict"] = checkpoint["state_dict"]
    callbacks = checkpoint.get("callbacks", {})
    return entries | {"callbacks": {key: value for key, value in callbacks.items() if _holds_weights(value)}}


def with_entries(checkpoint: State, entries: State) -> None:
    """Puts a rank's own entries into the checkpoint that it has read, in the place of rank 0's."""
    for key, value in entries.items():
        if key == "callbacks":
            checkpoint.setdefault(key, {}).update(value)
        else:
            checkpoint[key] = value


def _holds_weights(item: object) -> bool:
    if isinstance(item, Tensor):
        return item.dim() > 0
    if isinstance(item, Mapping):
        return any(map(_holds_weights, item.values()))
    return isinstance(item, (list, tuple)) and any(map(_holds_weights, item))


def save_number(run: int, steps: Iterable[int]) -> int:
    """Names a save, equally on all ranks and without a collective: by the run, and by what each optimizer has done."""
    text = f"{run} {list(steps)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Resumed(NamedTuple):
    """What was found beside a checkpoint.

    Attributes:
        state: This rank's state, or the mean over the ranks of a world of another size; None where there is none.
        entries: This rank's own entries of the checkpoint, where replicas go apart; empty in a world of another size.
        method: The `repr` of the method that it was saved by.
        world_size: Ranks of the world that it was saved by.
        problem: In words, why there is none; equal on all ranks.
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
    _OTHER_SAVE: "is missing: that rank has saved after another step, or not to the end",
    _UNREADABLE: "cannot be read",
    _OTHER_FORMAT: "has a format unknown here",
}


def read(files: RankFiles, fingerprint: str, load: Callable[[str], State], wire: Wire, device: torch.device) -> Resumed:
    """What the ranks saved beside a checkpoint. All call it together, and all get something, or none does.

    A rank reads its own file, if the world is as large as it was; else those of all old ranks, one after the other.

    Args:
        files: The files beside the checkpoint.
        fingerprint: Of the checkpoint, as rank 0 has read it.
        load: Reads a file.
        wire: Where ranks agree.
        device: Of tensors that travel.
    """
    found = files.found()
    # Rank 0 reads a file to choose it, and again to go on with it.
    load = lru_cache(maxsize=1)(load)

    def agreed(*numbers: int) -> list[list[int]]:
        # As bits: a save's number needs all 64.
        bits = [number - 2**64 if number >= 2**63 else number for number in numbers]
        gathered = wire.all_gather(torch.tensor(bits, device=device), SETUP)
        return [[number % 2**64 for number in row] for row in gathered.tolist()]

    status, world_size, save = agreed(*_chosen(files, found, fingerprint, load, wire))[0]
    if status == _NONE:
        some = f"{files.folder}/ has none of rank 0" if found else f"there is no {files.folder}/ beside it"
        return Resumed(None, problem=some)
    if status == _FOREIGN:
        return Resumed(None, problem=f"{files.path(RankFile(0, world_size, save))} belongs to another save")
    ranks = [wire.rank] if world_size == wire.world_size else range(world_size)
    outcome, failed, state, method = _READ, 0, None, ""
    entries: State = {}
    for count, rank in enumerate(ranks, start=1):
        file = RankFile(rank, world_size, save)
        outcome, content = _read_one(files, file, found, load)
        if content is None:
            failed = rank
            break
        method = content["method"]
        entries = content["entries"] if world_size == wire.world_size else {}
        state = content["state"] if state is None else mean_with(state, content["state"], count)
    for ended, rank in agreed(outcome, failed):
        if ended != _READ:
            path = files.path(RankFile(rank, world_size, save))
            return Resumed(None, problem=f"{path} {_PROBLEMS[ended]}")
    return Resumed(state, entries, method, world_size)


def _chosen(
    files: RankFiles, found: list[RankFile], fingerprint: str, load: Callable[[str], State], wire: Wire
) -> tuple[int, int, int]:
    """On rank 0: whether one of its files belongs to the checkpoint, and if so, to which world and save."""
    own = [file for file in found if file.rank == 0]
    if wire.rank or not own:
        return _NONE, 0, 0
    for file in own:
        _, content = _read_one(files, file, found, load)
        if content is not None and content["checkpoint"] == fingerprint:
            return _FOUND, file.world_size, file.save
    return _FOREIGN, own[0].world_size, own[0].save


def _read_one(
    files: RankFiles, file: RankFile, found: list[RankFile], load: Callable[[str], State]
) -> tuple[int, State | None]:
    if file not in found:
        earlier = any((file.rank, file.world_size) == (each.rank, each.world_size) for each in found)
        return _OTHER_SAVE if earlier else _MISSING, None
    try:
        content = load(files.path(file))
    except Exception as error:
        # Whatever a plugin raises for a file that is damaged: all ranks must hear of it, and none wait.
        warnings.warn(f"{files.path(file)} cannot be read: {type(error).__name__}: {error}", stacklevel=2)
        return _UNREADABLE, None
    if content.get("format") != FORMAT:
        return _OTHER_FORMAT, None
    return _READ, content


def mean_with(mean: Any, item: Any, count: int) -> Any:
    """The mean of `count` states, from that of the others and the last: of floating-point tensors element by element,
    where one that a state lacks is zero. Of all else, what the first has; of lists, the union."""
    if isinstance(mean, Tensor):
        return mean.add_(item.sub(mean), alpha=1 / count) if mean.is_floating_point() else mean
    if isinstance(mean, list):
        if all(isinstance(each, dict) for each in mean):
            return [mean_with(*pair, count) for pair in zip(mean, item, strict=True)]
        return mean + [each for each in item if each not in mean]
    if not isinstance(mean, dict):
        return mean
    for key in mean.keys() | item.keys():
        if key not in mean:
            mean[key] = _scaled(item[key], 1 / count)
        elif key not in item:
            mean[key] = _scaled(mean[key], 1 - 1 / count)
        else:
            mean[key] = mean_with(mean[key], item[key], count)
    return mean


def _scaled(item: Any, factor: float) -> Any:
    if isinstance(item, dict):
        return {key: _scaled(value, factor) for key, value in item.items()}
    return item * factor if isinstance(item, Tensor) and item.is_floating_point() else item
