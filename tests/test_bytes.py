"""The papers' tables of bytes, out of the real encoders on tensors of those shapes."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_sparsecomm.layout import Layout
from lightning_sparsecomm.method import Method
from lightning_sparsecomm.methods import dgc, sbc1, sbc2, sbc3, sparse_loco
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.synchronizer import Synchronizer
from lightning_sparsecomm.wire import Wire
from tests.distributed.launch import run_ranks

Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """He et al. 2016, table 1: bottleneck blocks of 64, 128, 256, 512 channels, 3, 4, 6, 3 of them."""

    def convolution(inputs: int, outputs: int, size: int) -> Shapes:
        # And the weight and bias of its batch normalization.
        return [(outputs, inputs, size, size), (outputs,), (outputs,)]

    shapes = convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution(inputs, width, 1) + convolution(width, width, 3) + convolution(width, 4 * width, 1)
            if block == 0:
                shapes += convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def alexnet() -> Shapes:
    """Krizhevsky et al. 2012, with its two groups of convolutions."""
    weights: Shapes = [(96, 3, 11, 11), (256, 48, 5, 5), (384, 256, 3, 3), (384, 192, 3, 3), (256, 192, 3, 3)]
    weights += [(4096, 9216), (4096, 4096), (1000, 4096)]
    return weights + [(weight[0],) for weight in weights]


def ptb_lstm() -> Shapes:
    """Two layers of 1500, the embedding of 10,000 words tied to the decoder."""
    layer: Shapes = [(6000, 1500), (6000, 1500), (6000,), (6000,)]
    return [(10_000, 1500), *layer, *layer, (10_000,)]


def _one_step(rank: int, shapes: Shapes) -> tuple[int, int, float, int]:
    generator = torch.Generator().manual_seed(0)
    module = nn.Module()
    module.parts = nn.ParameterList([nn.Parameter(torch.empty(shape)) for shape in shapes])
    synchronizer = Synchronizer(dgc(0.001, warmup_steps=0), Wire())
    synchronizer.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    with synchronizer.stepping(optimizer):
        synchronizer.synchronize(optimizer)
    synchronizer.close()
    ledger = synchronizer.wire.ledger
    vectors = sum(p.numel() for p in module.parameters() if p.dim() == 1)
    return sum(p.numel() for p in module.parameters()), vectors, ledger.handed_bytes(), ledger.ddp_bytes


# Deep Gradient Compression, tables 3 and 4.
@pytest.mark.parametrize(
    ("shapes", "parameters", "vectors", "mebibytes", "ratio"),
    [
        (resnet50(), 25_557_032, 54_120, 0.352, 277),
        (alexnet(), 60_965_224, 10_568, 0.389, 597),
        (ptb_lstm(), 51_034_000, 34_000, 0.4215, 462),
    ],
    ids=["resnet50", "alexnet", "ptb_lstm"],
)
def test_the_papers_bytes(
    tmp_path: Path, shapes: Shapes, parameters: int, vectors: int, mebibytes: float, ratio: float
) -> None:
    ((count, one_dimensional, handed, ddp),) = run_ranks(tmp_path, 1, _one_step, shapes)
    assert (count, one_dimensional) == (parameters, vectors)
    assert handed / 2**20 == pytest.approx(mebibytes, rel=0.02)
    assert ddp == 4 * parameters
    assert ddp / handed == pytest.approx(ratio, rel=0.02)


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
    synchronizer = Synchronizer(method, Wire())
    synchronizer.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    gradients = [torch.randn(shape, generator=generator) for shape in shapes]
    for _ in range(steps):
        for parameter, gradient in zip(module.parameters(), gradients):
            # The residual makes supports of one exchange avoid those of the last; signs make them new.
            parameter.grad = gradient if torch.rand((), generator=generator) < 0.5 else -gradient
        with synchronizer.stepping(optimizer):
            synchronizer.synchronize(optimizer)
            optimizer.step()
    synchronizer.settle()
    synchronizer.close()
    ledger = synchronizer.wire.ledger
    return ledger.ddp_bytes, ledger.sent_bytes


@pytest.mark.parametrize(
    ("shapes", "ranks", "method", "steps", "least"),
    [
        (lenet5_caffe(), 4, sbc1(), 20, 2_400),
        (lenet5_caffe(), 4, sbc2(), 30, 3_600),
        (lenet5_caffe(), 4, sbc3(), 100, 36_000),
        (ten_million(), 2, sbc1(), 2, 2_700),
        (ten_million(), 2, sbc2(), 10, 3_850),
        (ten_million(), 2, sbc3(), 100, 38_500),
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
    """7.5 bits for each position, 2.5 for its value; every 30 steps, 0.00065 bytes a parameter and step."""
    size = 2**21
    layout = Layout([("weight", (size,))])
    gather = sparse_loco().syncs[0].channel.exchange  # type: ignore[attr-defined]
    payload = gather.compressor.encode(torch.randn(size, generator=torch.Generator().manual_seed(0)), Round(layout))
    assert 8 * payload.numel() / (size / 64) == pytest.approx(7.5 + 2.5, rel=0.01)
    assert payload.numel() / size / 30 == pytest.approx(0.00065, rel=0.01)
