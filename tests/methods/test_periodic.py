"""Methods that exchange weight changes every so many steps: their parts, and the bytes of the papers' tables."""

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sparsecomm.basis import Layout, Round, Vector, Wire
from lightning_sparsecomm.methods import diloco, federated_averaging, sbc, sbc1, sbc2, sbc3, sparse_loco
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import DeltaSync, Method
from tests.distributed.launch import run_ranks

Shapes = list[tuple[int, ...]]


def syncs(method: Method) -> list[DeltaSync]:
    assert all(isinstance(sync, DeltaSync) for sync in method.syncs)
    return list(method.syncs)  # type: ignore[arg-type]


def test_sbc_sends_positions_of_one_sign_and_one_mean() -> None:
    (sync,) = syncs(sbc())
    assert repr(sync.channel) == (
        "Channel(Gather(SparseCodec(selector=OneSidedTopK(density=0.01), values=SharedMean(), indices=Golomb())),"
        " [ErrorFeedback(decay=1.0, follow_rate=True)])"
    )
    assert (sync.every, sync.mask_momentum, sync.buffers, sync.outer) == (10, True, "average", None)
    sparse, dense = syncs(sbc(every=3, exclude=["*.bias"], buffers="own", error_feedback=False))
    assert sparse.exclude == dense.parameters == ("*.bias",)
    assert repr(dense.channel) == "Channel(DenseAllReduce(wire_dtype='same'), [])"
    assert sparse.channel.memories == ()
    assert {(each.every, each.buffers) for each in (sparse, dense)} == {(3, "own")}


def test_the_papers_variants_of_sbc() -> None:
    for make, density, every in ((sbc1, 0.001, 1), (sbc2, 0.01, 10), (sbc3, 0.01, 100)):
        assert repr(make().syncs) == repr(sbc(density, every).syncs)


def test_averaging_and_its_outer_optimizer() -> None:
    (plain,) = syncs(federated_averaging())
    assert repr(plain.channel) == "Channel(DenseAllReduce(wire_dtype='same'), [])"
    assert (plain.every, plain.outer) == (100, None)
    (outer,) = syncs(diloco(wire_dtype="float16"))
    assert repr(outer.channel) == "Channel(DenseAllReduce(wire_dtype='float16'), [])"
    assert outer.every == 500
    assert isinstance(outer.outer, partial)
    assert outer.outer.func is torch.optim.SGD
    assert outer.outer.keywords == {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    (without,) = syncs(diloco(outer_momentum=0))
    assert isinstance(without.outer, partial)
    assert without.outer.keywords == {"lr": 0.7, "momentum": 0, "nesterov": False}


def test_sparse_loco_has_a_fading_residual_and_an_outer_step_where_asked_for() -> None:
    (sync,) = syncs(sparse_loco())
    assert "ChunkTopK(density=0.015625, chunk=4096" in repr(sync.channel)
    assert "values=TwoBit(group=192), indices=Auto()" in repr(sync.channel)
    assert "[ErrorFeedback(decay=0.95, follow_rate=True)]" in repr(sync.channel)
    assert (sync.every, sync.outer) == (30, None)
    (sync,) = syncs(sparse_loco(outer_lr=0.8))
    assert isinstance(sync.outer, partial)
    assert sync.outer.keywords == {"lr": 0.8}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        *[
            (
                lambda recipe=recipe: recipe(every=0),
                "every must be a whole number of optimizer steps, at least 1; got 0",
            )
            for recipe in (sbc, federated_averaging, diloco, sparse_loco)
        ],
        (lambda: sbc(2), "density must be in (0, 1]: the fraction of elements sent; got 2"),
        (
            lambda: federated_averaging(wire_dtype="fp16"),
            "wire_dtype must be one of same, float32, float16, bfloat16; got",
        ),
        (lambda: federated_averaging(buffers="mean"), "buffers must be one of average, own, broadcast; got 'mean'"),
        *[
            (lambda recipe=recipe, lr=lr: recipe(outer_lr=lr), f"outer_lr must be a positive number; got {lr!r}.")
            for recipe in (diloco, sparse_loco)
            for lr in (0, -1, math.nan, math.inf, "1", True)
        ],
        *[
            (lambda m=m: diloco(outer_momentum=m), f"outer_momentum must be in [0, 1); got {m!r}.")
            for m in (1, -0.1, math.nan, "0.9", False)
        ],
        (lambda: sparse_loco(chunk=0), "chunk must be a whole number, at least 1"),
        (lambda: sparse_loco(decay=0), "decay must be in (0, 1]"),
    ],
)
def test_refuses(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make()


# Bytes


def lenet5_caffe() -> Shapes:
    """Two convolutions and two linear layers: 431,080 parameters."""
    return [(20, 1, 5, 5), (20,), (50, 20, 5, 5), (50,), (500, 800), (500,), (10, 500), (10,)]


def ten_million() -> Shapes:
    """Three layers of some width, and their biases."""
    return [(1800, 1800), (1800,)] * 3 + [(160, 1800), (160,)]


def _whole_run(rank: int, shapes: Shapes, method: Method, steps: int) -> tuple[int, int]:
    generator = torch.Generator().manual_seed(rank)
    module = nn.Module()
    module.parts = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])
    engine = Engine(method, Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    for _ in range(steps):
        for parameter, gradient in zip(module.parameters(), gradients):
            # The residual makes supports of one exchange avoid those of the last; signs make them new.
            parameter.grad = gradient if torch.rand((), generator=generator) < 0.5 else -gradient
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
    engine.settle()
    engine.close()
    ledger = engine.wire.ledger
    return ledger.ddp_bytes, ledger.sent_bytes


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("shapes", "ranks", "method", "steps", "least"),
    [
        (lenet5_caffe(), 4, sbc1(), 20, 2_400),
        (lenet5_caffe(), 4, sbc2(), 30, 3_600),
        (lenet5_caffe(), 4, sbc3(), 100, 36_000),
        (ten_million(), 2, sbc1(), 2, 2_700),
        pytest.param(ten_million(), 2, sbc2(), 10, 3_850, marks=pytest.mark.slow),
        pytest.param(ten_million(), 2, sbc3(), 100, 38_500, marks=pytest.mark.slow),
    ],
    ids=["lenet5-1", "lenet5-2", "lenet5-3", "ten_million-1", "ten_million-2", "ten_million-3"],
)
def test_sparse_binary_compressions_bytes(
    tmp_path: Path, shapes: Shapes, ranks: int, method: Method, steps: int, least: int
) -> None:
    """Of a whole run, upstream as in the paper, with headers, checksums, lengths and padding."""
    for ddp, sent in run_ranks(tmp_path, ranks, _whole_run, shapes, method, steps):
        assert ddp == steps * 4 * sum(math.prod(shape) for shape in shapes)
        assert ddp / sent >= least
        # No more than the entropy of the positions would allow: 32 bits by 11.408 for each of 0.1%, by 8.079 of 1%.
        most = {sbc1: 32_000 / 11.408, sbc2: 10 * 3_200 / 8.079, sbc3: 100 * 3_200 / 8.079}[type(method)]
        assert ddp / sent < 1.01 * most


def test_sparse_locos_bytes() -> None:
    """7.5 bits for each position, 2.17 for its value; every 30 steps, 0.00063 bytes a parameter and step."""
    size = 2**21
    layout = Layout([("weight", (size,))])
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    gather = sparse_loco().syncs[0].channel.exchange  # type: ignore[attr-defined]
    payload = gather.compressor.encode(Vector(x), Round(layout))
    assert 8 * payload.numel() / (size / 64) == pytest.approx(7.49 + 2.17, rel=0.002)
    assert payload.numel() / size / 30 == pytest.approx(0.00063, rel=0.005)


def test_sparse_loco_sends_less_than_9_7_bits_a_value(tmp_path: Path) -> None:
    """By the ledger, with headers, lengths and padding; though which elements are the largest is random here."""
    exchanges, size = 3, 1024 * 1024
    for ddp, sent in run_ranks(tmp_path, 2, _whole_run, [(1024, 1024)], sparse_loco(every=2), 2 * exchanges):
        assert ddp == 2 * exchanges * 4 * size
        bits = 8 * sent / (exchanges * size / 64)
        # log2 of the number of selections of 64 among 4,096 elements, by 64, and the two bits of values.
        assert math.log2(math.comb(4096, 64)) / 64 + 2 < bits < 9.7
