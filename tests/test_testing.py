"""The laws for other people's parts: ours obey them, and parts with one fault each do not."""

import inspect
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparsecomm import Channel, ErrorFeedback, GradientSync, Method, methods
from lightning_sparsecomm.basis import Layout, Round, SparseVector, Vector, Wire
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.channel import (
    EF21,
    AdamMoments,
    Contribution,
    Memory,
    Momentum,
    MomentumCorrection,
    SharedSign,
)
from lightning_sparsecomm.codecs import (
    INDEX_CODECS,
    VALUE_CODECS,
    AdaptiveBins,
    Auto,
    BFloat16,
    Bitmap,
    ChunkTopK,
    Compressor,
    Float16,
    Float32,
    Golomb,
    IndexCoding,
    LayerwiseTopK,
    Multiples,
    OneBit,
    OneSidedTopK,
    PowersOfTwo,
    Raw32,
    Runs,
    Selector,
    SharedMean,
    ShortThreeBit,
    SignedMeans,
    SignMeans,
    SparseCodec,
    StochasticLevels,
    ThreeBit,
    Threshold,
    TiledDCT,
    TileTopK,
    TopBlocks,
    TopK,
    TwoBit,
    TwoSidedTopK,
    ValueCodec,
    register_index_codec,
    register_value_codec,
)
from lightning_sparsecomm.exchange import (
    BlockReduce,
    ClientMean,
    CompressedAllReduce,
    DenseAllReduce,
    Exchange,
    Exchanged,
    Gather,
    GatherNonZero,
    MajorityVote,
    OkTopK,
    PlainExchange,
    PowerSGD,
    QuantizedAllReduce,
    RegionSum,
    SketchedTopK,
    Sparse,
    Staged,
    TernarySum,
    Transformed,
)
from lightning_sparsecomm.testing import (
    RankError,
    check_compressor,
    check_exchange,
    check_index_codec,
    check_memory,
    check_method,
    check_selector,
    check_value_codec,
    run_ranks,
)

# -- ours


@pytest.mark.parametrize(
    "selector",
    [
        TopK(0.1),
        TopK(0.1, "tensor"),
        OneSidedTopK(0.1),
        ChunkTopK(0.1, 16),
        TileTopK(2, 3),
        Threshold(0.5),
        TwoSidedTopK(0.1),
        LayerwiseTopK(0.1),
        LayerwiseTopK(0.1, by="entropy"),
    ],
    ids=repr,
)
def test_our_selectors(selector: Selector) -> None:
    check_selector(selector)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("codec", "tolerance"),
    [
        (Float32(), 0),
        (Float16(), 1e-3),
        (SharedMean(), 2),
        (TwoBit(3), 1),
        (ThreeBit(3), 1),
        (ShortThreeBit(3), 1),
        (OneBit(3), 2),
        (SignedMeans(1), 1),
        (SignedMeans(2), 1),
    ],
    ids=repr,
)
def test_our_value_codecs(codec: ValueCodec, tolerance: float) -> None:
    check_value_codec(codec, tolerance)


@pytest.mark.parametrize("coding", [*INDEX_CODECS.values(), Auto()], ids=repr)
def test_our_index_codecs(coding: IndexCoding) -> None:
    check_index_codec(coding)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("compressor", "tolerance"),
    [
        (SparseCodec(TopK(0.1)), 0),
        (SparseCodec(TopBlocks(0.1, 6), TwoBit(), Runs()), 1),
        # An element may be rounded to the next multiple of its bucket's norm.
        (StochasticLevels(15), 1.5),
        (StochasticLevels(3, 7, "max"), 1 / 3),
        (PowersOfTwo(), 1),
        (SignMeans(), 1),
        (SignMeans("column", 2), 1),
        (SparseCodec(Threshold(0.5), Multiples(0.5), Auto()), 1),
        (SparseCodec(TwoSidedTopK(0.1), SignedMeans(), Golomb()), 1),
        (AdaptiveBins(20, 7, all_bins=False), 1),
    ],
    ids=repr,
)
def test_our_compressors(compressor: Compressor, tolerance: float) -> None:
    check_compressor(compressor, tolerance)


EXCHANGES: dict[str, tuple[Callable[[], Exchange], float | None]] = {
    "gather": (lambda: Gather(SparseCodec(TopK(0.1))), 1e-5),
    "gather of any length": (lambda: Gather(SparseCodec(TopK(0.1), Float16(), Golomb())), 1e-5),
    "regions": (lambda: RegionSum(SparseCodec(TopK(0.1))), 1e-5),
    "ok_topk": (lambda: OkTopK(SparseCodec(TopK(0.1))), 1e-5),
    "sparse": (lambda: Sparse(SparseCodec(TopK(0.3), Float32(), Golomb())), 1e-5),
    "dense": (DenseAllReduce, 1e-5),
    "dense, rounded": (lambda: DenseAllReduce("bfloat16"), 1e-2),
    "blocks": (lambda: BlockReduce(TopBlocks(0.2, 6)), 1e-5),
    "sketch": (lambda: SketchedTopK(0.05, columns=300, always_sketch=True), None),
    "compressed": (lambda: CompressedAllReduce(SparseCodec(TopK(0.3), Float32(), Golomb())), 1e-5),
    "compressed, everything": (lambda: CompressedAllReduce(SparseCodec(TopK(1.0))), 1e-5),
    "quantized": (QuantizedAllReduce, 1e-2),
    "quantized, 4 bits": (lambda: QuantizedAllReduce(4, 6), 1e-1),
    "cosines": (lambda: Transformed(Sparse(SparseCodec(TileTopK(2, 3))), TiledDCT(3)), 1e-5),
    "cosines, summed": (lambda: Transformed(OkTopK(SparseCodec(TopK(0.2))), TiledDCT(3)), 1e-5),
    "power sgd": (lambda: PowerSGD(2), 1e-5),
    "levels": (lambda: Gather(StochasticLevels()), 1e-5),
    "signs": (lambda: Gather(SignMeans("column", 2)), 1e-5),
    "bins": (lambda: Gather(AdaptiveBins(20)), 1e-5),
    "non-zero": (GatherNonZero, 1e-5),
    "non-zero, rounded, or all": (lambda: GatherNonZero(BFloat16(), may_reduce=True), 1e-2),
    "clients": (lambda: ClientMean(0.5), None),
    "heavymix": (lambda: SketchedTopK(0.05, columns=300, recovery="heavymix"), 1e-5),
    "staged": (lambda: Staged(DenseAllReduce(), CompressedAllReduce(SignMeans()), steps=2), 1e-5),
    "ternary": (TernarySum, 1e-5),
    "vote": (MajorityVote, None),
    "power sgd, in groups": (lambda: PowerSGD(3, dense_steps=1, group_elements=1), 1e-5),
    "power sgd, drawn anew": (lambda: PowerSGD(1, warm_start=False), 1e-5),
}


# One of each kind; the others run with the slow tests.
QUICK = ("gather", "regions", "staged", "blocks", "compressed", "quantized", "power sgd, in groups", "ternary")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EXCHANGES]
)
def test_our_exchanges(name: str) -> None:
    factory, tolerance = EXCHANGES[name]
    # The sketch's kernels may have to be compiled.
    check_exchange(factory, tolerance=tolerance, timeout=110)


def test_one_rank_is_enough() -> None:
    check_exchange(lambda: Gather(SparseCodec(TopK(0.1))), world_size=1)


MEMORIES = [ErrorFeedback, MomentumCorrection, Momentum, EF21, SharedSign]


@pytest.mark.few(2)
@pytest.mark.parametrize("memory", MEMORIES, ids=lambda memory: memory.__name__)
def test_our_memories(memory: Callable[[], Memory]) -> None:
    check_memory(memory)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["dgc", "sbc"])
def test_our_methods(name: str) -> None:
    check_method({"dgc": lambda: methods.dgc(0.1, warmup_steps=4), "sbc": lambda: methods.sbc(0.1, every=4)}[name])


OPTIONS = {"every": 4, "fragments": 1, "delay": 0, "density": 0.2, "block_density": 0.5, "block_size": 8, "columns": 50}
OPTIONS |= {"warmup_steps": 2, "dense_steps": 4, "bin_size": 5, "convolution_bin_size": 5, "tables": ["*"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", methods.RECIPES)
def test_all_recipes(name: str) -> None:
    recipe = methods.RECIPES[name]
    known = inspect.signature(recipe).parameters

    def make() -> Method:
        return recipe(**{option: value for option, value in OPTIONS.items() if option in known})  # type: ignore[call-arg]

    adam = partial(torch.optim.AdamW, lr=0.01) if any(parts_in(make(), AdamMoments)) else None  # type: ignore[type-abstract]
    check_method(make) if adam is None else check_method(make, optimizer=adam)


# -- with one fault each


class Unsorted(TopK):
    def select_hinted(self, x: Tensor, context: Round, hints: Any) -> Tensor:
        return super().select_hinted(x, context, hints).flip(0)


class Impure(TopK):
    def select(self, x: Tensor, context: Round) -> Tensor:
        return super().select(x, context)[int(torch.randint(3, ())) :]


class TooMany(TopK):
    def count(self, context: Round) -> int:
        return super().count(context) - 1


class OfItsRank(TopK):
    def count(self, context: Round) -> int:
        return super().count(context) + context.rank


class Overwriting(TopK):
    def select(self, x: Tensor, context: Round) -> Tensor:
        indices = super().select(x, context)
        x[indices] = 0
        return indices


class Beyond(TopK):
    def select_hinted(self, x: Tensor, context: Round, hints: Any) -> Tensor:
        return super().select_hinted(x, context, hints) + 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Unsorted, "must return strictly increasing positions"),
        (Impure, "is not pure: two calls differ"),
        (TooMany, "more than count"),
        (OfItsRank, "count must be equal on all ranks"),
        (Overwriting, "changed the vector"),
        (Beyond, "must return positions from 0 to"),
    ],
)
def test_selectors_with_a_fault(kind: type[TopK], message: str) -> None:
    with pytest.raises(AssertionError, match=f"{kind.__name__}.*{message}.*\\.$"):
        check_selector(kind(0.1))


@pytest.fixture
def _codecs_of_tests() -> Iterator[None]:
    before = dict(VALUE_CODECS), dict(INDEX_CODECS)
    yield
    for registry, codecs in zip((VALUE_CODECS, INDEX_CODECS), before):
        registry.clear()
        registry.update(codecs)


def unchecked(self: Any, section: Tensor, count: int, parameter: int) -> Tensor:
    return section.clone().view(torch.float32)


def off(self: Any, section: Tensor, count: int, parameter: int) -> Tensor:
    return Float32().decode(section, count, parameter) * 1.001


def shared(self: Any, section: Tensor, count: int, parameter: int) -> Tensor:
    Float32().decode(section, count, parameter)
    return section.view(torch.float32)


def cut(self: Any, values: Tensor, indices: Tensor, layout: Layout) -> Tensor:
    return Float32().encode(values, indices, layout)[1:]


@pytest.mark.usefixtures("_codecs_of_tests")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"decode": unchecked}, r"must raise PayloadError, or decode|must return finite values"),
        ({"decode": off}, r"is off by .* more than"),
        ({"decode": shared}, "must return memory of its own"),
        ({"bound_bytes": lambda self, count, layout: 2 * count}, "more than bound_bytes"),
        ({"encode": lambda self, values, indices, layout: values.to(torch.int64)}, r"must return \[bytes\] uint8"),
        ({"encode": cut}, "must decode what encode returned"),
        ({"parameter": 1}, "parameter must be one of"),
    ],
)
def test_value_codecs_with_a_fault(fault: dict[str, Any], message: str) -> None:
    kind = register_value_codec(dataclass(frozen=True)(type("Faulty", (Float32,), {"code": 200, **fault})))
    with pytest.raises(AssertionError, match=message):
        check_value_codec(kind())


def test_codecs_that_nobody_knows() -> None:
    @dataclass(frozen=True)
    class Unregistered(Float32):
        code: ClassVar[int] = 201

    @dataclass(frozen=True)
    class Secret(Raw32):
        code: ClassVar[int] = 201

    with pytest.raises(AssertionError, match=r"Unregistered must be registered.*@register_value_codec"):
        check_value_codec(Unregistered())
    with pytest.raises(AssertionError, match=r"Secret must be registered.*@register_index_codec"):
        check_index_codec(Secret())


def trusting(self: Any, section: Tensor, count: int, size: int, parameter: int) -> Tensor:
    bits = section[:, None] >> torch.arange(8) & 1
    return bits.view(-1).nonzero().view(-1) if count < size else torch.arange(size)


@pytest.mark.usefixtures("_codecs_of_tests")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"section_bytes": lambda self, indices, size: 1}, "but section_bytes says 1"),
        ({"bound_bytes": lambda self, count, size: 0}, "more than bound_bytes"),
        ({"decode": lambda self, *args: Bitmap().decode(*args) + 1}, "returned other positions"),
        ({"decode": trusting}, r"must return positions from|positions, not"),
        (
            {"encoded": lambda self, *args: (self, self.encode(*args)[:-1])},
            "encoded must return what chosen and Faulty",
        ),
    ],
)
def test_index_codecs_with_a_fault(fault: dict[str, Any], message: str) -> None:
    kind = register_index_codec(dataclass(frozen=True)(type("Faulty", (Bitmap,), {"code": 200, **fault})))
    with pytest.raises(AssertionError, match=message):
        check_index_codec(kind())


class Trusting(SparseCodec):
    def decode(self, payload: Tensor, size: int) -> SparseVector:
        decoded = super().decode(payload, int.from_bytes(payload[4:8].tolist(), "little"))
        return SparseVector(decoded.indices, decoded.values, size)


class Guessing(SparseCodec):
    def bound_bytes(self, context: Round) -> int:
        return 20


@pytest.mark.parametrize(
    ("kind", "message"), [(Trusting, r"must raise PayloadError"), (Guessing, "more than bound_bytes, 20")]
)
def test_compressors_with_a_fault(kind: type[SparseCodec], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_compressor(kind(TopK(0.1)))


class Mean(PlainExchange):
    """The mean, with a count of rounds; every fault is a subclass."""

    def __init__(self) -> None:
        self.rounds = torch.zeros(())
        self.next = self.rounds

    def reduce(self, x: Vector, context: Round, wire: Wire) -> tuple[Tensor, Tensor]:
        self.next = self.rounds + 1
        sent = x.values * (1 - 0.5 ** (1 + self.rounds))
        return wire.all_reduce_(sent / wire.world_size), sent

    def commit(self) -> None:
        self.rounds = self.next

    def abort(self) -> None:
        self.next = self.rounds

    def state_dict(self) -> dict[str, Tensor]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.rounds = state["rounds"]


class Apart(Mean):
    def reduce(self, x: Vector, context: Round, wire: Wire) -> tuple[Tensor, Tensor]:
        shared, sent = super().reduce(x, context, wire)
        return shared * (1 + context.rank * 1e-7), sent


class Sum(Mean):
    def reduce(self, x: Vector, context: Round, wire: Wire) -> tuple[Tensor, Tensor]:
        shared, sent = super().reduce(x, context, wire)
        return shared * wire.world_size, sent


class Boastful(Mean):
    """Says that it has sent all, and has the residual changed."""

    def reduce(self, x: Vector, context: Round, wire: Wire) -> tuple[Tensor, Tensor]:
        result = super().reduce(x, context, wire)
        x.values.mul_(0.5)
        return result


class Hasty(Mean):
    """Keeps its state before the round counts."""

    def reduce(self, x: Vector, context: Round, wire: Wire) -> tuple[Tensor, Tensor]:
        result = super().reduce(x, context, wire)
        self.rounds = self.next
        return result


class Secretive(Hasty):
    """As hasty, in a state that is not saved."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass


class Forgetful(Mean):
    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass


class Smuggling(Mean):
    def reduce(self, x: Vector, context: Round, wire: Wire) -> tuple[Tensor, Tensor]:
        dist.broadcast(torch.zeros(3), 0)
        return super().reduce(x, context, wire)


class Unwary(Exchange):
    """Asks no rank whether its gradient is finite."""

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        present = [bool(here) for here in wire.all_reduce_(torch.tensor(x.present, dtype=torch.int64))]
        return Exchanged(wire.all_reduce_(x.values / wire.world_size), x.values.clone(), present)


class Absent(DenseAllReduce):
    """Says that all tensors are present."""

    def exchange(self, x: Vector, context: Round, wire: Wire) -> Exchanged:
        exchanged = super().exchange(x, context, wire)
        return exchanged._replace(present=[True] * len(exchanged.present))


def test_an_exchange_without_a_fault() -> None:
    check_exchange(Mean)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Apart, "shared must be equal on all ranks, to the bit"),
        (Sum, "shared must be the mean of what ranks sent"),
        (Boastful, "what was sent plus what is held must be what was taken in"),
        (Hasty, "aborted after the exchange must leave all as before"),
        (Secretive, "a round must give what it would have given without them"),
        (Forgetful, "saved and loaded before round 1 must go on as one that was not"),
        (Smuggling, "the ledger must have every collective"),
        (Unwary, "all ranks must raise NonFiniteGradientError"),
        (Absent, "present must say which tensors have a gradient on any rank"),
    ],
)
def test_exchanges_with_a_fault(kind: Callable[[], Exchange], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_exchange(kind)


def test_an_exchange_that_objects() -> None:
    with pytest.raises(ValueError, match="this one objects: k must be"):
        check_exchange(lambda: SketchedTopK(k=10_000))


class Residual(Memory):
    """Error feedback by hand; every fault is a subclass."""

    def __init__(self) -> None:
        super().__init__("rest")

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        pairs = zip(contribution.parts, self.held["rest"].parts)
        self.sums = [None if part is None else part + rest for part, rest in pairs]
        return contribution.with_parts(self.sums)

    def commit(self, exchanged: Exchanged, context: Round) -> Exchanged:
        for rest, total in zip(self.held["rest"].parts, self.sums):
            if total is not None:
                rest.copy_(total)
        self.held["rest"].subtract_(exchanged.sent)
        return exchanged


class Keeping(Residual):
    """Changes what it holds, and does not undo it."""

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        contribution = super().prepare(contribution, context)
        self.held["rest"].add_(torch.ones(context.layout.size))
        return contribution


class InPlace(Residual):
    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        result = super().prepare(contribution, context)
        for part in contribution.parts:
            if part is not None:
                part.add_(1)
        return result


class Lossy(Residual):
    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return {}


class Fading(Residual):
    def commit(self, exchanged: Exchanged, context: Round) -> Exchanged:
        exchanged = super().commit(exchanged, context)
        self.held["rest"].flat.mul_(0.5)
        return exchanged


class Selfish(Residual):
    def commit(self, exchanged: Exchanged, context: Round) -> Exchanged:
        super().commit(exchanged, context)
        return exchanged._replace(shared=exchanged.sent)


class Starting(Residual):
    def bind(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        super().bind(layout, dtype, device)
        self.held["rest"].flat.zero_()


def test_a_memory_without_a_fault() -> None:
    check_memory(Residual)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Keeping, "abort must leave what is held as it was before prepare"),
        (InPlace, "must not change gradients"),
        (Lossy, "saved and loaded must go on as one that was not"),
        (Fading, "a tensor without a gradient must keep what is held for it"),
        (Selfish, "commit must replace .* equally on all ranks"),
        (Starting, "bind must keep what is held when tensors join"),
    ],
)
def test_memories_with_a_fault(kind: Callable[[], Memory], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_memory(kind)


class Backwards(Mean):
    def reduce(self, x: Vector, context: Round, wire: Wire) -> tuple[Tensor, Tensor]:
        shared, sent = super().reduce(x, context, wire)
        return -shared, sent


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Forgetful, "resumed must end as one that was never stopped"), (Backwards, "training must lower the loss")],
)
def test_methods_with_a_fault(kind: Callable[[], Exchange], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_method(lambda: Method([GradientSync(Channel(kind()))]))


# -- the runner


def test_results_by_rank() -> None:
    results = run_ranks(3, lambda rank, factor: Wire().all_gather(torch.tensor([factor * rank])), 2)
    assert [result.view(-1).tolist() for result in results] == [[0, 2, 4]] * 3


def test_a_rank_that_raises() -> None:
    def fails(rank: int) -> None:
        if rank == 1:
            raise KeyError("lost")
        Wire().all_reduce_(torch.zeros(1))

    with pytest.raises(KeyError, match="lost") as raised:
        run_ranks(2, fails)
    assert isinstance(raised.value.__cause__, RankError)
    assert 'raise KeyError("lost")' in str(raised.value.__cause__)


def test_a_rank_that_dies() -> None:
    with pytest.raises(RuntimeError, match=r"rank \d ended without a result"):
        run_ranks(2, lambda rank: os.kill(os.getpid(), signal.SIGKILL))


def test_ranks_that_hang_are_killed(tmp_path: Path) -> None:
    def hangs(rank: int) -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)

    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] did not return within 2 s"):
        run_ranks(2, hangs, timeout=2)
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.name), 0)


def test_a_part_instead_of_what_makes_it_is_refused() -> None:
    with pytest.raises(TypeError, match=r"exchange_factory must make the part.*Use lambda: DenseAllReduce\(\.\.\.\)"):
        check_exchange(DenseAllReduce())  # type: ignore[arg-type]


class Listing(TopK):
    def select(self, x: Tensor, context: Any) -> Any:
        return super().select(x, context).tolist()


class Fraction(TopK):
    def count(self, context: Any) -> Any:
        return float(super().count(context))


class Bare(ErrorFeedback):
    def __init__(self) -> None: ...


class Wide(PlainExchange):
    def reduce(self, x: Vector, context: Round, wire: Wire) -> Any:
        return wire.all_reduce_(x.values.clone() / wire.world_size).double(), x.values


class Overwriting(PlainExchange):
    def reduce(self, x: Vector, context: Round, wire: Wire) -> Any:
        sent = x.values.clone()
        return wire.all_reduce_(sent) / wire.world_size, sent


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (lambda: check_selector(Listing(0.1)), r"Listing.select must return positions as \[k\] int64; got \["),
        (lambda: check_selector(Fraction(0.1)), r"Fraction.count must be a whole number; got 29.0"),
        (lambda: check_selector(TopK), "selector must be an object of a class derived from Selector; got <class"),
        (lambda: check_value_codec(Float16), "codec must be an object of a class derived from ValueCodec; got <class"),
        (lambda: check_index_codec(Golomb), "coding must be an object of a class derived from IndexCoding; got <class"),
        (lambda: check_compressor(TopK(0.1)), "compressor must be an object of a class derived from Compressor; got"),
        (lambda: check_memory(Bare), r"Bare.__init__ must call super\(\).__init__\(\), which makes 'held'"),
        (lambda: check_memory(lambda: TopK(0.1)), "what memory_factory makes must be .* derived from Memory; got TopK"),
        (lambda: check_exchange(Wide), r"Exchanged.shared must be \[\d+\] torch.float32, as x.values is; got .*64"),
        (lambda: check_exchange(Overwriting), "the mean of what ranks sent, which all_reduce_ overwrites; it is"),
    ],
)  # fmt: skip
def test_common_mistakes_are_named(check: Callable[[], None], text: str) -> None:
    with pytest.raises((AssertionError, TypeError), match=text):
        check()
