"""The laws for each method and each way of using DDP, on Gloo with two and three processes."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.channel import Channel, ClipLocalNorm, ErrorFeedback
from lightning_sparsecomm.codecs import SparseCodec, TiledDCT, TileTopK
from lightning_sparsecomm.codecs.selectors.candidates import HintedSelector
from lightning_sparsecomm.exchange import Sparse, SparseExchange, Transformed
from lightning_sparsecomm.methods import (
    adacomp,
    aligned_topk,
    dense,
    dgc,
    dryden,
    ef21,
    ef_signsgd,
    gradient_dropping,
    natural,
    ok_topk,
    omnireduce,
    onebit_sgd,
    parallax,
    powersgd,
    qsgd,
    quantized,
    random_k,
    s2_reducer,
    signsgd,
    sketched_sgd,
    sparcml,
    strom,
    terngrad,
)
from lightning_sparsecomm.sharing import GradientSync, Method
from tests import laws
from tests.distributed.recording import Recording, recorded
from tests.distributed.scenarios import SCENARIOS, Classifier, Scenario, fit, without_momentum
from tests.distributed.summed import in_regions

# One scenario of each kind. The others run with the slow tests.
KINDS = ("plain", "accumulation", "batch_norm", "adversarial", "several_backwards", "unused_by_turns", "bf16_mixed")


def quick_and_slow(names: Iterable[str], quick: Sequence[str] = KINDS) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


# The number of ranks changes sums, but not how ddp is used.
WITH_THREE = ("plain", "unused_by_turns")
SIZES = [
    pytest.param(*each.values, ranks, marks=each.marks)
    for ranks, quick in ((2, (*KINDS, "clip_norm", "unused_everywhere")), (3, WITH_THREE))
    for each in quick_and_slow(SCENARIOS, quick)
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "world_size"), SIZES)
def test_full_density_equals_ddp(tmp_path: Path, name: str, world_size: int) -> None:
    scenario = SCENARIOS[name]
    ddp = fit(tmp_path / "ddp", scenario, world_size)
    laws.trained(scenario.model().state_dict(), ddp[0])
    laws.replicas_are_equal(ddp)

    ours = fit(tmp_path / "dense", scenario, world_size, dense())
    if world_size == 2:
        for rank in range(world_size):
            laws.bit_equal(ours[rank], ddp[rank])
    else:
        laws.equal_to_round_off(ours[0], ddp[0], scenario.tolerance)
    laws.replicas_are_equal(ours)

    ours = fit(tmp_path / "sparse", scenario, world_size, gradient_dropping(density=1.0))
    # Buffers too, on every rank: rank 0 broadcasts them whenever ddp would.
    for rank in range(world_size):
        laws.equal_to_round_off(ours[rank], ddp[rank], scenario.tolerance)
    laws.replicas_are_equal(ours)


METHODS: dict[str, Method] = {
    "model": gradient_dropping(follow_rate=False, density=0.05),
    "tensor_float16": gradient_dropping(follow_rate=False, density=0.05, scope="tensor", values="float16"),
    "exclude": gradient_dropping(follow_rate=False, density=0.05, exclude=["*.bias"]),
    "regions": in_regions(gradient_dropping(follow_rate=False, density=0.05)),
    "s2_reducer": s2_reducer(block_density=0.2, block_size=8, follow_rate=False),
    "sketched_sgd": sketched_sgd(0.05, columns=40, candidates=4, momentum_correction=False, follow_rate=False),
    "powersgd": powersgd(rank=2, follow_rate=False),
    "random_k": random_k(0.05, follow_rate=False),
    "ok_topk": ok_topk(0.05, values="float16", follow_rate=False),
    "aligned_topk": aligned_topk(0.05, block_size=8, follow_rate=False),
    "quantized": quantized(bits=4, follow_rate=False),
    "onebit_sgd": onebit_sgd(follow_rate=False),
    "ef_signsgd": ef_signsgd(follow_rate=False),
    "by norm": gradient_dropping(follow_rate=False, density=0.05, scope="norm"),
    "by entropy": gradient_dropping(follow_rate=False, density=0.05, scope="entropy", values="float16"),
    "strom": strom(0.001, follow_rate=False),
    "strom, once": strom(0.001, once=True, follow_rate=False),
    "dryden": dryden(0.05, follow_rate=False),
    "adacomp": adacomp(bin_size=50, follow_rate=False),
    "qsgd": qsgd(),
    "terngrad": terngrad(),
    "natural": natural(),
    "signsgd": signsgd(),
    "cosines": Method(
        [
            GradientSync(
                Channel(
                    Transformed(Sparse(SparseCodec(TileTopK(2, side=8))), TiledDCT(side=8)),
                    [ErrorFeedback(follow_rate=False)],
                )
            )
        ]
    ),
    "parallax": parallax(tables=["*"]),
    "omnireduce": omnireduce(block_density=0.2, block_size=8, follow_rate=False),
    "sparcml": sparcml(0.05, bucket=64, follow_rate=False),
    "heavymix": sketched_sgd(0.05, columns=40, momentum_correction=False, follow_rate=False, recovery="heavymix"),
}

# dgc clips each rank's own gradient, and not the mean, so two scenarios train differently. It refuses to clip by value.
NOT_CLIPPING = [name for name in SCENARIOS if name not in ("clip_norm", "clip_value", "several_backwards")]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        pytest.param(*each.values, recipe, marks=each.marks)
        for recipe, quick in (
            (dgc, KINDS),
            (sketched_sgd, ("unused_by_turns",)),
            (ef21, ("unused_by_turns",)),
            (partial(ef21, momentum_correction=False), ("unused_by_turns",)),
        )
        for each in quick_and_slow(NOT_CLIPPING, quick)
    ],
)
def test_momentum_correction_at_full_density_equals_ddp(tmp_path: Path, name: str, recipe: Any) -> None:
    """With everything else at its default."""
    world_size = 2
    scenario = SCENARIOS[name]
    ddp = fit(tmp_path / "ddp", scenario, world_size)
    ours = fit(tmp_path / "ours", scenario, world_size, recipe(density=1.0))
    laws.trained(scenario.model().state_dict(), ours[0])
    laws.replicas_are_equal(ours)
    for rank in range(world_size):
        laws.equal_to_round_off(ours[rank], ddp[rank], scenario.tolerance)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", quick_and_slow(SCENARIOS, ("plain", "unused_by_turns", "bf16_mixed")))
def test_factors_that_are_no_shorter_equal_ddp(tmp_path: Path, name: str) -> None:
    """At its largest rank PowerSGD sends everything whole; with everything else at its default."""
    scenario = SCENARIOS[name]
    ddp = fit(tmp_path / "ddp", scenario, 2)
    ours = fit(tmp_path / "ours", scenario, 2, powersgd(rank=1000))
    laws.trained(scenario.model().state_dict(), ours[0])
    laws.replicas_are_equal(ours)
    for rank in range(2):
        laws.equal_to_round_off(ours[rank], ddp[rank], scenario.tolerance)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", quick_and_slow(name for name in SCENARIOS if name != "clip_value"))
def test_dgc_obeys_the_laws(tmp_path: Path, name: str) -> None:
    """Without momentum and clipping, what is sent plus the residual is the sum of the rank's gradients."""
    scenario = SCENARIOS[name]
    ranks = fit(
        tmp_path,
        scenario,
        3,
        recorded(dgc(density=0.05, warmup_steps=8, follow_rate=False)),
        model=without_momentum(scenario),
    )
    laws.trained(scenario.model().state_dict(), ranks[0])
    laws.replicas_are_equal(ranks)
    laws.shared_is_bit_equal(ranks)
    if name not in ("clip_norm", "several_backwards"):
        for rank in ranks:
            laws.sent_plus_residual_is_compensated(rank, memory=-1)


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param(method, *each.values, marks=each.marks)
        for method in METHODS
        for each in quick_and_slow(
            NOT_CLIPPING if any(parts_in(METHODS[method], ClipLocalNorm)) else SCENARIOS,
            KINDS if method == "model" else ("adversarial",),
        )
    ],
)
def test_sparse_methods_obey_the_laws(tmp_path: Path, name: str, method: str) -> None:
    world_size = 3 if method == "model" else 2
    ranks = fit(tmp_path, SCENARIOS[name], world_size, recorded(METHODS[method]))
    laws.trained(SCENARIOS[name].model().state_dict(), ranks[0])
    laws.replicas_are_equal(ranks)
    laws.shared_is_bit_equal(ranks)
    if keeps_what_it_does_not_send(METHODS[method]):
        for rank in ranks:
            laws.sent_plus_residual_is_compensated(rank, memory=-1)


def keeps_what_it_does_not_send(method: Method) -> bool:
    """Others round, without bias or with, and keep nothing."""
    channels = [sync.channel for sync in method.syncs if isinstance(sync, GradientSync)]
    return any(isinstance(memory, ErrorFeedback) for channel in channels for memory in channel.memories)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("correction", "name"),
    [
        pytest.param(correction, *each.values, marks=each.marks)
        for correction in (True, False)
        for each in quick_and_slow(NOT_CLIPPING, ("unused_by_turns",))
    ],
)
def test_ef21_obeys_the_laws(tmp_path: Path, name: str, correction: bool) -> None:
    ranks = fit(tmp_path, SCENARIOS[name], 3, recorded(ef21(0.05, momentum_correction=correction)))
    laws.trained(SCENARIOS[name].model().state_dict(), ranks[0])
    laws.replicas_are_equal(ranks)
    laws.shared_is_bit_equal(ranks)
    laws.estimates_are_what_was_sent(ranks)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", quick_and_slow(METHODS, ("model", "sketched_sgd", "random_k")))
def test_a_recorder_hides_nothing(tmp_path: Path, name: str) -> None:
    """So the laws hold for what users run: overlap, candidates noted by memories, sparse vectors."""
    plain, noting = METHODS[name], recorded(METHODS[name])
    for ours, theirs in zip(noting.syncs, plain.syncs, strict=True):
        assert isinstance(ours, GradientSync) and isinstance(theirs, GradientSync)
        mine, other = ours.channel.exchange, theirs.channel.exchange
        assert isinstance(mine, Recording)
        assert mine.overlaps == other.overlaps
        assert isinstance(mine, SparseExchange) == isinstance(other, SparseExchange)
        selectors = [list(parts_in(each, HintedSelector)) for each in (mine, other)]  # type: ignore[type-abstract]
        assert selectors[0] == selectors[1]
    scenario = Scenario(Classifier, steps=6)
    both = [fit(tmp_path / str(index), scenario, 2, method)[0] for index, method in enumerate((noting, plain))]
    laws.bit_equal(*both)
    counted = [(ending["ledger"].rows, ending["ledger"].sent_elements) for ending in both]
    assert counted[0] == counted[1]
