"""Gradient dropping and dgc: what they are made of, what they refuse, and the bytes of the paper's tables."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_sparsecomm.basis import DensityWarmup, Wire
from lightning_sparsecomm.channel import ErrorFeedback, Momentum, MomentumCorrection
from lightning_sparsecomm.methods import dgc, gradient_dropping
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Averaging, GradientSync, Method
from tests.distributed.launch import run_ranks


def syncs(method: Method) -> list[GradientSync]:
    assert all(isinstance(sync, GradientSync) for sync in method.syncs)
    return list(method.syncs)  # type: ignore[arg-type]


def test_gradient_dropping_is_top_k_with_error_feedback() -> None:
    (sync,) = syncs(gradient_dropping())
    assert repr(sync.channel) == (
        "Channel(Sparse(SparseCodec(selector=TopK(density=0.01, scope='model'), values=Float32(),"
        " indices=RunLength16())), [ErrorFeedback(decay=1.0, follow_rate=True)])"
    )
    (sync,) = syncs(gradient_dropping(error_feedback=False, values="float16", scope="tensor", warmup_steps=5))
    assert sync.channel.memories == ()
    assert "values=Float16()" in repr(sync)
    assert "DensityWarmup(density=0.01, steps=5, epochs=0, shape='inverse_time'), scope='tensor'" in repr(sync)
    sparse, dense = syncs(gradient_dropping(exclude=["*.bias"]))
    assert sparse.exclude == dense.parameters == ("*.bias",)
    assert repr(dense.channel) == "Channel(DenseAllReduce(wire_dtype='same'), [])"


@pytest.mark.parametrize("local", ["sum", "partial", "error"])
def test_local_modes_come_with_averages(local: Any) -> None:
    method = gradient_dropping(local=local)
    (sync,) = syncs(method)
    assert sync.local == ("partial" if local == "error" else local)
    # The paper's "error" is "partial" without error feedback.
    assert [type(memory) for memory in sync.channel.memories] == ([] if local == "error" else [ErrorFeedback])
    assert method.averaging == Averaging(500)
    assert gradient_dropping().averaging is None
    assert gradient_dropping(local=local, average_every=7, average_buffers=True).averaging == Averaging(7, buffers=True)
    with pytest.warns(UserWarning, match="lets every rank's parameters go their own way|average_every=None"):
        assert gradient_dropping(local=local, average_every=None).averaging is None


def test_dgc_corrects_momentum_before_and_applies_it_after() -> None:
    sparse, dense = syncs(dgc())
    assert (
        "TopK(density=DensityWarmup(density=0.001, steps=1000, epochs=0, shape='exponential'), scope='tensor')"
        in repr(sparse)
    )
    assert [repr(memory) for memory in sparse.channel.memories] == [
        "ClipLocalNorm(max_norm=None)",
        "MomentumCorrection(mask=False)",
        "ErrorFeedback(decay=1.0, follow_rate=True)",
    ]
    assert [repr(memory) for memory in dense.channel.memories] == ["ClipLocalNorm(max_norm=None)", "Momentum()"]
    assert (sparse.min_dimensions, sparse.rest, dense.rest) == (2, False, True)
    assert not sparse.mask_momentum


def test_dgc_for_any_optimizer_masks_that_optimizers_momentum() -> None:
    for sync in syncs(dgc(momentum_correction=False, momentum_masking=True, exclude=["head.*"])):
        assert not any(isinstance(memory, (MomentumCorrection, Momentum)) for memory in sync.channel.memories)
        assert sync.mask_momentum == (not sync.rest)
        assert sync.exclude == (() if sync.rest else ("head.*",))
    assert not any(sync.mask_momentum for sync in syncs(dgc(momentum_correction=False)))


@pytest.mark.parametrize(
    ("density", "error", "text"),
    [
        (
            0,
            ValueError,
            "density must be in (0, 1]: the fraction of elements sent; got 0. Use 0.01 for a hundredth, or dense()",
        ),
        (-1, ValueError, "density must be in (0, 1]: the fraction of elements sent; got -1."),
        (1.5, ValueError, "density must be in (0, 1]: the fraction of elements sent; got 1.5."),
        (100, ValueError, "density must be in (0, 1]: the fraction of elements sent; got 100. Did you mean 0.01?"),
        (float("nan"), ValueError, "density must be in (0, 1]: the fraction of elements sent; got nan. Use 0.01 for"),
        (float("inf"), ValueError, "density must be in (0, 1]: the fraction of elements sent; got inf. Use 0.01 for"),
        ("x", TypeError, "density must be a number in (0, 1] or a Schedule; got 'x'."),
        (True, TypeError, "density must be a number in (0, 1] or a Schedule; got True."),
        (None, TypeError, "density must be a number in (0, 1] or a Schedule; got None."),
    ],
)
@pytest.mark.parametrize("make", [gradient_dropping, dgc, lambda density: DensityWarmup(density, 7)])
def test_density(make: Callable[..., object], density: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make(density=density)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: gradient_dropping(scope="layer"),
            ValueError,
            "scope must be one of model, tensor, balanced, norm, entropy; got",
        ),
        (
            lambda: gradient_dropping(values="int8"),
            ValueError,
            "values must be one of float32, float16, bfloat16, one_bit, two_bit, three_bit, short_three_bit, few_bits;",
        ),
        (
            lambda: gradient_dropping(exclude="*.bias"),
            TypeError,
            "exclude must be a list of patterns; got the string '*.bias'. Use ['*.bias'].",
        ),
        (
            lambda: gradient_dropping(local="all"),
            ValueError,
            "local must be one of none, sum, partial, error; got 'all'.",
        ),
        (
            lambda: gradient_dropping(average_buffers=True),
            ValueError,
            "average_buffers and average_optimizer_state need a local mode",
        ),
        (
            lambda: gradient_dropping(local="partial", average_every=0),
            ValueError,
            "average_every must be a whole number of optimizer steps, at least 1; got 0.",
        ),
        (
            lambda: gradient_dropping(warmup_steps=-1),
            ValueError,
            "warmup_steps must be a whole number, 0 or more; got -1. Use 0 for",
        ),
        (
            lambda: dgc(warmup_steps=-1),
            ValueError,
            "warmup_steps must be a whole number, 0 or more; got -1. Use 0 for no warm-up.",
        ),
        (
            lambda: dgc(warmup_epochs=1.5),
            ValueError,
            "warmup_epochs must be a whole number, 0 or more; got 1.5. Use 0 for no warm-up.",
        ),
        *[
            (
                lambda clip=clip: dgc(clip=clip),
                ValueError,
                f"clip must be a positive number: the largest norm of the averaged gradient; got {clip!r}.",
            )
            for clip in (0, -1.0, "1", True, float("inf"), float("nan"))
        ],
    ],
)
def test_refuses(make: Callable[[], Method], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make()


# Bytes


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
    engine = Engine(dgc(0.001, warmup_steps=0), Wire())
    engine.registry.add_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    with engine.stepping(optimizer):
        engine.synchronize(optimizer)
    engine.close()
    ledger = engine.wire.ledger
    vectors = sum(p.numel() for p in module.parameters() if p.dim() == 1)
    return sum(p.numel() for p in module.parameters()), vectors, ledger.handed_bytes(), ledger.ddp_bytes


# Deep Gradient Compression, tables 3 and 4.
@pytest.mark.few(1)
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
