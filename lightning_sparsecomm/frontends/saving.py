"""The files that ranks write beside a strategy's checkpoints, and read to resume. It imports no Lightning package."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.run.agreement import plain_repr
from lightning_sparsecomm.run.checkpoint import FORMAT, SUFFIX, RankFile, RankFiles, Resumed, read
from lightning_sparsecomm.run.contents import State, fingerprint_of
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing.bucket import BucketSync
from lightning_sparsecomm.sharing.method import Method


class SavingMixin:
    """Writes and reads the files beside checkpoints, for a strategy that holds a method and its engine."""

    method: Method
    _engine: Engine | None

    # Attributes of Lightning's strategies.
    checkpoint_io: Any
    global_rank: int
    world_size: int
    root_device: torch.device

    # Save number and state of the last run, and the file that this rank wrote before the others finished theirs.
    _ended: tuple[int, State] | None = None
    _written: tuple[RankFiles, RankFile] | None = None

    def _end(self) -> None:
        """Ends the run, and keeps its state: a Trainer is often asked for a checkpoint after its fit."""
        if self._engine is not None:
            self._ended = self._engine.save_number(), _on_cpu(self._engine.state.state_dict())
            self._engine.close()
            self._engine = None

    def _write_state(
        self, path: Any, checkpoint: object, entries: State, to_resume: bool, storage_options: Any = None
    ) -> None:
        """Writes this rank's file beside a checkpoint that is about to be written; without a collective.

        `entries` are those that differ on this rank; the checkpoint holds rank 0's. Unless it is `to_resume` from, the
        checkpoint holds weights alone, and gets no files.
        """
        files, saved = RankFiles(path, self.checkpoint_io), self._ended
        if self._engine is not None:
            saved = self._engine.save_number(), self._engine.state.state_dict()
        if saved is None or not to_resume or not self._holds_state:
            if files.found():
                files.remove(self.global_rank)
            return
        number, state = saved
        file = RankFile(self.global_rank, self.world_size, number)
        content = {
            "format": FORMAT,
            "method": plain_repr(self.method),
            "checkpoint": fingerprint_of(checkpoint) if self.global_rank == 0 else "",
            "entries": entries,
            "state": state,
        }
        files.write(file, content, storage_options)
        self._written = files, file

    @property
    def _holds_state(self) -> bool:
        return not any(isinstance(sync, BucketSync) for sync in self.method.syncs)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        super().barrier(*args, **kwargs)  # type: ignore[misc]
        if self._written is not None:
            # Lightning waits for all ranks after each checkpoint, so all have written their files.
            files, file = self._written
            self._written = None
            files.prune(file)

    def _read_state(self, path: Any, fingerprint: str, weights_only: bool | None, wire: Wire) -> Resumed:
        """Reads what the ranks wrote beside a checkpoint whose fingerprint rank 0 passes. A collective."""
        load = partial(self.checkpoint_io.load_checkpoint, weights_only=weights_only)
        return read(RankFiles(path, self.checkpoint_io, follow=True), fingerprint, load, wire, self.root_device)

    def _load_state(self, path: Any, resumed: Resumed) -> None:
        """Loads what was read beside a checkpoint, and warns on rank 0 of what is lost."""
        assert self._engine is not None
        engine, lost = self._engine, []
        if resumed.state is not None:
            as_many_ranks = resumed.world_size == engine.wire.world_size
            engine.restart()
            unused = engine.state.load_state_dict(resumed.state, as_many_ranks)
            if unused:
                lost.append(
                    f"of what was saved beside {path}, this run has no place for {'; '.join(unused)}. It was saved"
                    f" with {resumed.method}, and the method is {plain_repr(self.method)} now."
                )
            if not as_many_ranks:
                lost.append(
                    f"{path} was saved by {resumed.world_size} processes, and these are {engine.wire.world_size}:"
                    " each begins with the mean over those of what they had not sent yet, and of their momentum."
                )
        elif self._holds_state:
            lost.append(
                f"resuming from {path} with empty memories, and with warm-ups from their beginning: {resumed.problem}."
                " What ranks had not sent yet is lost. Checkpoints of ddp have no such files. Those of sparsecomm have"
                f" them in the folder {Path(path).name}{SUFFIX} beside them: keep both together."
            )
        for words in lost if self.global_rank == 0 else []:
            warnings.warn(words, stacklevel=2)


def _on_cpu(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    return [_on_cpu(value) for value in state] if isinstance(state, list) else state
