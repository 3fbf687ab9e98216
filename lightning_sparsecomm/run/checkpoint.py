"""Reads what the ranks saved beside a checkpoint: either all ranks get a state, or none does."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from lightning_sparsecomm.basis.ledger import SETUP
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.run.contents import State, mean_with
from lightning_sparsecomm.run.gathered import gather_numbers, gather_texts
from lightning_sparsecomm.run.nodes import Groups
from lightning_sparsecomm.run.rank_files import Load, RankFile, RankFiles, problem_of


class Resumed(NamedTuple):
    """What was found beside a checkpoint.

    Attributes:
        state: This rank's state, or the mean over all old ranks if their number was another; None if there is none.
        entries: This rank's own entries of the checkpoint; empty if the number of ranks was another.
        method: The `repr` of the method that saved it.
        world_size: Number of ranks that saved it.
        save: Number of the save that wrote it; 0 if there is no state.
        problem: Why there is no state, in words; equal on all ranks.
        found: Whether rank 0 found any files; equal on all ranks.
        alike: Whether as many ranks saved it, on the same nodes, so that each has read its own file.
    """

    state: State | None
    entries: State = {}  # noqa: RUF012
    method: str = ""
    world_size: int = 0
    save: int = 0
    problem: str = ""
    found: bool = True
    alike: bool = False


def read(
    files: RankFiles, fingerprint: str, load: Load, wire: Wire, device: torch.device, nodes: Groups = ()
) -> Resumed:
    """Reads what the ranks saved beside a checkpoint. A collective: either all ranks get a state, or none does.

    If as many ranks saved it as read it now, on the same `nodes`, each reads its own file; otherwise each reads all
    files, one by one.
    `fingerprint` is that of the checkpoint on rank 0. Two saves without a step in between have the same: then the newer
    one counts, or the older one if the newer was broken off.
    """
    found = files.found()
    # Rank 0 reads the same file twice: once to choose the save, once for its state.
    load = lru_cache(maxsize=1)(load)
    fitting, problem = saves_of(files, found, fingerprint, load) if wire.rank == 0 else ([], "")
    problems: list[str] = []
    while True:
        # The last row says whether there are any files.
        chosen = fitting.pop(0) if fitting else RankFile(int(bool(found)), 0, 0)
        as_now = chosen.world_size == wire.world_size and _nodes_of(files, chosen, load) == [
            list(each) for each in nodes
        ]
        existing, world_size, save, alike = gather_numbers([*chosen, as_now], wire, device, SETUP)[0]
        if not world_size:
            break
        own = [wire.rank] if alike else range(world_size)
        content, words = _read(files, [RankFile(rank, world_size, save) for rank in own], found, load)
        new = [text for text in gather_texts(words, wire, device, SETUP) if text]
        problems = problems or new
        if not new:
            assert content is not None
            entries = content["entries"] if alike else {}
            return Resumed(content["state"], entries, content["method"], world_size, save, alike=bool(alike))
    problem = problems[0] if problems else gather_texts(problem, wire, device, SETUP)[0]
    return Resumed(None, problem=problem, found=bool(existing))


def _nodes_of(files: RankFiles, file: RankFile, load: Load) -> list[list[int]]:
    """The nodes that a file of rank 0, which has been read, was saved on."""
    nodes: list[list[int]] = load(files.path(file))["state"].get("nodes", [])
    return nodes


def saves_of(files: RankFiles, found: Sequence[RankFile], fingerprint: str, load: Load) -> tuple[list[RankFile], str]:
    """Rank 0's whole files that belong to a checkpoint, the newest first; where there are none, why, in words."""
    fitting, problem = [], ""
    for file in sorted((file for file in found if file.rank == 0), key=lambda file: -file.save):
        content, words = _read(files, [file], found, load)
        if content is None:
            problem = problem or words
        elif content["checkpoint"] == fingerprint:
            fitting.append(file)
        else:
            problem = problem or f"{files.path(file)} belongs to another save"
    if not found:
        problem = f"there is no {files.folder}/ beside it"
    return fitting, problem or f"{files.folder}/ has none of rank 0"


def _read(
    files: RankFiles, wanted: Sequence[RankFile], found: Sequence[RankFile], load: Load
) -> tuple[State | None, str]:
    """A content whose state is the mean over those of some files; or None, and why, in words."""
    mean: State | None = None
    for count, file in enumerate(wanted, start=1):
        if file not in found:
            earlier = any((file.rank, file.world_size) == (each.rank, each.world_size) for each in found)
            words = ": that rank saved after another step, or did not finish" if earlier else ""
            return None, f"{files.path(file)} is missing{words}"
        try:
            content = load(files.path(file))
        except Exception as error:
            # A plugin may raise anything for a damaged file. All ranks must learn of it, or the others would wait.
            return None, f"{files.path(file)} cannot be read ({type(error).__name__}: {str(error).splitlines()[:1]})"
        if problem := problem_of(file, content):
            return None, f"{files.path(file)} {problem}"
        if mean is None:
            mean = content
        else:
            mean["state"] = mean_with(mean["state"], content["state"], count)
    return mean, ""
