"""One round of each exchange: what is shared, what is sent, and how many bytes that takes."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout, SparseVector, Vector
from lightning_sparsecomm.basis.ledger import link_bytes
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.codecs import (
    Float16,
    Float32,
    Golomb,
    IndexCodec,
    PayloadError,
    RunLength16,
    Runs,
    SparseCodec,
    TopBlocks,
    TopK,
    ValueCodec,
    most_bytes,
)
from lightning_sparsecomm.codecs.payload import seal_length
from lightning_sparsecomm.exchange import BlockReduce, Exchange, Gather, NonFiniteGradientError, SketchedTopK
from tests.distributed.launch import run_ranks

SHAPES = [("table", (40, 6)), ("weight", (8, 25)), ("bias", (5,))]
LAYOUT = Layout(SHAPES)

# These share exactly the mean of what ranks send.
EXACT: dict[str, Exchange] = {
    "blocks": BlockReduce(),
    "top_blocks": BlockReduce(TopBlocks(0.2, 6)),
    "gathered": Gather(SparseCodec(TopK(0.05), indices=RunLength16())),
    "gathered_of_most": Gather(SparseCodec(TopK(0.8), indices=RunLength16())),
    "gathered_blocks": Gather(SparseCodec(TopBlocks(0.2, 6), Float32(), Runs())),
    "sketched_top_k": SketchedTopK(0.05, columns=2000, always_sketch=True),
    "sketched_top_k_float16": SketchedTopK(0.05, columns=2000, wire_dtype="float16", always_sketch=True),
    "sketched_top_k_bfloat16": SketchedTopK(k=20, rows=4, columns=2000, wire_dtype="bfloat16", always_sketch=True),
    "sketched_top_k_of_most": SketchedTopK(0.3),
}
ESTIMATED: dict[str, Exchange] = {
    "sketched_blocks": BlockReduce(TopBlocks(0.2, 6), sketch_ratio=0.5),
    "sketched_blocks_by_rank": BlockReduce(TopBlocks(0.2, 6), sketch_ratio=0.5, rows=3, sized_by="rank"),
    "sketched_blocks_always": BlockReduce(TopBlocks(0.2, 6), sketch_ratio=2.0, always_sketch=True),
}
ALL = {**EXACT, **ESTIMATED}


class Outcome(NamedTuple):
    """What a rank has after a round, as NumPy arrays."""

    x: np.ndarray
    shared: np.ndarray
    sent: np.ndarray
    present: list[bool]
    handed_bytes: int


def gradients_of(rank: int, kind: str) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(rank)
    table = torch.zeros(40, 6)
    # Few rows, some of them on several ranks.
    table[[rank, rank + 1, 3 * rank + 7, 39]] = torch.randn(4, 6, generator=generator)
    weight, bias = torch.randn(8, 25, generator=generator), torch.randn(5, generator=generator)
    if kind == "zeros":
        return [torch.zeros(40, 6), torch.zeros(8, 25), torch.zeros(5)]
    if kind == "one_rank_empty" and rank == 1:
        return [torch.zeros(40, 6), torch.zeros(8, 25), torch.zeros(5)]
    if kind == "some_absent":
        return [None, weight if rank == 0 else None, bias]
    if kind == "nan" and rank == 1:
        weight[3, 4] = float("nan")
    return [table, weight, bias]


def dense(vector: SparseVector | Tensor) -> np.ndarray:
    return (vector.dense() if isinstance(vector, SparseVector) else vector).numpy().copy()


def _round(rank: int, exchange: Exchange, kind: str, step: int = 3) -> Outcome:
    channel, wire = Channel(exchange), Wire()
    channel.bind(LAYOUT, torch.float32, torch.device("cpu"))
    gradients = gradients_of(rank, kind)
    exchanged = channel.reduce(gradients, Round(LAYOUT, step, world_size=wire.world_size, rank=rank), wire)
    x = torch.cat([torch.zeros(s.size) if g is None else g.view(-1) for s, g in zip(LAYOUT.segments, gradients)])
    shared, sent = dense(exchanged.shared), dense(exchanged.sent)
    return Outcome(x.numpy(), shared, sent, list(exchanged.present), wire.ledger.handed_bytes())


KINDS = ("plain", "zeros", "one_rank_empty", "some_absent")


def _rounds(rank: int, exchange: Exchange) -> tuple[dict[str, Outcome], str]:
    outcomes = {kind: _round(rank, exchange, kind) for kind in KINDS}
    with pytest.raises(NonFiniteGradientError) as raised:
        _round(rank, exchange, "nan")
    return outcomes, str(raised.value)


class Gathered(NamedTuple):
    """What a rank has after a gather, as NumPy arrays, and which collective came last."""

    x: np.ndarray
    shared: np.ndarray
    sent: np.ndarray
    link_bytes: float
    collective: str


def _gathered(rank: int, codec: SparseCodec) -> Gathered:
    channel, wire = Channel(Gather(codec)), Wire()
    channel.bind(LAYOUT, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(shape, generator=generator) for _, shape in SHAPES]
    exchanged = channel.reduce(gradients, Round(LAYOUT, world_size=wire.world_size, rank=rank), wire)
    x = torch.cat([gradient.view(-1) for gradient in gradients]).numpy()
    collective = list(wire.ledger.rows["gradients"])[-1]
    return Gathered(x, dense(exchanged.shared), dense(exchanged.sent), wire.ledger.link_bytes(), collective)


@pytest.mark.parametrize(
    ("density", "codec", "collective"),
    [
        # With 3 ranks, an all-gather of 6 bytes per element sent takes 12. An all-reduce of 4 per element takes 5.3.
        (0.4, (Float32(), RunLength16()), "all_gather"),
        (0.5, (Float32(), RunLength16()), "all_reduce"),
        (0.5, (Float16(), RunLength16()), "all_gather"),
        (0.7, (Float16(), RunLength16()), "all_reduce"),
        # The lengths of these are not known beforehand.
        (1.0, (Float32(), RunLength16()), "all_reduce"),
        (0.9, (Float32(), Golomb()), "all_reduce"),
        (0.5, (Float32(), Golomb()), "all_gather"),
    ],
)
def test_a_gather_sends_no_more_than_everything(
    tmp_path: Path, density: float, codec: tuple[ValueCodec, IndexCodec], collective: str
) -> None:
    """Either collective shares the same: the mean of each rank's largest elements, as they decode."""
    lengths = 8 * 2
    most = link_bytes("all_reduce", 4 * (LAYOUT.size + len(SHAPES)), 3) + lengths
    results = run_ranks(tmp_path, 3, _gathered, SparseCodec(TopK(density, "model"), *codec))
    for rank in results:
        assert rank.collective == collective
        assert rank.link_bytes <= most
        assert rank.shared.tobytes() == results[0].shared.tobytes()
        k = round(density * LAYOUT.size)
        largest = np.abs(rank.x) >= np.sort(np.abs(rank.x))[-k]
        values = rank.x.astype(np.float16).astype(np.float32) if isinstance(codec[0], Float16) else rank.x
        np.testing.assert_array_equal(rank.sent, np.where(largest, values, 0))
    np.testing.assert_allclose(
        results[0].shared, np.mean([rank.sent for rank in results], axis=0), rtol=1e-6, atol=1e-7
    )


WORLDS = [pytest.param(size, marks=() if size == 3 else pytest.mark.slow) for size in (2, 3, 4, 5)]


@pytest.mark.few(6)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", ALL)
def test_what_is_shared_and_what_is_sent(tmp_path: Path, name: str, world_size: int) -> None:
    results = run_ranks(tmp_path, world_size, _rounds, ALL[name])
    of = {kind: [outcomes[kind] for outcomes, _ in results] for kind in KINDS}
    for kind, ranks in of.items():
        for rank in ranks:
            assert rank.shared.tobytes() == ranks[0].shared.tobytes(), "not bit-equal"
            # What is sent equals the rank's own elements, to the bit: memories forget just that.
            assert np.array_equal(rank.sent, np.where(rank.sent != 0, rank.x, 0))
        mean = np.mean([rank.sent for rank in ranks], axis=0)
        if name in EXACT:
            np.testing.assert_allclose(ranks[0].shared, mean, rtol=1e-6, atol=1e-7)
        elif kind == "plain":
            assert not np.allclose(ranks[0].shared, mean), "no sketch was used"
    for kind, present in (("plain", True), ("zeros", True), ("some_absent", False)):
        for rank in of[kind]:
            assert rank.present == [present, True, True]
    assert all(rank.sent.any() for rank in of["plain"])
    assert not of["zeros"][0].shared.any()
    assert not of["one_rank_empty"][1].sent.any()
    assert of["one_rank_empty"][0].shared.any()
    assert not of["some_absent"][0].shared[:240].any()
    for _, message in results:
        assert message.startswith("rank 1 has a gradient that is not finite, for parameter 'weight' in step 3.")


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        (SketchedTopK(0.05, columns=50, candidates=4), 4 * (5 * 50 + 3 + 4 * 22)),
        (SketchedTopK(k=10, rows=2, candidates=2.5), 4 * (2 * 100 + 3 + 25)),
        (SketchedTopK(k=10, rows=2, candidates=2, wire_dtype="bfloat16"), 2 * (2 * 100 + 3) + 4 * 20),
    ],
)
def test_a_sketch_costs_the_same_with_any_number_of_ranks(tmp_path: Path, exchange: Any, expected: int) -> None:
    for world_size in (2, 3, 4):
        for rank in run_ranks(tmp_path, world_size, _round, exchange, "plain"):
            assert rank.handed_bytes == expected


def test_a_sketch_never_costs_more_than_everything(tmp_path: Path) -> None:
    for exchange in (
        SketchedTopK(0.3),
        SketchedTopK(k=LAYOUT.size),
        SketchedTopK(0.01, rows=90),
        SketchedTopK(candidates=1e308),
    ):
        for rank in run_ranks(tmp_path, 3, _round, exchange, "plain"):
            assert rank.handed_bytes == 4 * (LAYOUT.size + 3)


def test_bytes_of_blocks(tmp_path: Path) -> None:
    """One bit for each block and two for each tensor, then the elements of the union, or half as many."""
    bitmap = -(-(40 + 8 * 5 + 1 + 2 * 3) // 8)
    for ratio in (None, 0.5, 1.0):
        exchange = BlockReduce(TopBlocks(0.2, 6), ratio)
        ranks = run_ranks(tmp_path, 3, _round, exchange, "plain")
        union = int(np.any([rank.sent != 0 for rank in ranks], axis=0).sum())
        for rank in ranks:
            assert rank.handed_bytes == bitmap + 4 * (-(-union // 2) if ratio == 0.5 else union)
    # Relative to the rank that sends most. All ranks gather counts of 8 bytes, and round the largest up to four
    # significant bits.
    exchange = BlockReduce(TopBlocks(0.2, 6), 0.5, sized_by="rank")
    ranks = run_ranks(tmp_path, 3, _round, exchange, "plain")
    most = max(int((rank.sent != 0).sum()) for rank in ranks)
    unit = 2 ** (most.bit_length() - 4)
    for rank in ranks:
        assert rank.handed_bytes == bitmap + 8 + 4 * -(-most // unit) * unit // 2


class Lying(Wire):
    """Rank 1 sends a wrong number for the length of its payload. The payload itself is never sent."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def all_gather(self, tensor: Tensor, row: str | None = None) -> Tensor:
        assert tensor.dtype == torch.int64, "payloads were made room for"
        return super().all_gather(torch.tensor([self.number]) if self.rank == 1 else tensor, row)


def _lied_to(rank: int, exchange: Exchange, numbers: list[int]) -> list[str]:
    messages = []
    for number in numbers:
        x = torch.cat([gradient.view(-1) for gradient in gradients_of(rank, "plain") if gradient is not None])
        with pytest.raises(PayloadError) as raised:
            exchange.exchange(Vector(x, [True] * 3), Round(LAYOUT, 3, world_size=2, rank=rank), Lying(number))
        messages.append(str(raised.value))
    return messages


MOST = 16 + 1 + 32 + 16 * LAYOUT.size
LENGTHS = [0, 15, MOST + 1, 2**40 - 1]
UNSEALED = [-(2**63), -1, 0, 20, 2**40, 2**63 - 1]


def test_all_ranks_refuse_a_length_that_no_payload_has(tmp_path: Path) -> None:
    assert most_bytes(LAYOUT) == MOST
    exchange = Gather(SparseCodec(TopK(0.05), indices=Golomb()))
    # By rank 1.
    sealed = [seal_length(length, Round(LAYOUT, 3).shared_seed() + 1) for length in LENGTHS]
    for messages in run_ranks(tmp_path, 2, _lied_to, exchange, sealed + UNSEALED):
        for message in messages[len(LENGTHS) :]:
            assert message.startswith("rank 1's payload: the checksum of its length, sent ahead of it, does not match")
        for message, length in zip(messages, LENGTHS):
            assert message.startswith(f"rank 1's payload: length, sent ahead of it, is {length}, expected 16 to {MOST}")


def _search(rank: int, sketch: Exchange, oracle: bool) -> np.ndarray:
    outcome = _round(rank, sketch, "plain")
    if not oracle:
        return outcome.shared
    total = torch.from_numpy(outcome.x)
    Wire().all_reduce_(total)
    total /= 3
    total[total.abs() < total.abs().topk(22).values.min()] = 0
    return total.numpy()


def test_a_sketch_large_enough_finds_the_true_top_k(tmp_path: Path) -> None:
    found = run_ranks(tmp_path, 3, _search, SketchedTopK(0.05, columns=5000, always_sketch=True), False)
    expected = run_ranks(tmp_path, 3, _search, SketchedTopK(0.05), True)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6, atol=0)


def _huge(rank: int, wire_dtype: Any) -> np.ndarray:
    x = torch.zeros(LAYOUT.size)
    x[7], x[100] = 3e4, 6e4
    exchange = SketchedTopK(k=1, columns=50, wire_dtype=wire_dtype)
    channel = Channel(exchange)
    channel.bind(LAYOUT, torch.float32, torch.device("cpu"))
    return dense(channel.reduce(LAYOUT.views(x), Round(LAYOUT, world_size=3, rank=rank), Wire()).shared)


@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16", "same"])
def test_half_precision_does_not_overflow(tmp_path: Path, wire_dtype: str) -> None:
    for shared in run_ranks(tmp_path, 3, _huge, wire_dtype):
        assert np.isfinite(shared).all()
        assert shared.sum() in (np.float32(6e4), np.float32(3e4))


def _estimates(rank: int, steps: int) -> np.ndarray:
    total = np.zeros(LAYOUT.size)
    for step in range(steps):
        total += _round(rank, BlockReduce(TopBlocks(1.0), 0.5), "plain", step).shared
    return total / steps


def test_estimates_are_unbiased_since_hashes_change(tmp_path: Path) -> None:
    """With half as many columns as elements an estimate's variance is twice the mean energy, but its mean is exact."""
    steps = 400
    (exact, _) = run_ranks(tmp_path, 2, _round, BlockReduce(), "plain")
    (mean, _) = run_ranks(tmp_path, 2, _estimates, steps)
    energy = float((exact.shared**2).sum())
    columns = 0.5 * int((exact.shared != 0).sum())
    deviations = (mean - exact.shared)[exact.shared != 0] / np.sqrt(energy / columns / steps)
    # About two hundred nearly independent numbers of unit variance.
    assert abs(deviations.mean()) < 3 / np.sqrt(len(deviations)) * 2
    assert 0.7 < deviations.std() < 1.2
    assert np.abs(deviations).max() < 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockReduce(sketch_ratio=0), "sketch_ratio must be a positive number.*got 0.*None to send the blocks"),
        (lambda: BlockReduce(sketch_ratio=float("inf")), "sketch_ratio must be a positive number.*got inf"),
        (lambda: BlockReduce(rows=0), "rows must be .*at least 1.*got 0"),
        (lambda: BlockReduce(sized_by="all"), "sized_by must be 'union'.*or 'rank'.*got 'all'"),
        (lambda: SketchedTopK(0.0), "density must be in .*got 0.0"),
        (lambda: SketchedTopK(k=0), "k must be a whole number, at least 1.*got 0"),
        (lambda: SketchedTopK(rows=0), "rows must be .*at least 1.*got 0"),
        (lambda: SketchedTopK(columns=0), "columns must be .*at least 1.*got 0"),
        (lambda: SketchedTopK(candidates=0.5), "candidates must be at least 1.*got 0.5.*16 to 36"),
        (lambda: SketchedTopK(wire_dtype="int8"), "wire_dtype must be one of same, float16, bfloat16; got 'int8'"),
        (lambda: SketchedTopK(0.1, k=5), "density and k both say how many.*got 0.1 and 5. Give one"),
        (lambda: BlockReduce(always_sketch=True), "always_sketch=True needs a sketch; got sketch_ratio=None"),
    ],
)
def test_refuses(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_no_more_elements_than_there_are() -> None:
    assert SketchedTopK(k=LAYOUT.size).objection(LAYOUT) is None
    objection = SketchedTopK(k=LAYOUT.size + 1).objection(LAYOUT) or ""
    assert objection.startswith("k must be at most the 445 elements that are exchanged with it; got 446. Give a dens")
