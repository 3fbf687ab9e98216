"""The files that ranks write beside a strategy's checkpoints, and read to resume. It imports no Lightning package."""

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.frontends.loading import loading
from lightning_sparsecomm.methods import auto
from lightning_sparsecomm.run.agreement import plain_repr
from lightning_sparsecomm.run.checkpoint import Resumed, read
from lightning_sparsecomm.run.contents import State, fingerprint_of
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.node_turns import groups_of, is_divided
from lightning_sparsecomm.run.nodes import Groups
from lightning_sparsecomm.run.rank_files import SUFFIX, RankFile, RankFiles
from lightning_sparsecomm.run.saves import Ranks, Saves, save_alone
from lightning_sparsecomm.sharing.bucket import BucketSync
from lightning_sparsecomm.sharing.method import Method

_FALLBACK = ".with_fallback("


class SavingMixin:
    """Writes and reads the files beside checkpoints, for a strategy that holds a method and its engine."""

    method: Method
    nodes: Literal["auto"] | Groups | None = None
    _engine: Engine | None

    # Attributes of Lightning's strategies.
    checkpoint_io: Any
    global_rank: int
    world_size: int
    root_device: torch.device
    cluster_environment: Any

    # Number, state and wire of the last run.
    _ended: tuple[int, State, Wire] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saves = Saves()

    def __getstate__(self) -> dict[str, Any]:
        """Of copies and pickles, such as of what `fabric.setup` returns: they take no part in this strategy's run."""
        return {**vars(self), "_engine": None, "_chooser": None, "_ended": None, "_uneven": None, "_saves": Saves()}

    def _end(self) -> None:
        """Ends the run, and keeps its state: a Trainer is often asked for a checkpoint after its fit.

        If an error or a signal has ended it, the module is left with the weights that all share, as far as this rank
        knows them, and not with its own.
        """
        if self._engine is not None:
            engine = self._engine
            state = _on_cpu(engine.state.state_dict())
            # Of this rank's own weights, copies: the module gets others.
            state["weights"] = {name: weight.clone() for name, weight in state["weights"].items()}
            self._ended = engine.agreement.run, state, engine.wire
            engine.replicas.view_shared(collective=False)
            engine.close()
            self._engine = None

    def _save(
        self,
        path: Any,
        checkpoint: object,
        entries: State,
        to_resume: bool,
        write: Callable[[Any], None],
        together: bool = True,
        storage_options: Any = None,
    ) -> None:
        """Writes this rank's file, and then the checkpoint, by `write`; see `Saves.replace`.

        `entries` are those that differ on this rank; the checkpoint holds rank 0's. Unless it is `to_resume` from, the
        checkpoint holds weights alone, and gets no files: rank 0 may write it by itself. Otherwise it is a collective
        if all ranks save `together`.
        """
        saved = self._ended
        if self._engine is not None:
            saved = self._engine.agreement.run, self._engine.state.state_dict(), self._engine.wire
        run, state, _ = saved if saved is not None else (0, {}, None)
        content: State | None = None
        if saved is not None and to_resume and self._holds_state:
            content = {
                "method": plain_repr(self.method),
                "checkpoint": fingerprint_of(checkpoint) if self.global_rank == 0 else "",
                "entries": entries,
                "state": state,
            }
        files, load = self._files(path), self.checkpoint_io.load_checkpoint
        if content is None and together:
            # As under ddp, where other ranks need not call this.
            if self.global_rank == 0:
                self._saves.replace_alone(files, run, write, load)
            return
        file = self._own_file(self._saves.number(run))
        ranks = self._ranks() if together else None
        files = files if ranks is None else self._files_of_all(path, ranks, file)
        if ranks is None:
            save_alone(files, file, content, write, self._files, storage_options)
        else:
            self._saves.replace(files, file, content, write, load, ranks, storage_options)

    def _remove(self, path: Any, remove: Callable[[], None]) -> None:
        """Removes a checkpoint by `remove`, on rank 0 with the files of all ranks. No collective, as under ddp."""
        if self.global_rank == 0:
            self._saves.remove(self._files(path), remove, self.checkpoint_io.load_checkpoint)
        else:
            remove()

    def _files_of_all(self, path: Any, ranks: Ranks, file: RankFile) -> RankFiles:
        """Those beside a checkpoint that all ranks save, each by its own path. A collective."""
        return self._files(self._common_path(path, ranks, file))

    def _common_path(self, path: Any, ranks: Ranks, file: RankFile) -> str:
        return self._saves.agree_on_path(path, ranks, file, lambda each: RankFiles(each, self.checkpoint_io))

    def _files(self, path: Any) -> RankFiles:
        return RankFiles(path, self.checkpoint_io)

    def _own_file(self, save: int) -> RankFile:
        return RankFile(self.global_rank, self.world_size, save)

    def _ranks(self) -> Ranks | None:
        """All ranks; None where they cannot call together: one is lost, or there is no process group."""
        wire = self._engine.wire if self._engine is not None else None
        if wire is None:
            wire = self._ended[2] if self._ended is not None else None
        if wire is None:
            with suppress(ValueError, RuntimeError):
                wire = Wire()
        return Ranks(wire, self.root_device) if wire is not None and not wire.failures else None

    @property
    def _holds_state(self) -> bool:
        in_buckets = any(isinstance(sync, BucketSync) for sync in self.method.syncs)
        return not in_buckets or isinstance(self.method, auto)

    def _read_state(self, path: Any, fingerprint: str, weights_only: bool | None, wire: Wire) -> Resumed:
        """Reads what the ranks wrote beside a checkpoint whose fingerprint rank 0 passes. A collective."""
        load = loading(self.checkpoint_io.load_checkpoint, weights_only)
        files = RankFiles(path, self.checkpoint_io, follow=True)
        # Lightning may read before the model is set up.
        node_rank = self.cluster_environment.node_rank() if self.nodes == "auto" else 0
        groups = groups_of(self.nodes, wire, node_rank, self.root_device)
        return read(files, fingerprint, load, wire, self.root_device, groups if is_divided(groups) else ())

    @property
    def _nodes(self) -> Groups:
        """The ranks of each node, where the method works between nodes; else empty."""
        nodes = self._engine.registry.nodes if self._engine is not None else None
        return nodes.groups if nodes is not None else ()

    def _load_state(self, path: Any, resumed: Resumed) -> str:
        """Loads what was read beside a checkpoint, and warns on rank 0 of what is lost.

        Returns a line for users where nothing is, and else an empty one.
        """
        assert self._engine is not None
        engine, lost = self._engine, []
        if resumed.state is not None:
            ranks = self._ranks()
            # As in `agree_on_path`.
            common = path if ranks is None else ranks.text(os.fspath(path))
            self._saves.resumed(RankFiles(common, self.checkpoint_io, follow=True), resumed.save)
            engine.restart()
            unused = engine.state.load_state_dict(resumed.state, resumed.alike)
            if resumed.state.get("torn"):
                lost.append(
                    f"{path} was saved after an error in the middle of an optimizer step: what ranks had sent in that"
                    " step is lost. Resume from an earlier checkpoint to lose nothing."
                )
            if unused:
                # The first few words of two methods tell them apart, if their optimizers are the same.
                old, new = resumed.method, plain_repr(self.method)
                if old.split(_FALLBACK)[0] != new.split(_FALLBACK)[0]:
                    old, new = old.split(_FALLBACK)[0], new.split(_FALLBACK)[0]
                lost.append(
                    f"of what was saved beside {path}, this run has no place for {'; '.join(unused)}. It was saved"
                    f" with {old}, and the method is {new} now."
                )
            if not resumed.alike:
                saved, now = _on(resumed.state.get("nodes", ())), _on(self._nodes)
                lost.append(
                    f"{path} was saved by {resumed.world_size} processes{saved}, and these are"
                    f" {engine.wire.world_size}{now}:"
                    " each begins with the mean over those of what they had not sent yet, and of their momentum."
                )
        elif self._holds_state:
            lost.append(
                f"resuming from {path} with empty memories, and with warm-ups from their beginning: {resumed.problem}."
                " What ranks had not sent yet is lost. Checkpoints of ddp have no such files. Those of sparsecomm have"
                f" them in the folder {Path(path).name}{SUFFIX} beside them: keep both together."
            )
        # Files that cannot be used are said on all ranks: each may look at its own disk.
        alarmed = resumed.state is None and resumed.found
        for words in lost if alarmed or self.global_rank == 0 else []:
            warnings.warn(words, stacklevel=2)
        if resumed.state is None or lost or self.global_rank:
            return ""
        return f"sparsecomm: resumed from {path}, with what ranks had not sent yet"


def _on(nodes: Groups) -> str:
    return f" on nodes {[list(group) for group in nodes]}" if nodes else ""


def _on_cpu(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    return [_on_cpu(value) for value in state] if isinstance(state, list) else state
