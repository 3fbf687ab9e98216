"""The update kernels in numba against the reference, bit for bit, and both against the definitions."""

import pytest
import torch

from lightning_sparsecomm.kernels import LIMIT, OutOfRangeError, Reference, Update
from lightning_sparsecomm.kernels.updates.cpu import Cpu
from tests.kernels.bits import each_dtype, same_bits
from tests.kernels.updates.cases import KINDS, copy_of, out_of_range, same_update, thresholds_for, update_of

# Around multiples of 8 flags, which are tested together, and around one piece of 4096.
SIZES = [0, 1, 31, 32, 33, 2047, 2048, 2049, 4095, 4096, 4097, 5000]
KERNELS = [Reference(), Cpu()]

each_size = pytest.mark.parametrize("size", SIZES)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_kernels = pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: type(kernels).__name__)


@pytest.mark.few(35)
@each_dtype
@each_size
@each_kind
def test_update(kind, size, dtype):
    start, expected = update_of(kind, size, dtype), update_of(kind, size, dtype)
    nothing = Reference().update_(expected, None, 0)
    assert nothing is not None and nothing.dtype == torch.int64 and nothing.numel() == 0
    actual = copy_of(start)
    assert same_bits(Cpu().update_(actual, None, 0), nothing)
    assert same_update(actual, expected)

    for threshold in thresholds_for(expected.residual):
        found = Reference().reaching(expected.residual, threshold, size)
        assert found is not None and found.dtype == torch.int64
        count = found.numel()
        assert found.tolist() == [i for i, x in enumerate(expected.residual.tolist()) if abs(x) >= threshold]
        # Ample, just enough, one too few, none.
        for capacity in {10**9, size, count, max(count - 1, 0), 0}:
            room = found if count <= capacity else None
            assert same_bits(Reference().reaching(expected.residual, threshold, capacity), room)
            assert same_bits(Cpu().reaching(expected.residual, threshold, capacity), room)
            for kernels in KERNELS:
                actual = copy_of(start)
                assert same_bits(kernels.update_(actual, threshold, capacity), room)
                # The update is complete even if the capacity was too small.
                assert same_update(actual, expected)


@each_dtype
@each_size
@each_kind
def test_an_update_can_be_taken_back(kind, size, dtype):
    start, update = update_of(kind, size, dtype), update_of(kind, size, dtype)
    for kernels in KERNELS:
        kernels.update_(update, None, 0)
        kernels.take_back_(update)
        # A few roundings of the largest term.
        tolerance = 16 * torch.finfo(dtype).eps * float(update.gradient.abs().max() if size else 1)
        torch.testing.assert_close(update.residual, start.residual, rtol=tolerance, atol=tolerance)
        if update.velocity is not None:
            torch.testing.assert_close(update.velocity, start.velocity, rtol=tolerance, atol=tolerance)
        if update.moments is not None:
            assert start.moments is not None
            largest = max(1.0, float(update.gradient.abs().max() if size else 1))
            for moment, before in zip(update.moments[:2], start.moments[:2]):
                torch.testing.assert_close(moment, before, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.few(40)
@each_dtype
@pytest.mark.parametrize("size", [1, 31, 4095, 4096, 4097, 10000])
@each_kind
@each_kernels
def test_values_out_of_range_are_reported_and_count_as_zero(kernels, kind, size, dtype):
    start = update_of(kind, size, dtype)
    for update in out_of_range(start):
        expected = copy_of(start)
        in_range = update.gradient.abs() < LIMIT
        expected.gradient[~in_range] = 0
        Reference().update_(expected, None, 0)
        for threshold in (None, 1.0):
            actual = copy_of(update)
            with pytest.raises(OutOfRangeError):
                kernels.update_(actual, threshold, size)
            assert same_bits(actual.residual, expected.residual) and same_bits(actual.velocity, expected.velocity)
            assert same_bits(actual.gradient, update.gradient)
            kernels.take_back_(actual)
            tolerance = 16 * torch.finfo(dtype).eps * float(update.gradient[in_range].abs().sum() + 1)
            torch.testing.assert_close(actual.residual, start.residual, rtol=tolerance, atol=tolerance)
            if actual.velocity is not None:
                torch.testing.assert_close(actual.velocity, start.velocity, rtol=tolerance, atol=tolerance)


@each_dtype
@each_size
@each_kind
def test_checking_does_not_change_an_update_in_range(kind, size, dtype):
    start, expected = update_of(kind, size, dtype), update_of(kind, size, dtype)
    below = torch.tensor(LIMIT, dtype=dtype).nextafter(torch.tensor(0.0, dtype=dtype))
    for update in (start, expected):
        update.gradient[: size // 3] = below
        update.gradient[size // 3 : size // 2] = -below
    found = Reference().update_(expected, 1.0, size)
    for kernels in KERNELS:
        actual = copy_of(start)._replace(checked=True)
        assert same_bits(kernels.update_(actual, 1.0, size), found)
        assert same_update(actual, expected)


@each_dtype
@each_kernels
def test_factors_keep_double_precision(kernels, dtype):
    # With float64 vectors, factors must not be rounded to float32 on their way.
    factor = 1 + 2.0**-40
    update = Update(torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype), None, factor, factor)
    found = kernels.update_(update, 2 * factor, 3)
    assert update.residual.tolist() == [2.0 if dtype == torch.float32 else 2 * factor] * 3
    assert found.tolist() == [0, 1, 2]


@each_dtype
@each_size
@each_kind
def test_probe(kind, size, dtype):
    update, start = update_of(kind, size, dtype), update_of(kind, size, dtype)
    after = copy_of(start)
    Reference().update_(after, None, 0)
    for stride in (1, 3, 7, size + 5):
        for kernels in KERNELS:
            assert same_bits(kernels.probe(update, stride), after.residual[::stride].abs())
            assert same_update(update, start)


@each_dtype
@each_size
@each_kernels
@pytest.mark.parametrize("sign", [1, -1])
def test_is_ahead_by(kernels, size, dtype, sign):
    shared, ahead = torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype)
    weight = shared.clone().sub_(ahead, alpha=sign)
    assert kernels.is_ahead_by(weight, shared, ahead, sign)
    for place in {0, size // 2, size - 1} if size else ():
        for value in (5.0, float("nan"), float("inf")):
            changed = weight.clone()
            changed[place] = value
            assert not kernels.is_ahead_by(changed, shared, ahead, sign)
        bits = weight.clone()
        bits[place] = torch.nextafter(bits[place], torch.tensor(9.0, dtype=dtype))
        assert not kernels.is_ahead_by(bits, shared, ahead, sign)
        # What training has made NaN was not set.
        broken = shared.clone()
        broken[place] = float("nan")
        assert kernels.is_ahead_by(broken.clone().sub_(ahead, alpha=sign), broken, ahead, sign)
