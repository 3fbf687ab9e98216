"""What methods.auto can choose among: frozen parameters, resumed choices that no longer fit, candidates that fail."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sparsecomm import methods
from lightning_sparsecomm.basis.mirror import MirrorWire
from lightning_sparsecomm.basis.schedules import PartOfRun
from lightning_sparsecomm.channel import Channel, ErrorFeedback, MomentumCorrection
from lightning_sparsecomm.codecs import Float16, SparseCodec, TopK
from lightning_sparsecomm.exchange import Gather
from lightning_sparsecomm.planning import usable
from lightning_sparsecomm.planning.chooser import AutoChooser
from lightning_sparsecomm.planning.record import Record
from lightning_sparsecomm.planning.rehearsed import rehearse
from lightning_sparsecomm.planning.usable import rehearsals, trained_by
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import GradientSync, Method
from lightning_sparsecomm.sharing.gradients import note_few_rows

engines: list[Engine] = []


@pytest.fixture(autouse=True)
def close_engines() -> Iterator[None]:
    yield
    while engines:
        engines.pop().guards.close()


def run(method: Method | None = None, ranks: int = 2, frozen: bool = False) -> tuple[nn.Module, AutoChooser]:
    """A run of a network whose larger half may be frozen, on a wire without a network."""
    method = methods.auto() if method is None else method
    assert isinstance(method, methods.auto)
    module = nn.Sequential(nn.Linear(99, 40), nn.Linear(9, 10))
    module[0].requires_grad_(not frozen)
    engine = Engine(method, MirrorWire(ranks))
    engines.append(engine)
    engine.registry.add_module(module)
    engine.register(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    return module, AutoChooser(engine, method.choices, seconds=0.01)


def state(**known: Any) -> dict[str, Any]:
    return asdict(Record(**known))


def test_frozen_parameters_cost_nothing() -> None:
    _, chooser = run(frozen=True)
    kinds = trained_by(engines[0])
    assert [name for _, named in kinds for name, _ in named] == ["1.weight", "1.bias"]
    # Of two ranks, each sends as many bytes as the gradient has.
    assert rehearsals(chooser.choices, kinds, 2)["ddp"].link_bytes == 4 * 100


def test_when_parameters_are_unfrozen_methods_are_rehearsed_anew() -> None:
    module, chooser = run(frozen=True)
    chooser.begin()
    module[0].requires_grad_(True)  # type: ignore[index]
    chooser._outlook.look(chooser.choices)
    assert chooser._outlook._costs["ddp"].link_bytes == 4 * (4000 + 100)


def test_tables_of_few_rows_that_the_first_step_has_found_are_rehearsed_as_such() -> None:
    module, chooser = run()
    chooser.begin()
    before = chooser._outlook._costs["sparsecomm"]
    note_few_rows(module[0].weight, 1)  # type: ignore[index, arg-type]
    decide(chooser)
    # Rows are gathered by themselves.
    assert len(chooser._outlook._costs["sparsecomm"].calls) > len(before.calls)


def test_what_another_optimizers_turn_freezes_still_counts() -> None:
    module, _ = run()
    engines[0].registry.optimizers[0].note_trained()
    module.requires_grad_(False)
    assert sum(parameter.numel() for _, named in trained_by(engines[0]) for _, parameter in named) == 4100


def test_a_candidate_that_cannot_be_rehearsed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(method: Method, *rest: Any) -> Any:
        if repr(method).startswith("gradient_dropping(density=0.1"):
            raise RuntimeError("it needs a GPU")
        return rehearse(method, *rest)

    monkeypatch.setattr(usable, "rehearse", failing)
    _, chooser = run(methods.auto(candidates=[methods.gradient_dropping(0.1)]))
    with pytest.warns(UserWarning, match=r"does not try gradient_dropping\(density=0\.1\).*it needs a GPU"):
        chooser.begin()
    decide(chooser)
    assert "gradient_dropping(density=0.1)" not in chooser.record.predicted
    assert chooser.record.predicted.keys() == {"ddp", "ddp-bf16", "sparsecomm"}


def decide(chooser: AutoChooser) -> None:
    chooser._times._steps.extend([(0.1, 0.09, 0.0)] * 5)
    chooser._decide(engines[0].registry.optimizers[0])


def test_a_trial_is_resumed_with_fewer_methods() -> None:
    _, chooser = run(methods.auto(quality="rounded"))
    chooser.load_state_dict(
        state(current="ddp-bf16", queue=["sparsecomm"], measured={"sparsecomm": 0.01}, history=[{"step": 0}])
    )
    chooser.begin()
    decide(chooser)
    while chooser.record.queue or not chooser.record.settled:
        decide(chooser)
    assert chooser.record.measured.keys() <= {"ddp", "ddp-bf16"}


def test_a_choice_that_cannot_clip_so_is_not_resumed() -> None:
    _, chooser = run()
    engines[0].registry.clips_by_value = True
    engines[0].take_over_clipping(0.5)
    with pytest.warns(UserWarning, match="used sparsecomm, which is not among its methods now: ddp, ddp-bf16"):
        chooser.load_state_dict(state(current="sparsecomm", settled=True))
    assert chooser.record.current == "ddp"
    assert engines[0].registry.in_buckets


def test_with_another_number_of_ranks_it_chooses_anew() -> None:
    _, chooser = run(ranks=2)
    history = [{"step": 7, "method": "sparsecomm", "why": "chose sparsecomm"}]
    saved = state(current="sparsecomm", settled=True, measured={"sparsecomm": 0.2}, ranks=4, history=history)
    chooser.load_state_dict(saved)
    assert chooser.record == Record("sparsecomm", history=history, ranks=2)
    chooser.begin()
    # Until others were tried, it goes on with what it had.
    assert chooser.record.current == "sparsecomm"
    assert not chooser.record.settled
    decide(chooser)
    assert chooser.record.measured.keys() == {"sparsecomm"}
    assert chooser.state_dict()["ranks"] == 2


def test_a_choice_keeps_the_form_for_the_length_that_its_run_had() -> None:
    for followed, every in ((None, 1), ((1000, 2), 1), ((3000, 2), 2), ((3000, 8), 2), ((10_000, 2), 4), (3000, 2)):
        _, chooser = run()
        chooser.load_state_dict(state(current="sparsecomm", settled=True, ranks=2, followed=followed))
        tracked = engines[-1].registry.optimizers[0]
        assert tracked.method is not None
        sync = tracked.method.syncs[0]
        assert isinstance(sync, GradientSync)
        assert sync.every == every
        if followed is not None:
            # By Adam, to which the method falls back, ranks count, too.
            of_run = followed if isinstance(followed, tuple) else (followed, 0)
            assert repr(chooser.choices["sparsecomm"]) == repr(methods.default().for_run(*of_run))
        # The resumed run is long, too.
        tracked.steps = 20
        chooser.follow((2000, 2))
        assert tracked.method.syncs[0] is sync
        assert chooser.state_dict()["followed"] == ((followed, 0) if followed == 3000 else followed)


def test_where_ranks_cannot_step_by_themselves_the_form_stays() -> None:
    _, chooser = run()
    engines[0].registry.fixed = True
    chooser.follow((2000, 2))
    assert chooser.record.followed is None
    assert repr(chooser.choices["sparsecomm"]) == repr(methods.default())


@pytest.mark.parametrize("to_auto", [False, True])
def test_the_form_is_kept_between_auto_and_its_default(to_auto: bool) -> None:
    _, chooser = run()
    engines[0].chooser = chooser
    plain = Engine(methods.default(), MirrorWire(2))
    engines.append(plain)
    module = nn.Sequential(nn.Linear(99, 40), nn.Linear(9, 10))
    plain.registry.add_module(module)
    plain.register(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    for engine in engines:
        engine.expect(3000)
    saved, loading = (plain, engines[0]) if to_auto else (engines[0], plain)
    saved.follow_length()
    loading.state.load_state_dict(saved.state.state_dict(), as_many_ranks=True)
    method = chooser.choices["sparsecomm"] if to_auto else plain.registry.methods[0]
    assert isinstance(method.syncs[0], GradientSync)
    assert method.syncs[0].every == 2


def test_intervals_that_follow_the_runs_length_are_known_when_it_is() -> None:
    """A checkpoint is loaded before that; and a run that may end sooner counts as shorter."""
    candidate = methods.dgc(0.1, warmup_steps=0, every=PartOfRun(0.01))
    _, chooser = run(methods.auto("exact", [candidate]))
    chooser.load_state_dict(state(current=repr(candidate), settled=True, ranks=2))
    for length, sooner, every in ((400.0, False, 4), (100_000.0, True, 50)):
        engines[0].length, engines[0].may_end_sooner = length, sooner
        chooser._begun = False
        chooser.begin()
        assert chooser._times.every == every


def test_a_trial_takes_the_steps_of_the_optimizers_own_method() -> None:
    """Not of its fallbacks: in long runs the default exchanges half as often by SGD. Short steps take more of them."""
    module, chooser = run()
    default, ddp, times = methods.default().for_run(10_000, 2), methods.dense(), chooser._times
    assert [times.trial_steps(each, seconds=1.0) for each in (ddp, default)] == [7, 16]
    engines[0].registry.optimizers[0].optimizer = torch.optim.AdamW(module.parameters())
    assert [times.trial_steps(each, seconds=1.0) for each in (ddp, default)] == [7, 8]
    assert [times.trial_steps(each, seconds=0.01) for each in (ddp, default)] == [22, 22]


def test_what_fits_is_tried_again_where_what_is_queued_does_not() -> None:
    record = Record("b", queue=["long"], measured={"a": 0.1, "b": 0.11})
    assert record.to_try_next(["a", "b", "long"], left=100) == ["long"]
    assert record.to_try_next(["a", "b"], left=100) == ["a"]
    assert record.to_try_next(["a", "b"], left=30) == []
    assert record.to_try_next(["b"], left=100) == []


class OwnStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def test_local_steps_that_the_run_cannot_make_are_left_out() -> None:
    candidate = methods.dgc(0.1, warmup_steps=0, every=2)
    channel = Channel(Gather(SparseCodec(TopK(0.1), Float16())), [MomentumCorrection(), ErrorFeedback()])
    unclipped = Method([GradientSync(channel, every=2)])

    def usable_of(method: Method, *more: torch.optim.Optimizer) -> bool:
        for optimizer in more:
            engines[-1].register(optimizer)
        return repr(method) in usable.usable({"ddp": methods.dense(), repr(method): method}, engines[-1])

    module, _ = run()
    assert usable_of(candidate)
    assert usable_of(unclipped)
    engines[-1].take_over_clipping(0.5)
    assert usable_of(candidate)
    assert not usable_of(unclipped)
    # Its parameters have an optimizer already.
    assert not usable_of(candidate, torch.optim.SGD(module[1].parameters(), 0.1))  # type: ignore[index]
    run()
    engines[-1].registry.optimizers[0].optimizer.__class__ = OwnStep
    assert not usable_of(candidate)


def test_with_as_many_ranks_it_does_not() -> None:
    _, chooser = run(ranks=2)
    chooser.load_state_dict(state(current="sparsecomm", settled=True, ranks=2))
    chooser.begin()
    assert chooser.record.settled
    assert chooser.link is None


def test_a_single_process_goes_on_as_ddp() -> None:
    _, chooser = run(ranks=1)
    chooser.load_state_dict(state(current="sparsecomm", settled=True, ranks=2))
    chooser.begin()
    assert chooser.record.current == "ddp"
    assert engines[0].registry.in_buckets


def test_when_ddp_is_no_choice_any_more_a_trial_goes_on_without_it() -> None:
    """Also where it was measured before, and the fastest."""
    _, chooser = run()
    chooser.load_state_dict(
        state(current="sparsecomm", queue=["ddp-bf16"], measured={"ddp": 0.01}, predicted={"ddp": 0.01}, history=[{}])
    )
    chooser.begin()
    chooser._waits = True
    decide(chooser)
    assert chooser.record.settled
    assert chooser.record.current == "sparsecomm"
    assert chooser.record.measured.keys() == {"sparsecomm"}
    assert [*chooser.choices] == ["sparsecomm"]


def test_candidates_are_a_list() -> None:
    with pytest.raises(TypeError, match=r"candidates must be a list of methods.*got dgc\(density=0\.01\)"):
        methods.auto(candidates=methods.dgc(0.01))  # type: ignore[arg-type]
