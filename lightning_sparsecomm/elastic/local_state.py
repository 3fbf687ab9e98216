"""What is a replica's own, in a file of its machine, for the process that takes its place if it is killed."""

import os
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import torch

from lightning_sparsecomm.channel.saved import Saved
from lightning_sparsecomm.elastic.members import NOTHING
from lightning_sparsecomm.elastic.units import own_memories
from lightning_sparsecomm.run.contents import checksum_of
from lightning_sparsecomm.run.engine import Engine

FOLDER = "SPARSECOMM_LOCAL_STATES"
"""The variable of the environment that has the folder of a replay."""

# Of how many processes it is known with which exchange they were there last.
_KNOWN = 10_000

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
        exchanged: By name of a replica's process, what its last exchange has led to: of the last ten thousand.
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

    It is written after each exchange that counts. A process that takes the replica's place goes on with it, unless
    others have counted a later exchange with the one before: what was sent in that would be sent twice.

    Args:
        folder: Where the file is; None for nowhere.
        process: The name of this replica's process.
        engine: Its run.
        tell: Called with what a user should know.

    Attributes:
        taken: With whose local state this process goes on, and of when; `NOBODY` for none.
        present: Names of the processes that are in the meeting. What one of them holds is left to it.
    """

    def __init__(
        self, folder: str | None, process: str, engine: Engine, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self._path = None if folder is None else Path(folder) / file_of(process.rpartition(":")[0])
        self._process, self._engine, self._tell = process, engine, tell
        self.taken = NOBODY
        self.present: Collection[str] = ()

    def keep(self, run: str, state: str) -> None:
        """Writes it, after an exchange of a run that has led to this state."""
        if self._path is None:
            return
        held = [
            own_memories(tracked) | self._engine.state.of_optimizer(tracked, in_common=False)
            for tracked in self._engine.registry.optimizers
        ]
        own = Holder(self._process, run, state)
        if (problem := self._write(self._path, own, own, held)) is not None:
            self._warn(f"cannot be written: {problem}. If this replica is killed now, its residuals are lost.")

    def take(self, run: str, exchanged: Mapping[str, str]) -> list[Saved]:
        """For each optimizer, what this replica goes on with: what is in the file, or nothing.

        Args:
            run: The name of the first state of the run.
            exchanged: By name of a process, what its last exchange that others have counted has led to.
        """
        self.taken = NOBODY
        if self._path is None:
            return []
        for broken_off in self._path.parent.glob(f"{self._path.name}.*.new"):
            with suppress(OSError):
                broken_off.unlink()
        found = self._read(self._path)
        if found is None:
            return []
        if (found.holder.run, found.holder.state) != (run, exchanged.get(found.holder.process, NOTHING)):
            self._warn("is from before an exchange that others have counted, or of another run. It is not used.")
            return []
        if found.holder.process != self._process and found.holder.process in self.present:
            self._warn("is that of another replica of this name, which is there. Give each a name of its own.")
            return []
        return self._take_over(self._path, found, run)

    def _take_over(self, path: Path, found: "_Found", run: str) -> list[Saved]:
        # It is this process's from here on: what is sent of it next is under its name.
        problem = self._write(path, Holder(self._process, run, NOTHING), found.origin, found.held)
        if problem is not None:
            self._warn(f"cannot be written: {problem}. It is not used, since the next process would use it again.")
            return []
        self.taken = found.origin
        self._tell(f"sparsecomm: this replica goes on with its local state, from {path}")
        return found.held

    def _read(self, path: Path) -> "_Found | None":
        """What the file has; None for nothing that can be used."""
        if not path.exists():
            return None
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            checksum = content.pop("checksum")
            if checksum != checksum_of(content):
                raise ValueError("its checksum does not fit")
            return _Found(Holder.of(content["holder"]), Holder.of(content["origin"]), content["held"])
        except Exception as error:
            # What a damaged file raises has no end of kinds, and torch's advice is about models of others.
            why = str(error) if isinstance(error, (OSError, ValueError)) else f"it is damaged ({type(error).__name__})"
            self._warn(f"cannot be read: {why}. It is not used.")
            return None

    def _write(self, path: Path, holder: Holder, origin: Holder, held: list[Saved]) -> Exception | None:
        """Replaces the file in one step; returns what was in the way."""
        content = {"holder": tuple(holder), "origin": tuple(origin), "held": held}
        new = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            torch.save({**content, "checksum": checksum_of(content)}, new)
            os.replace(new, path)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            return error
        return None

    def _warn(self, what: str) -> None:
        warnings.warn(f"the local state in {self._path} {what}", stacklevel=3)


class ReplayedLocalState(LocalState):
    """Local state as it was taken over in the run that is replayed: this one, and when.

    Args:
        folder, process, engine: As of `LocalState`.
        patience: How long it waits for the file.

    Attributes:
        due: What was taken over in the meeting that is replayed; `NOBODY` for nothing.
    """

    def __init__(self, folder: str | None, process: str, engine: Engine, patience: timedelta) -> None:
        super().__init__(folder, process, engine)
        self._patience = patience
        self.due = NOBODY

    def take(self, run: str, exchanged: Mapping[str, str]) -> list[Saved]:
        self.taken = NOBODY
        deadline = time.monotonic() + self._patience.total_seconds()
        while self._path is not None and self.due != NOBODY and time.monotonic() < deadline:
            # Another process of the replay may have to write it first.
            found = self._read(self._path)
            if found is not None and found.origin == self.due:
                return self._take_over(self._path, found, run)
            time.sleep(_LOOKING_SECONDS)
        return []


class _Found(NamedTuple):
    """What a file has: whose it is now, whose it was when it was written after an exchange, and that."""

    holder: Holder
    origin: Holder
    held: list[Saved]


def file_of(replica: str) -> str:
    """The name of the file of a replica of this name."""
    return f"{quote(replica, safe='')}.state"
