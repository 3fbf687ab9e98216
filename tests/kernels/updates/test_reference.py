"""The update kernels in torch, against the formulas."""

import torch

from lightning_sparsecomm.kernels import Reference, Update
from tests.kernels.bits import DTYPES, each_dtype
from tests.kernels.updates.cases import copy_of, update_of


def test_update_follows_its_formulas():
    # The formulas in NumPy scalars, which round every operation.
    for dtype in DTYPES:
        update = update_of("dampened nesterov", 200, dtype)
        start = copy_of(update)
        Reference().update_(update, None, 0)
        scalar = start.residual.numpy().dtype.type
        keep, scale, momentum, gain, lookahead = (
            scalar(x) for x in (start.keep, start.scale, start.momentum, start.gain, start.lookahead)
        )
        assert start.velocity is not None and update.velocity is not None
        vectors = (start.residual.numpy(), start.gradient.numpy(), start.velocity.numpy())
        for i, (v, gradient, u) in enumerate(zip(*vectors)):
            g = scale * gradient
            u = momentum * u + gain * g
            v = (keep * v + g) + lookahead * u
            assert (v, u) == (update.residual.numpy()[i], update.velocity.numpy()[i])


@each_dtype
def test_taking_back_a_first_step_zeroes_the_velocity(dtype):
    # The gradient may have any memory format and dtype.
    gradient = torch.randn(4, 3, 2, 2).bfloat16().contiguous(memory_format=torch.channels_last)
    residual, velocity = torch.zeros(48, dtype=dtype), torch.zeros(48, dtype=dtype)
    update = Update(residual, gradient.to(dtype).contiguous().view(-1), velocity, 1.0, 0.5, 0.0, 1.0, 0.9)
    Reference().update_(update, None, 0)
    assert residual.any()
    Reference().take_back_(update._replace(gradient=gradient))
    assert not velocity.any()
    assert residual.abs().max() < 8 * torch.finfo(dtype).eps
