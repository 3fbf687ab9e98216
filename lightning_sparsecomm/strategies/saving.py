"""A strategy's checkpoints: what each rank writes beside them and takes over again. Knows no package of Lightning's."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sparsecomm.agreement import plain_repr
from lightning_sparsecomm.checkpoint import FORMAT, SUFFIX, RankFile, RankFiles, Resumed, State, fingerprint_of, read
from lightning_sparsecomm.method import Method
from lightning_sparsecomm.sync import BucketSync
from lightning_sparsecomm.synchronizer import Synchronizer
from lightning_sparsecomm.wire import Wire


class SavingMixin:
    """Writes and reads the files beside checkpoints, for a strategy that holds a method and its synchronizer."""

    method: Method
    _synchronizer: Synchronizer | None

    # What is needed of Lightning's strategies.
    checkpoint_io: Any
    global_rank: int
    world_size: int
    root_device: torch.device

    def _prepare_saving(self) -> None:
        self._ended: tuple[int, State] | None = None
        self._written: tuple[RankFiles, RankFile] | None = None

    def _keep_state(self) -> None:
        """Keeps what there is at the end of a run: a Trainer is often asked for a checkpoint when its fit is over."""
        if self._synchronizer is not None:
            self._ended = self._synchronizer.save_number(), _on_cpu(self._synchronizer.state_dict())

    def _write_state(
        self, path: Any, checkpoint: object, entries: State, to_resume: bool, storage_options: Any = None
    ) -> None:
        """Writes this rank's file beside a checkpoint that is about to be written; without a collective.

        Args:
            path: The checkpoint's.
            checkpoint: What will be written there.
            entries: What of it is this rank's own, though rank 0's is written.
            to_resume: Whether it is one to resume from, and not of weights alone.
            storage_options: For the plugin that writes both.
        """
        files = RankFiles(path, self.checkpoint_io)
        saved = self._ended
        if self._synchronizer is not None:
            saved = self._synchronizer.save_number(), self._synchronizer.state_dict()
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
            # All ranks have written theirs: Lightning waits for them after each checkpoint.
            files, file = self._written
            self._written = None
            files.prune(file)

    def _read_state(self, path: Any, fingerprint: str, weights_only: bool | None, wire: Wire) -> Resumed:
        """Reads what the ranks wrote beside a checkpoint. All ranks call it together.

        Args:
            path: The checkpoint's.
            fingerprint: Its content's, as rank 0 has read it.
            weights_only: As the checkpoint was loaded.
            wire: Where ranks agree.
        """

        def load(file: str) -> State:
            loaded: State = self.checkpoint_io.load_checkpoint(file, weights_only=weights_only)
            return loaded

        return read(RankFiles(path, self.checkpoint_io, follow=True), fingerprint, load, wire, self.root_device)

    def _take_over_state(self, path: Any, resumed: Resumed) -> None:
        """Goes on with what was read beside a checkpoint, or says why there is none."""
        assert self._synchronizer is not None
        synchronizer = self._synchronizer
        said: list[str] = []
        if resumed.state is None:
            if self._holds_state:
                said.append(
                    f"resuming from {path} with empty memories, and with warm-ups from their beginning:"
                    f" {resumed.problem}. What ranks had not sent yet is lost. A checkpoint of ddp has no such files;"
                    f" one of sparsecomm has them in the folder {Path(path).name}{SUFFIX} beside it, which must go with"
                    " it wherever it goes."
                )
        else:
            dropped = synchronizer.load_state_dict(resumed.state, resumed.world_size == synchronizer.wire.world_size)
            if dropped:
                said.append(
                    f"of what was saved beside {path}, this run has no place for {'; '.join(dropped)}. It was saved"
                    f" with {resumed.method}, and the method is {plain_repr(self.method)} now."
                )
            if resumed.world_size != synchronizer.wire.world_size:
                said.append(
                    f"{path} was saved by {resumed.world_size} processes, and these are {synchronizer.wire.world_size}:"
                    " each begins with the mean over those of what they had not sent yet, and of their momentum."
                )
        if self.global_rank == 0:
            for words in said:
                warnings.warn(words, stacklevel=2)


def _on_cpu(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    return [_on_cpu(value) for value in state] if isinstance(state, list) else state
