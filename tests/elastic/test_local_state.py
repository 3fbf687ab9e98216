"""What is a replica's own, and outlives the process of a replica that is killed."""

import os
import signal
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_sparsecomm.channel.saved import Saved
from lightning_sparsecomm.elastic import local_state
from lightning_sparsecomm.elastic.local_state import NOBODY, Holder, LocalState, ReplayedLocalState, file_of
from lightning_sparsecomm.elastic.members import NOTHING
from lightning_sparsecomm.elastic.record import Met, read
from lightning_sparsecomm.run.engine import Engine
from tests.elastic.replicas import lighthouse, needs_torchft, replicas
from tests.elastic.test_elastic_training import LOCO, together, with_one_away
from tests.elastic.test_in_flight import METHODS
from tests.elastic.test_replay import check_same, replayed
from tests.elastic.training import equal, equal_but_for_steps, train

HELD: list[Saved] = [{"DeltaSync.ErrorFeedback": {"weight": torch.tensor([1.0, 2.0])}}]


@pytest.fixture
def of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], LocalState]:
    """The local state of a process, all in one folder."""
    monkeypatch.setattr(local_state, "own_memories", lambda _: HELD[0])
    own = SimpleNamespace(of_optimizer=lambda _, in_common: {"the optimizer's own state": {"weight": {"step": 3}}})
    engine = cast(Engine, SimpleNamespace(registry=SimpleNamespace(optimizers=["the only one"]), state=own))
    return lambda process: LocalState(str(tmp_path), process, engine)


def test_the_next_process_goes_on_with_them(of: Callable[[str], LocalState]) -> None:
    of("a:1").keep("run", "third")
    second = of("a:2")
    (taken,) = second.take("run", {"a:1": "third", "b:1": "fourth"})
    assert taken["the optimizer's own state"] == {"weight": {"step": 3}}
    assert torch.equal(taken["DeltaSync.ErrorFeedback"]["weight"], torch.tensor([1.0, 2.0]))
    assert second.taken == Holder("a:1", "run", "third")
    # The second one has exchanged nothing, so a third one goes on with the same.
    third = of("a:3")
    assert third.take("run", {"a:1": "third"})
    # A replay knows it by the exchange after which it was written.
    assert third.taken == Holder("a:1", "run", "third")


@pytest.mark.parametrize(
    ("run", "exchanged"),
    [
        ("run", {"a:1": "fourth"}),
        ("run", {}),
        ("another run", {"a:1": "third"}),
    ],
    ids=["a later exchange", "unknown", "another run"],
)
def test_what_others_may_have_is_not_used_again(
    run: str, exchanged: dict[str, str], of: Callable[[str], LocalState]
) -> None:
    of("a:1").keep("run", "third")
    second = of("a:2")
    with pytest.warns(UserWarning, match="is from before an exchange that others have counted, or of another run"):
        assert second.take(run, exchanged) == []
    assert second.taken == NOBODY


def test_what_was_taken_over_and_sent_in_part_is_not_used_again(of: Callable[[str], LocalState]) -> None:
    of("a:1").keep("run", "third")
    of("a:2").take("run", {"a:1": "third"})
    # It was killed after an exchange, before it could keep anything.
    with pytest.warns(UserWarning, match="from before an exchange"):
        assert of("a:3").take("run", {"a:1": "third", "a:2": "sixth"}) == []


def test_what_cannot_be_taken_over_is_not_used(
    of: Callable[[str], LocalState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process would find the same file, and use it again."""
    of("a:1").keep("run", "third")
    with monkeypatch.context() as full:
        full.setattr(local_state.os, "replace", _full)
        second = of("a:2")
        with pytest.warns(UserWarning, match=r"cannot be written: No space left on device. It is not used"):
            assert second.take("run", {"a:1": "third"}) == []
    assert second.taken == NOBODY
    assert of("a:3").take("run", {"a:1": "third", "a:2": "sixth"})


def test_what_a_process_that_is_there_holds_is_left_to_it(of: Callable[[str], LocalState]) -> None:
    of("a:1").keep("run", "third")
    second = of("a:2")
    second.present = ["b:1", "a:1", "a:2"]
    with pytest.warns(UserWarning, match="is that of another replica of this name, which is there"):
        assert second.take("run", {"a:1": "third"}) == []
    first = of("a:1")
    first.present = second.present
    assert first.take("run", {"a:1": "third"})


def _full(*_: object) -> None:
    raise OSError("No space left on device")


def test_names_of_any_kind_have_files_of_their_own(of: Callable[[str], LocalState], tmp_path: Path) -> None:
    for process in ("a/b:1", "a b:1", "..:1", "a:b:1"):
        of(process).keep("run", "third")
        # A process that was killed while it wrote leaves a part.
        (tmp_path / f"{file_of(process[:-2])}.7.new").write_bytes(b"PK")
        of(process).take("run", {process: "third"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["...state", "a%20b.state", "a%2Fb.state", "a%3Ab.state"]


@pytest.mark.parametrize("content", [b"", b"no such file", b"PK\x03\x04"], ids=["empty", "text", "broken off"])
def test_a_file_that_cannot_be_read_is_left_out(
    content: bytes, of: Callable[[str], LocalState], tmp_path: Path
) -> None:
    (tmp_path / "a.state").write_bytes(content)
    with pytest.warns(UserWarning, match=r"the local state in .* cannot be read"):
        assert of("a:2").take("run", {}) == []


def test_a_file_that_was_damaged_is_left_out(of: Callable[[str], LocalState], tmp_path: Path) -> None:
    of("a:1").keep("run", "third")
    content = (tmp_path / "a.state").read_bytes()
    place = content.index(torch.tensor([1.0, 2.0]).numpy().tobytes())
    (tmp_path / "a.state").write_bytes(content[:place] + b"\x01" + content[place + 1 :])
    with pytest.warns(UserWarning, match=r"cannot be read: its checksum does not fit. It is not used"):
        assert of("a:2").take("run", {"a:1": "third"}) == []


def test_a_file_that_is_something_else_is_left_out(of: Callable[[str], LocalState], tmp_path: Path) -> None:
    for content in ({"holder": ("a", "b"), "held": []}, {"holder": ("a", "b", 3), "held": [], "checksum": ""}, [1, 2]):
        torch.save(content, tmp_path / "a.state")
        with pytest.warns(UserWarning, match=r"the local state in .* cannot be read"):
            assert of("a:2").take("run", {}) == []


def test_where_nothing_can_be_written_training_goes_on(
    of: Callable[[str], LocalState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_state.torch, "save", _full)
    with pytest.warns(UserWarning, match=r"the local state in .* cannot be written: No space left on device"):
        of("a:1").keep("run", "third")
    assert not list(tmp_path.iterdir())


def test_a_replay_takes_over_what_the_run_did(of: Callable[[str], LocalState], tmp_path: Path) -> None:
    first = of("a:1")
    first.keep("run", "third")
    for process, due, taken in (
        ("a:2", Holder("a:1", "run", "fourth"), NOBODY),
        ("a:2", NOBODY, NOBODY),
        ("a:2", Holder("a:1", "run", "third"), Holder("a:1", "run", "third")),
        # The second one has exchanged nothing.
        ("a:3", Holder("a:1", "run", "third"), Holder("a:1", "run", "third")),
    ):
        replayed = ReplayedLocalState(str(tmp_path), process, first._engine, timedelta(seconds=0.2))
        replayed.due = due
        assert bool(replayed.take("run", {})) is (taken != NOBODY)
        assert replayed.taken == taken


def held_in(file: Path) -> tuple[float, float]:
    """The sums of the magnitudes of residuals, and of first moments."""
    (saved,) = torch.load(file, weights_only=True)["held"]
    residuals = saved["DeltaSync.ErrorFeedback"].values()
    moments = [state["exp_avg"] for state in saved["the optimizer's own state"].values()]
    return sum(float(each.abs().sum()) for each in residuals), sum(float(each.abs().sum()) for each in moments)


@needs_torchft
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "method",
    [
        # Of these, a replay's test has one that is not slow.
        pytest.param(LOCO, marks=pytest.mark.slow),
        pytest.param(METHODS["sparse_loco in fragments"], marks=pytest.mark.slow),
        pytest.param(METHODS["sbc"], marks=pytest.mark.slow),
    ],
    ids=["at once", "fragments in flight", "sbc in flight"],
)
def test_one_is_killed_and_started_again(method: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"local_state_dir": str(tmp_path)}
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, method, {}, stops=(12,), **options)
        assert c.hear() == 12
        c.kill()
        held = held_in(tmp_path / "c.state")
        again = start(train, address, "c", 7, method, **options)
        results = [replica.hear() for replica in (a, b, again)]
    assert equal(results)
    residuals, moments = held
    assert residuals > 0
    assert moments > 0
    assert [result["began_with"] for result in results] == [0, 0, pytest.approx(residuals)]
    assert [result["moments"] for result in results] == [0, 0, pytest.approx(moments)]


def die_before_keeping(number: int) -> Callable[[], None]:
    """Alters this process: it is killed after an exchange that all have counted, before it has kept its residual."""

    def before() -> None:
        keep, kept = LocalState.keep, list[str]()

        def keeping(self: LocalState, run: str, state: str) -> None:
            kept.append(state)
            if len(kept) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            keep(self, run, state)

        LocalState.keep = keeping  # type: ignore[method-assign]

    return before


@needs_torchft
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_that_is_killed_before_it_has_kept_them_begins_without_any(tmp_path: Path) -> None:
    options: dict[str, Any] = {"local_state_dir": str(tmp_path)}
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, LOCO, {"c": die_before_keeping(4)}, **options)
        c.process.join()
        again = start(train, address, "c", 7, LOCO, **options)
        results = [replica.hear() for replica in (a, b, again)]
    assert equal(results)
    assert min(held_in(tmp_path / "c.state")) > 0
    assert [result["began_with"] for result in results] == [0, 0, 0]
    assert [result["moments"] for result in results] == [0, 0, 0]


def die_once_taken_over() -> None:
    """Alters this process: it is killed once it has taken over local state, before it goes on."""
    take = LocalState.take

    def taking(self: LocalState, run: str, exchanged: Mapping[str, str]) -> list[Saved]:
        taken = take(self, run, exchanged)
        if taken:
            os.kill(os.getpid(), signal.SIGKILL)
        return taken

    LocalState.take = taking  # type: ignore[method-assign]


@needs_torchft
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_that_is_killed_once_it_has_taken_over_leaves_all_to_the_next(tmp_path: Path) -> None:
    """And its run is made again, though its log does not say so."""
    log = tmp_path / "members.jsonl"
    options: dict[str, Any] = {"local_state_dir": str(tmp_path)}
    with lighthouse() as address, replicas() as start:
        a, b, c = together(start, address, LOCO, {}, stops=(12,), membership_log=str(log), **options)
        assert c.hear() == 12
        c.kill()
        residuals, _ = held_in(tmp_path / "c.state")
        second = start(train, address, "c", 7, LOCO, before=die_once_taken_over, membership_log=str(log), **options)
        second.process.join()
        third = start(train, address, "c", 8, LOCO, membership_log=str(log), **options)
        results = [replica.hear() for replica in (a, b, third)]
    assert results[2]["began_with"] == pytest.approx(residuals)
    ends, made = replayed(log, LOCO, {"a": [0], "b": [1], "c": [2, 7, 8]}, **options)
    assert sorted(ends.values()) == ["lost", "lost", "same", "same", "same"]
    check_same(results, made)


@needs_torchft
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_that_was_stopped_for_long_goes_on_with_its_own(tmp_path: Path) -> None:
    log = tmp_path / "members.jsonl"
    assert equal_but_for_steps(with_one_away(LOCO, 40, local_state_dir=str(tmp_path), membership_log=str(log)))
    holders = [entry.holder for entry in read(log) if isinstance(entry, Met) and entry.holder != NOBODY]
    assert [holder.process[0] for holder in holders] == ["c"]
    assert holders[0].state != NOTHING
