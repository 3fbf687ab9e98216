"""What is a replica's own, in a file of its machine, for the process that takes its place if it is killed."""

import os
import pickle
import time
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import torch

from lightning_sparsecomm.channel.saved import Saved
from lightning_sparsecomm.elastic.members import NOTHING
from lightning_sparsecomm.elastic.membership import short
from lightning_sparsecomm.elastic.units import own_memories
from lightning_sparsecomm.run.engine import Engine

FOLDER = "SPARSECOMM_LOCAL_STATES"
"""The variable of the environment that has the folder of a replay."""

# Of how many processes it is known with which exchange they were there last.
_KNOWN = 1000

# Between two looks at a file that another process of a replay has to write.
_LOOKING_SECONDS = 0.05


class Holder(NamedTuple):
    """Whose local state a file has, and of when.

    Attributes:
        process: The name of a replica's process.
        run: The name of the first state of its run.
        state: What its last exchange has led to; `NOTHING` if it has taken it over, and not exchanged since.
    """

    process: str
    run: str
    state: str

    @classmethod
    def of(cls, fields: Sequence[str]) -> "Holder":
        """From what JSON, or a file, has made of one. Raises `TypeError` for anything else."""
        holder = cls(*fields)
        if not all(isinstance(field, str) for field in holder):
            raise TypeError(f"a holder is three texts; got {fields!r}")
        return holder


NOBODY = Holder("", "", NOTHING)


def note_exchange(exchanged: dict[str, str], names: Sequence[str], state: str) -> None:
    """Notes an exchange that counts.

    Args:
        exchanged: By name of a replica's process, the state that its last exchange has led to: of the last thousand.
        names: Of those that took part.
        state: What it has led to.
    """
    for name in names:
        exchanged.pop(name, None)
        exchanged[name] = state
    for name in list(exchanged)[:-_KNOWN]:
        del exchanged[name]


class LocalState:
    """The file of what is one replica's own: its residuals and other memories, and the state of its optimizers.

    It is written after each exchange that counts. A process that takes the replica's place goes on with them, unless
    others have counted a later exchange with the one before: what was sent in that would be sent twice.

    Args:
        folder: Where the file is; None for nowhere.
        process: The name of this replica's process.
        engine: Its run.

    Attributes:
        taken: Whose local state was taken over last; `NOBODY` for none.
    """

    def __init__(self, folder: str | None, process: str, engine: Engine) -> None:
        self._path = None if folder is None else Path(folder) / f"{quote(short(process), safe='')}.state"
        self._process, self._engine = process, engine
        self.taken = NOBODY

    def keep(self, run: str, state: str) -> None:
        """Writes it, after an exchange of a run that has led to this state."""
        if self._path is not None:
            held = [
                own_memories(tracked) | self._engine.state.of_optimizer(tracked, in_common=False)
                for tracked in self._engine.registry.optimizers
            ]
            self._write(self._path, Holder(self._process, run, state), held)

    def take(self, run: str, exchanged: Mapping[str, str]) -> list[Saved]:
        """For each optimizer, what this replica goes on with: what is in the file, or nothing.

        Args:
            run: The name of the first state of the run.
            exchanged: By name of a process, what its last exchange that others have counted has led to.
        """
        self.taken = NOBODY
        if self._path is None or not self._path.exists():
            return []
        held = self._read(self._path)
        if held is None:
            return []
        holder, memories = held
        if (holder.run, holder.state) != (run, exchanged.get(holder.process, NOTHING)):
            warnings.warn(
                f"the local state in {self._path} is from before an exchange that others have counted, or of another"
                " run. It is not used: this replica begins without residuals.",
                stacklevel=2,
            )
            return []
        # It is this process's from here on: what is sent of it next is under its name.
        self._write(self._path, Holder(self._process, run, NOTHING), memories)
        self.taken = holder
        return memories

    def _read(self, path: Path) -> tuple[Holder, list[Saved]] | None:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            return Holder.of(content["holder"]), content["memories"]
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, TypeError) as error:
            warnings.warn(
                f"the local state in {path} cannot be read: {error}. This replica begins without residuals.",
                stacklevel=2,
            )
            return None

    def _write(self, path: Path, holder: Holder, memories: Sequence[Saved]) -> None:
        new = path.with_suffix(".new")
        try:
            torch.save({"holder": tuple(holder), "memories": list(memories)}, new)
            os.replace(new, path)
        except (OSError, RuntimeError) as error:
            warnings.warn(
                f"the local state cannot be kept in {path}: {error}. If this replica is killed now, it is lost.",
                stacklevel=2,
            )


class ReplayedLocalState(LocalState):
    """Local state as it was taken over in the run that is replayed: this one, and when.

    Args:
        folder, process, engine: As of `LocalState`.
        patience: How long it waits for the file.
    """

    def __init__(self, folder: str | None, process: str, engine: Engine, patience: timedelta) -> None:
        super().__init__(folder, process, engine)
        self._patience = patience
        self.due = NOBODY

    def take(self, run: str, exchanged: Mapping[str, str]) -> list[Saved]:
        self.taken = NOBODY
        if self.due == NOBODY:
            return []
        deadline = time.monotonic() + self._patience.total_seconds()
        while self._path is not None and time.monotonic() < deadline:
            held = self._read(self._path) if self._path.exists() else None
            if held is not None and held[0] == self.due:
                self._write(self._path, Holder(self._process, run, NOTHING), held[1])
                self.taken = self.due
                return held[1]
            time.sleep(_LOOKING_SECONDS)
        return []
