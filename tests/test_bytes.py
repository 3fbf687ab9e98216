"""The byte table of Deep Gradient Compression (tables 3 and 4), out of the real encoder on tensors of those shapes."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_sparsecomm.methods import dgc
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
