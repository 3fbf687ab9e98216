"""The cost model and the choice that follows from it."""

import json
import math
import re
from typing import Any

import pytest

from lightning_sparsecomm import __version__, methods
from lightning_sparsecomm.basis.ledger import link_bytes
from lightning_sparsecomm.commands import main
from lightning_sparsecomm.planning import Network, Plan, Rehearsed, Work, plan, planner, predict, square_layers
from lightning_sparsecomm.planning.planner import optimizer_for

EXACT = {"call": 0.0, "copying": 0.0}


def buckets(*sizes: float) -> Rehearsed:
    calls = tuple(("all_reduce", size, 1.0) for size in sizes)
    return Rehearsed("dense()", 2, {"update": 0.0}, calls, 0.0, overlaps=True)  # type: ignore[arg-type]


def gathered(size: float, computing: float = 0.0) -> Rehearsed:
    return Rehearsed("dgc()", 2, {"select": computing}, (("all_gather", size, 1.0),), 0.0, overlaps=False)


def test_buckets_hide_behind_the_backward_pass() -> None:
    fast = Network(8e9, **EXACT)
    row = predict(buckets(25e6, 25e6, 25e6), fast, Work(3.0))
    # Only the last bucket is waited for.
    assert row.exposed == pytest.approx(fast.seconds("all_reduce", 25e6, 2))
    assert row.bound == "compute"
    slow = Network(80e6, **EXACT)
    row = predict(buckets(25e6, 25e6, 25e6), slow, Work(3.0, overlapped=2.0))
    assert row.exposed == pytest.approx(slow.seconds("all_reduce", 75e6, 2) - 2.0)
    assert row.bound == "network"
    assert row.seconds == pytest.approx(3.0 + row.exposed)


def test_a_model_in_which_nothing_is_trained_has_a_step_too() -> None:
    assert predict(buckets(), Network(8e9, **EXACT), Work(3.0)).seconds == 3.0


def test_an_exchange_at_the_step_is_waited_for() -> None:
    network = Network(8e6, **EXACT)
    row = predict(gathered(1e6, computing=0.5), network, Work(3.0, straggler=1.2))
    assert row.seconds == pytest.approx(3.6 + 0.5 + network.seconds("all_gather", 1e6, 2))


def test_a_window_that_closes_while_ranks_compute_opens_once_in_an_exchange() -> None:
    network = Network(1e9, rtt=0.1, **EXACT)
    calls: list[Any] = [("all_gather", 8.0, 1.0), ("all_gather", 1e6, 1.0), ("all_gather", 2e5, 1.0)]
    rehearsed = Rehearsed("", 2, {"select": 0.1}, tuple(calls), 0.0, overlaps=False)
    at_once = sum(network.seconds(kind, size, 2, idle=0.0) for kind, size, _ in calls)
    assert predict(rehearsed, network, Work(0.05)).exposed == pytest.approx(at_once + 0.1 * 0.15 / 0.3)
    # Two time-outs, of a round trip and 200 ms each.
    assert predict(rehearsed, network, Work(0.5)).exposed == pytest.approx(at_once + 0.2)
    # An exchange in every fourth step: the network is idle for four steps before it.
    rarely = Rehearsed("", 2, {"select": 0.1}, tuple((*call, 0.25) for *call, _ in calls), 0.0, overlaps=False)
    opening = network.seconds("all_gather", 1e6, 2, idle=2.4) - network.seconds("all_gather", 1e6, 2, idle=0.0)
    assert predict(rarely, network, Work(0.5)).exposed == pytest.approx((at_once + opening) / 4)
    # Where it is not known what a rank computes, the window may be closed.
    closed = network.seconds("all_gather", 1e6, 2) - network.seconds("all_gather", 1e6, 2, idle=0.0)
    assert predict(rehearsed, network, Work(0.0)).exposed == pytest.approx(at_once + closed)


def test_ddps_sums_find_tcps_window_closed_only_at_first() -> None:
    network = Network(1e9, rtt=0.1, **EXACT)

    def sums(size: float, idle: float = 0.0) -> float:
        return network.seconds("all_reduce", size, 2, ring=True, idle=idle)

    row = predict(buckets(24e6, 1e6), network, Work(0.9, overlapped=0.3))
    # A thread sums the first one, and another the second meanwhile, which delays it a little.
    assert sums(24e6) - 0.3 < row.exposed < sums(24e6) - 0.29
    # Where it is not known what a rank computes, these may be the first sums.
    first = predict(buckets(24e6, 1e6), network, Work(0.0, overlapped=0.3))
    assert first.network - row.network == pytest.approx(sums(24e6, math.inf) - sums(24e6))
    # Of the last bucket: a larger one has opened the window, a smaller one has not, and none has.
    for sizes, idle in (((25e6, 1e6), 0.0), ((1e6, 2e6), math.inf), ((1e6,), math.inf)):
        assert predict(buckets(*sizes), network, Work(0.0, overlapped=9)).exposed == pytest.approx(
            sums(sizes[-1], idle)
        )


@pytest.mark.parametrize(
    ("rtt", "sizes", "measured"),
    [
        (0.02, [9.5e6, 26.5e6, 8.7e6], 0.523),
        (0.02, [4.75e6, 13.25e6, 4.35e6], 0.297),
        (0.02, [33.8e6, 9.1e6], 0.581),
        (0.02, [16.9e6, 4.55e6], 0.307),
        (0.1, [9.5e6, 26.5e6, 8.7e6], 1.533),
        (0.1, [4.75e6, 13.25e6, 4.35e6], 0.875),
        (0.1, [33.8e6, 9.1e6], 1.950),
    ],
)
def test_sums_at_a_time_delay_each_other_by_as_much_as_was_measured(
    rtt: float, sizes: list[float], measured: float
) -> None:
    """Two ranks behind cables of 1 Gbit/s, of which a sum without latency reached 0.87; docs/network.md."""
    assert Network(870e6, rtt).buckets_seconds(sizes, 2) == pytest.approx(measured, rel=0.13)


def test_two_buckets_are_summed_at_a_time() -> None:
    for sizes, alone in (((12e6, 30e6, 9e6), [30e6]), ((30e6, 12e6, 9e6, 9e6), [12e6, 9e6, 9e6])):
        far = Network(math.inf, rtt=0.1, call=0.0, copying=0.0)
        taken = sum(far.seconds("all_reduce", size, 4, ring=True, idle=0.0) for size in alone)
        assert far.buckets_seconds(sizes, 4) == pytest.approx(taken)
        # A link that they fill takes all their bytes, and so does one without length.
        for rtt in (0.0, 0.01):
            slow = Network(10e6, rtt=rtt, call=0.0)
            taken = 8 * link_bytes("all_reduce", sum(sizes), 4) / 10e6 * 1538 / 1448
            assert slow.buckets_seconds(sizes, 4) == pytest.approx(taken, rel=0.01)
    assert Network(10e6, rtt=0.1).buckets_seconds([1e6], 1) == 0


def planned(bandwidth: float, rtt: float = 0.0, compute: float = 0.1, **options: object) -> Plan:
    parameters = square_layers(2_000_000)
    kinds = [(optimizer_for("sgd", parameters), parameters)]
    candidates = {"sbc": methods.sbc(), "local_adam": methods.local_adam()}
    network = Network(bandwidth, rtt)
    return plan(kinds, 4, network, Work(compute), 1000, candidates=candidates, **options)  # type: ignore[arg-type]


def test_a_fast_network_needs_no_compression() -> None:
    result = planned(40e9)
    # What rounding saves and what it costs is about the same here.
    assert result.choice in ("ddp", "ddp-bf16")
    assert planned(40e9, quality="exact").reason().startswith("Use ddp: its step takes ")


def test_a_slow_network_does() -> None:
    result = planned(20e6)
    assert result.choice == "sparsecomm"
    assert "times fewer bytes" in result.reason()
    assert list(result.rows) == sorted(result.rows, key=lambda name: result.rows[name].seconds)
    assert result.refused.keys() == {"local_adam"}


def test_what_is_too_large_for_training_is_too_large_for_a_plan() -> None:
    parameters = square_layers(8_000_000_000)
    kinds = [(optimizer_for("sgd", parameters), parameters)]
    candidates = {"in one": methods.diloco(), "in four": methods.streaming_diloco(fragments=4)}
    result = plan(kinds, 4, Network(1e9), Work(3.0), 1000, candidates=candidates)
    assert result.choice == "ddp-bf16"
    assert result.refused.keys() == {"sparsecomm", "in one"}
    assert "at most 4,294,967,295 elements together" in result.refused["sparsecomm"]


def test_a_method_that_cannot_work_between_so_many_ranks_is_left_out() -> None:
    parameters = square_layers(100_000)
    kinds = [(optimizer_for("sgd", parameters), parameters)]
    result = plan(
        kinds, 40_000, Network(1e9), Work(1.0), 1000, quality="exact", candidates={"terngrad": methods.terngrad()}
    )
    assert result.refused.keys() == {"terngrad"}
    assert "got 40000. Use fewer ranks" in result.refused["terngrad"]


@pytest.mark.parametrize(("quality", "choice"), [("exact", "ddp"), ("rounded", "ddp-bf16")])
def test_quality_limits_the_choice(quality: str, choice: str) -> None:
    result = planned(20e6, quality=quality)
    assert result.choice == choice
    # Faster ones are shown, and not chosen.
    assert result.rows["sbc"].seconds < result.rows[choice].seconds


def test_the_default_is_planned_in_its_form_for_the_runs_length() -> None:
    """In a run of 3,000 steps by SGD it exchanges in every second one."""
    parameters = square_layers(100_000)
    kinds = [(optimizer_for("sgd", parameters), parameters)]
    candidates = {"each": methods.default(every=1), "second": methods.default(every=2, residual_in_weights=True)}
    rows = plan(kinds, 2, Network(1e9, rtt=0.1), Work(0.05), length=3000, candidates=candidates).rows
    assert rows["sparsecomm"].link_bytes == rows["second"].link_bytes
    assert rows["sparsecomm"].exposed < 0.7 * rows["each"].exposed


@pytest.mark.parametrize(("ranks", "form"), [(4, "second"), (5, "each")])
def test_the_default_is_planned_in_its_form_for_the_ranks(ranks: int, form: str) -> None:
    """By Adam, more than four exchange in each step."""
    parameters = square_layers(100_000)
    kinds = [(optimizer_for("adamw", parameters), parameters)]
    forms = {"each": 1, "second": 2}
    candidates = {name: methods.default(every=every, residual_in_weights=True) for name, every in forms.items()}
    rows = plan(kinds, ranks, Network(1e9), Work(0.05), length=3000, candidates=candidates).rows
    assert rows["sparsecomm"].link_bytes == rows[form].link_bytes
    assert rows["each"].link_bytes != rows["second"].link_bytes


def test_an_unknown_quality_is_refused() -> None:
    with pytest.raises(ValueError, match="quality must be one of exact, rounded, trained; got 'good'"):
        planned(20e6, quality="good")


COMMAND = ["plan", "--parameters", "1M", "--ranks", "4", "--bandwidth", "20mbit", "--compute", "50ms"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main([*COMMAND, "--rtt", "20ms", "--steps", "1k"])
    shown = capsys.readouterr().out
    assert "* sparsecomm" in shown
    assert "Use sparsecomm: a step of" in shown
    assert "Left out: local_adam" in shown
    # Others that may be chosen, and those that may not.
    assert "+ ddp " in shown
    assert "  dgc " in shown
    assert "Without --steps" not in shown


def test_on_a_terminal_the_command_says_what_it_rehearses_and_that_the_processor_is_busy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "known", lambda: {"dgc": methods.dgc(), "sbc": methods.sbc()})
    monkeypatch.setattr("time.thread_time", lambda: 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    main([*COMMAND, "--quality", "exact"])
    shown, said = capsys.readouterr()
    counts = re.findall(r"\r\x1b\[K(\d+) of (\d+): \w", said)
    assert [int(number) for number, _ in counts] == list(range(1, int(counts[0][1]) + 1))
    assert "+ " not in shown.partition("\n\n")[0]
    assert "other work has taken the processor (0% was left for rehearsals)" in said
    assert "Without --steps, sparsecomm is planned for a run of unknown length: it sends as one of 5,000." in shown


def test_a_command_that_is_misspelt_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["reprot", "reports"])
    assert "'reprot' is no command. Did you mean 'report'? Commands: plan, probe," in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"lightning_sparsecomm {__version__}\n"


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = {name: recipe() for name, recipe in methods.RECIPES.items() if name in ("dgc", "sketched_sgd", "signsgd")}
    monkeypatch.setattr(planner, "known", lambda: recipes)
    main([*COMMAND, "--optimizer", "adamw", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["choice"] in result["rows"]
    assert result["rows"]["ddp"]["link_bytes"] == pytest.approx(1.5 * 4e6, rel=0.02)
    assert result["refused"].keys() == {"dgc", "sketched_sgd", "signsgd"}


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--bandwidth", "20", "--bandwidth must be .*got '20'. Write 100mbit"),
        ("--rtt", "20", "--rtt must be .*got '20'. Write 20ms"),
        ("--ranks", "0", "--ranks must be at least 1; got 0. Give"),
        ("--straggler", "0.5", "--straggler must be at least 1, and finite; got 0.5"),
        ("--straggler", "nan", "--straggler must be at least 1, and finite; got nan"),
        ("--straggler", "inf", "--straggler must be at least 1, and finite; got inf"),
        ("--compute", "1,5s", "--compute must be .*got '1,5s'. Write 20ms"),
    ],
)
def test_the_command_refuses(option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*COMMAND, option, value])
    error = capsys.readouterr().err
    assert re.search(words, error)
    if option == "--ranks":
        assert "rehearsing" not in error


def test_the_table_is_narrow_and_aligned() -> None:
    lines = planned(20e6).table().splitlines()
    rows = lines[: lines.index("")]
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= 120
    # Each column ends where its header does.
    headers = r"step(?= )|by ddp's|compute|coding|waiting|per step|kept|bound by"
    ends = [match.end() for match in re.finditer(headers, rows[0])]
    assert len(ends) == 8
    assert all(row[end - 1] != " " and row[end : end + 2] in ("  ", "") for row in rows for end in ends)


def test_a_single_rank_that_computes_nothing_has_a_plan() -> None:
    parameters = square_layers(1000)
    result = plan([(optimizer_for("sgd", parameters), parameters)], 1, Network(1e9), Work(0.0), quality="exact")
    assert result.choice == "ddp"
    assert "Use ddp" in result.table()


def test_frozen_parameters_are_not_planned_for() -> None:
    parameters = square_layers(100_000)
    for _, parameter in parameters[2:]:
        parameter.requires_grad_(False)
    optimizer = optimizer_for("sgd", parameters)
    result = plan([(optimizer, parameters)], 2, Network(1e9), Work(0.1), quality="exact", candidates={})
    assert result.rows["ddp"].link_bytes == sum(parameter.nbytes for _, parameter in parameters[:2])
    for _, parameter in parameters:
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="kinds must hold a parameter that requires a gradient; got none"):
        plan([(optimizer, parameters)], 2, Network(1e9), Work(0.1))
