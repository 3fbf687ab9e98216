"""The files beside a checkpoint: what they hold, when they are removed, and what is said where they do not fit."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
import pytorch_lightning as pl
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning_fabric import Fabric
from lightning_fabric.plugins.io import TorchCheckpointIO
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from torch import nn

from lightning_sparsecomm import methods
from lightning_sparsecomm.run.contents import fingerprint_of, mean_with
from lightning_sparsecomm.run.rank_files import RankFile, RankFiles
from lightning_sparsecomm.strategies.lightning_fabric import SparseCommStrategy as FabricStrategy
from tests.distributed.launch import run_ranks
from tests.distributed.test_resume import Network, differences, outside_launcher, train

State = dict[str, Any]


@contextmanager
def said() -> Iterator[list[str]]:
    """Collects our own warnings in its block, in order."""
    words: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield words
    ours = (
        "memories",
        "this run has no place",
        "was saved by",
        "cannot be read",
        "random numbers",
        "before fabric.setup",
    )
    words += [str(each.message) for each in caught if any(part in str(each.message) for part in ours)]


class Begin(pl.Callback):
    """Notes what a rank holds when training begins."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.state = torch.utils._pytree.tree_map(
            lambda each: each.clone() if isinstance(each, torch.Tensor) else each, strategy.engine.state.state_dict()
        )


def states(folder: Path) -> list[State]:
    """What each rank has written into a folder."""
    return [torch.load(path, weights_only=True)["state"] for path in sorted(folder.glob("rank_*.pt"))]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def _layout(rank: int, folder: Path) -> dict[str, Any]:
    """What several trainings write."""
    outside_launcher(rank, 2)
    dgc, ddp = folder / "dgc", folder / "ddp"
    trainer, _ = train(dgc, 2, methods.dgc(0.1, warmup_steps=4), 2)
    train(ddp, 2, None, 2)
    found: dict[str, Any] = {"files": names(dgc / "epoch=1.ckpt.sparsecomm")}
    ours, theirs = (torch.load(place / "epoch=1.ckpt", weights_only=True) for place in (dgc, ddp))
    found["keys"] = (list(ours), list(theirs), list(ours["callbacks"]), list(theirs["callbacks"]))

    # Also after fit, and then without state, which replaces what was there.
    trainer.save_checkpoint(folder / "after.ckpt")
    found["after"] = names(folder / "after.ckpt.sparsecomm")
    torch.distributed.barrier()
    trainer.save_checkpoint(folder / "after.ckpt", weights_only=True)
    found["weights only"] = (folder / "after.ckpt.sparsecomm").exists()

    keep = ModelCheckpoint(folder / "kept", "{epoch}", save_top_k=1, monitor="epoch", mode="max", save_last="link")
    weights = ModelCheckpoint(folder / "weights", "{epoch}", save_weights_only=True, every_n_epochs=3)
    train(folder / "top", 2, methods.dgc(0.1, warmup_steps=4), 3, callbacks=(keep, weights))
    found["kept"], found["alone"] = names(folder / "kept"), names(folder / "weights")
    begin = Begin()
    with said() as words:
        train(
            folder / "linked",
            2,
            methods.dgc(0.1, warmup_steps=4),
            4,
            resume=folder / "kept" / "last.ckpt",
            callbacks=(begin,),
        )
    found["linked"] = words, begin.state["streams"][0]["steps"]
    return found


def test_what_is_written(tmp_path: Path) -> None:
    first, _ = run_ranks(tmp_path, 2, _layout, tmp_path)
    assert [name.split(".")[0] for name in first["files"]] == ["rank_0_of_2", "rank_1_of_2"]
    assert len({name.split(".")[1] for name in first["files"]}) == 1
    ours, theirs, our_callbacks, their_callbacks = first["keys"]
    assert ours == theirs
    assert our_callbacks == their_callbacks
    assert len(first["after"]) == 2
    assert not first["weights only"]
    assert first["kept"] == ["epoch=2.ckpt", "epoch=2.ckpt.sparsecomm", "last.ckpt"]
    assert first["alone"] == ["epoch=2.ckpt"]
    assert first["linked"] == ([], 18)

    # A Trainer without our strategy can load it, and so can load_from_checkpoint.
    path = tmp_path / "dgc" / "epoch=1.ckpt"
    model = Network.load_from_checkpoint(path)
    assert differences(dict(model.state_dict()), dict(torch.load(path, weights_only=True)["state_dict"])) == []
    with said() as words:
        trainer, _ = train(tmp_path / "plain", 1, None, 3, resume=path, strategy="auto")
    assert trainer.current_epoch == 3
    assert words == []


def _elsewhere(rank: int, folder: Path) -> tuple[list[str], list[str], list[str], int, int]:
    """Saves at an address that is no path, twice, and resumes from there."""
    outside_launcher(rank, 1)
    os.chdir(folder)
    address = "memory://runs/model.ckpt"
    trainer, _ = train(folder / "run", 1, methods.gradient_dropping(0.1), 2)
    trainer.save_checkpoint(address)
    trainer.save_checkpoint(address)
    here, there = names(folder), [path.removeprefix("/") for path in fsspec.filesystem("memory").find("/")]
    begin = Begin()
    with said() as words:
        train(folder / "run", 1, methods.gradient_dropping(0.1), 3, resume=address, callbacks=(begin,))
    return here, there, words, begin.state["streams"][0]["steps"], trainer.global_step


def test_a_checkpoint_at_an_address_is_written_there_and_resumed(tmp_path: Path) -> None:
    ((here, (checkpoint, file), words, resumed, steps),) = run_ranks(tmp_path, 1, _elsewhere, tmp_path)
    assert (checkpoint, file.partition("/rank_")[0]) == ("runs/model.ckpt", "runs/model.ckpt.sparsecomm")
    assert "runs" not in here and words == []
    assert resumed == steps > 0


def _overwritten(rank: int, folder: Path) -> list[Any]:
    """Saves to one path. The last save stops after rank 1 has written its file, and before rank 0 writes anything."""
    outside_launcher(rank, 2)
    path = folder / "model.ckpt"
    trainer, _ = train(folder / "run", 2, methods.dgc(0.1, warmup_steps=4), 2, callbacks=(Every(path),))
    before = names(folder / "model.ckpt.sparsecomm")
    strategy: Any = trainer.strategy
    torch.distributed.barrier()
    if rank == 1:
        run, state, _ = strategy._ended
        RankFiles(path, strategy.checkpoint_io).write(RankFile(1, 2, strategy._saves.number(run)), {"state": state})
    torch.distributed.barrier()
    between = names(folder / "model.ckpt.sparsecomm")
    begin = Begin()
    with said() as words:
        train(folder / "again", 2, methods.dgc(0.1, warmup_steps=4), 3, resume=path, callbacks=(begin,))
    return [before, between, words, begin.state["streams"][0]["steps"]]


class Every(Checkpoint):
    """Saves to one path after every batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.path)


def test_a_save_that_is_broken_off_leaves_the_one_before(tmp_path: Path) -> None:
    for before, between, words, steps in run_ranks(tmp_path, 2, _overwritten, tmp_path):
        assert len(before) == 2
        assert set(before) < set(between)
        assert len(between) == 3
        assert words == []
        assert steps == 12


def _problems(rank: int, folder: Path) -> dict[str, Any]:
    """What several resumed runs say."""
    outside_launcher(rank, 2)
    run = folder / "run"
    train(run, 2, methods.dgc(0.1, warmup_steps=4), 2)
    train(folder / "ddp", 2, None, 2)
    first, second = run / "epoch=0.ckpt", run / "epoch=1.ckpt"
    files = [f"{first}.sparsecomm/{name}" for name in names(run / "epoch=0.ckpt.sparsecomm")]
    found = {}

    def resume(name: str, path: Path = first, method: Any = None, **options: Any) -> None:
        begin = Begin()
        with said() as words:
            train(
                folder / name,
                2,
                method or methods.dgc(0.1, warmup_steps=4),
                3,
                resume=path,
                callbacks=(begin,),
                **options,
            )
        found[name] = words, begin.state["streams"][0]["steps"]

    def change(make: Callable[[], object]) -> None:
        torch.distributed.barrier()
        if rank == 0:
            make()
        torch.distributed.barrier()

    resume("fits")
    resume("ddp's", folder / "ddp" / "epoch=0.ckpt")
    resume("method", first, methods.gradient_dropping(0.1))
    resume("dense", first, methods.dense())
    resume("kind", first, methods.federated_averaging(every=4))
    resume("dropout", first, model=Forgetful())
    damaged = Path(files[1]).read_bytes()
    change(lambda: Path(files[1]).write_bytes(damaged[:2000]))
    resume("damaged")
    change(lambda: Path(files[1]).unlink())
    resume("missing")
    change(lambda: Path(files[1]).with_name(str(RankFile(1, 2, 1))).touch())
    resume("elsewhere")
    change(lambda: Path(files[1]).with_name(str(RankFile(1, 2, 1))).unlink())
    change(lambda: Path(files[1]).write_bytes(damaged))
    change(lambda: os.rename(f"{first}.sparsecomm", folder / "put away"))
    resume("none")
    change(lambda: os.rename(f"{second}.sparsecomm", f"{first}.sparsecomm"))
    resume("another")
    return found


class Forgetful(Network):
    def __init__(self) -> None:
        super().__init__()
        self.body.append(nn.Dropout(0.5))


def test_what_is_said(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, _problems, tmp_path)
    # All ranks begin alike. Where there are files that cannot be used, all say it; otherwise only rank 0.
    assert {name: steps for name, (_, steps) in first.items()} == {name: steps for name, (_, steps) in second.items()}
    alarming = {"damaged", "missing", "elsewhere", "another"}
    assert {name: words for name, (words, _) in second.items() if words} == {name: first[name][0] for name in alarming}
    begun = {name for name, (_, steps) in first.items() if steps == 0}
    assert begun == {"ddp's", "damaged", "missing", "elsewhere", "none", "another"}
    path = tmp_path / "run" / "epoch=0.ckpt"
    assert first["fits"][0] == []
    lost = f"resuming from {path} with empty memories, and with warm-ups from their beginning: "
    for name, problem in {
        "damaged": r"rank_1_of_2\.\w+\.pt cannot be read \(\w+: .*\)\. What ranks had not sent yet is lost\.",
        "missing": r"rank_1_of_2\.\w+\.pt is missing\.",
        "elsewhere": r"rank_1_of_2\.\w+\.pt is missing: that rank saved after another step, or did not finish\.",
        "none": r"there is no .*epoch=0.ckpt.sparsecomm/ beside it\.",
        "another": r"rank_0_of_2\.\w+\.pt belongs to another save\.",
    }.items():
        (words,) = first[name][0]
        assert words.startswith(lost)
        with pytest.raises(AssertionError, match=problem):
            raise AssertionError(words)
    assert "beside them: keep both together" in first["ddp's"][0][0]
    assert "has no place for GradientSync.MomentumCorrection of" in first["method"][0][0]
    assert "ErrorFeedback" not in first["method"][0][0].split("It was saved with")[0]
    assert "GradientSync.ErrorFeedback of 3 parameters" in first["dense"][0][0]
    assert "GradientSync.ErrorFeedback of 3 parameters" in first["kind"][0][0]
    assert "the model draws random numbers in training ('body.3')" in first["dropout"][0][0]


WORLDS = [(2, 4), (4, 2), (3, 1)]


def _train_and_save(rank: int, world_size: int, folder: Path, name: str) -> None:
    outside_launcher(rank, world_size)
    train(folder, world_size, CHANGED[name][0](), 1, Network(**CHANGED[name][1]))


def _go_on(rank: int, world_size: int, folder: Path, name: str) -> tuple[list[str], Any, Any]:
    outside_launcher(rank, world_size)
    begin = Begin()
    with said() as words:
        _, watch = train(
            folder / "on",
            world_size,
            CHANGED[name][0](),
            2,
            Network(**CHANGED[name][1]),
            folder / "epoch=0.ckpt",
            (begin,),
        )
    return words, _arrays(begin.state), _arrays(watch.seen["weights"])


def _arrays(state: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda each: each.numpy() if isinstance(each, torch.Tensor) else each, state)


CHANGED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "dgc": (lambda: methods.dgc(0.02, warmup_steps=4), {}),
    "sbc": (lambda: methods.sbc(0.02, every=4), {"adam": True}),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["dgc", pytest.param("sbc", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("before", "after"), WORLDS)
def test_another_world_size(before: int, after: int, name: str, tmp_path: Path) -> None:
    run_ranks(tmp_path, before, _train_and_save, before, tmp_path, name)
    saved = states(tmp_path / "epoch=0.ckpt.sparsecomm")
    assert len(saved) == before
    ranks = run_ranks(tmp_path, after, _go_on, after, tmp_path, name)
    (words,) = ranks[0][0]
    assert f"was saved by {before} processes, and these are {after}: each begins with the mean" in words
    kinds = [kind for kind in saved[0]["streams"][0]["held"] if "ErrorFeedback" in kind or "Momentum" in kind]
    assert kinds
    for _, state, _ in ranks:
        assert state["streams"][0]["steps"] == 6
        for kind in kinds:
            parts = [each["streams"][0]["held"][kind] for each in saved]
            now = state["streams"][0]["held"][kind]
            assert now.keys() == set().union(*parts)
            for parameter in now:
                mean = sum(part[parameter].double() for part in parts if parameter in part) / before
                close = {"rtol": 0, "atol": 1e-6 * float(mean.abs().max())}
                torch.testing.assert_close(torch.from_numpy(now[parameter]).double(), mean, **close)
    if name == "dgc":
        for _, _, weights in ranks:
            trained = {key: value for key, value in weights.items() if "running" not in key}
            for key, value in trained.items():
                assert value.tobytes() == ranks[0][2][key].tobytes()


def _asynchronous(rank: int, folder: Path) -> tuple[list[str], Any]:
    outside_launcher(rank, 2)
    train(folder, 2, methods.dgc(0.1, warmup_steps=4), 1, plugins=[AsyncCheckpointIO()])
    begin = Begin()
    with said() as words:
        train(folder / "on", 2, methods.dgc(0.1, warmup_steps=4), 2, resume=folder / "epoch=0.ckpt", callbacks=(begin,))
    return words, begin.state["streams"][0]["steps"]


def test_a_plugin_that_writes_later(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 2, _asynchronous, tmp_path) == [([], 6)] * 2


def _asynchronous_saves(rank: int, folder: Path) -> tuple[int, list[str], Any]:
    outside_launcher(rank, 2)
    path = folder / "model.ckpt"
    options = {"plugins": [AsyncCheckpointIO()]}
    train(folder / "run", 2, methods.dgc(0.1, warmup_steps=4), 5, callbacks=(Every(path),), **options)
    torch.distributed.barrier()
    left = len(names(folder / "model.ckpt.sparsecomm"))
    begin = Begin()
    with said() as words:
        train(folder / "on", 2, methods.dgc(0.1, warmup_steps=4), 6, resume=path, callbacks=(begin,))
    return left, words, begin.state["streams"][0]["steps"]


def test_a_plugin_that_writes_later_leaves_no_heap_of_files(tmp_path: Path) -> None:
    for left, words, steps in run_ranks(tmp_path, 2, _asynchronous_saves, tmp_path):
        assert 2 <= left <= 6
        assert words == []
        assert steps == 30


def _fabric(rank: int, folder: Path, method: str) -> list[str]:
    outside_launcher(rank, 2)
    make = {"dgc": lambda: methods.dgc(0.1, warmup_steps=4), "sbc": lambda: methods.sbc(0.1, every=4)}[method]
    ends = []
    # Never stopped, loaded all at once, and loaded one by one.
    for loads in ((), (("model", "optimizer", "step"),), (("optimizer", "step"), ("model",))):
        begin = 6 if loads else 0
        torch.manual_seed(0)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(make()))
        fabric.launch()
        module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        for keys in loads:
            part = {key: state[key] for key in keys}
            fabric.load(folder / f"{method}.ckpt", part, strict=False)
            assert part.get("step", begin) == begin
        for step in range(begin, 10):
            if step == 6 and not begin:
                with fabric.strategy.shared_model():
                    fabric.save(folder / f"{method}.ckpt", {**state, "step": step})
            generator = torch.Generator().manual_seed(100 * step + rank)
            optimizer.zero_grad()
            fabric.backward(model(torch.randn(4, 6, generator=generator)).square().sum())
            optimizer.step()
        held = fabric.strategy.engine.state.state_dict()
        ends.append(({k: v.clone() for k, v in module.state_dict().items()}, held["streams"]))
        fabric.strategy._end()
    # Without a state to load into, nothing is taken over.
    with said() as words:
        fabric.load(folder / f"{method}.ckpt")
        fabric.setup(nn.Linear(2, 2))
        fabric.load(folder / f"{method}.ckpt")
    assert len(words) == 1
    assert "To resume, give fabric.load() model and optimizer in its state" in words[0]
    return differences(ends[0], ends[1]) + differences(ends[0], ends[2])


@pytest.mark.parametrize("method", ["dgc", "sbc"])
def test_fabric(method: str, tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 2, _fabric, tmp_path, method) == [[], []]


def test_a_fingerprint_tells_contents_apart() -> None:
    checkpoint = {"state_dict": {"a": torch.arange(1000.0)}, "global_step": 3, "loops": [1, {"b": True}]}
    same = {"state_dict": {"a": torch.arange(1000.0)}, "global_step": 3, "loops": [1, {"b": True}]}
    assert fingerprint_of(checkpoint) == fingerprint_of(same)
    others: list[Any] = [
        {**same, "global_step": 4},
        {**same, "state_dict": {"a": torch.arange(1000.0) + 1}},
        {**same, "state_dict": {"a": torch.arange(1000.0, dtype=torch.float64)}},
        {**same, "state_dict": {"b": torch.arange(1000.0)}},
        {**same, "loops": [1]},
    ]
    assert len({fingerprint_of(each) for each in [checkpoint, *others]}) == 1 + len(others)


def test_means() -> None:
    held = [
        {"a": torch.tensor([1.0, 2]), "n": 3, "names": ["x"]},
        {"a": torch.tensor([4.0, 2]), "names": ["y"], "n": 3},
    ]
    held.append({"a": torch.tensor([1.0, 2]), "b": torch.tensor([3.0]), "n": 3, "names": ["x"]})
    mean = held[0]
    for count, item in enumerate(held[1:], start=2):
        mean = mean_with(mean, item, count)
    assert mean == {"a": mean["a"], "b": mean["b"], "n": 3, "names": ["x", "y"]}
    assert mean["a"].tolist() == [2, 2]
    assert mean["b"].tolist() == [1]


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RankFiles(tmp_path / "a.ckpt", None)  # type: ignore[arg-type]
    assert files.found() == []
    folder = tmp_path / "a.ckpt.sparsecomm"
    folder.mkdir()
    for file in (RankFile(1, 2, 2**64 - 1), RankFile(0, 2, 5)):
        (folder / str(file)).touch()
    (folder / "notes.txt").touch()
    assert files.found() == [RankFile(0, 2, 5), RankFile(1, 2, 2**64 - 1)]

    # Some file systems, such as SFTP's, accept only these arguments.
    def listed(self: LocalFileSystem, path: str, detail: bool = False) -> list[str]:
        return [f"{path}/{name}" for name in os.listdir(path)]

    monkeypatch.setattr(LocalFileSystem, "ls", listed)
    assert files.found() == [RankFile(0, 2, 5), RankFile(1, 2, 2**64 - 1)]


def test_a_link_is_followed_by_who_reads_alone(tmp_path: Path) -> None:
    io, link = TorchCheckpointIO(), tmp_path / "last.ckpt"
    kept, written = RankFiles(tmp_path / "epoch=0.ckpt", io), [RankFile(rank, 2, 5) for rank in range(2)]
    for file in written:
        kept.write(file, {})
    link.symlink_to("epoch=0.ckpt")
    assert RankFiles(link, io, follow=True).found() == written
    # A save replaces the link, and not the files of the checkpoint it points to. A removal leaves those alone too.
    RankFiles(link, io).write(RankFile(1, 2, 6), {})
    assert names(tmp_path / "last.ckpt.sparsecomm") == [str(RankFile(1, 2, 6))]
    RankFiles(link, io).remove(RankFiles(link, io).found())
    assert kept.found() == written
