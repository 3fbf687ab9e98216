"""The kernels for values in few bits: numba against the reference, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.kernels import ValueKernels, value_kernels_for
from lightning_sparsecomm.kernels.values.cpu import CpuValueKernels
from tests.kernels.bits import each_dtype, numbers, same_bits

REFERENCE, CPU = ValueKernels(), CpuValueKernels()


@each_dtype
@pytest.mark.parametrize("group", [1, 3, 64, 128, 255])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000])
def test_three_bits_are_those_of_the_reference(dtype: torch.dtype, group: int, size: int):
    x = numbers(size, dtype, seed=size)
    cases = [x, x.sign() * (x.abs() + 1), x * 1e30, x * 1e-37, x.abs().exp().clamp(max=1e38), torch.zeros_like(x)]
    for values in cases:
        section = REFERENCE.write_three_bits(values, group)
        assert same_bits(CPU.write_three_bits(values, group), section)
        assert same_bits(CPU.read_three_bits(section, size, group), REFERENCE.read_three_bits(section, size, group))


@given(st.binary(min_size=4, max_size=40), st.integers(1, 255))
def test_three_bits_of_anything(data: bytes, group: int):
    # Heads and codes are any bytes: the values may be NaN, and no reader leaves the section.
    count = next(n for n in range(320, -1, -1) if 4 * -(-n // group) + (3 * n + 7) // 8 <= len(data))
    section = torch.tensor(list(data[: 4 * -(-count // group) + (3 * count + 7) // 8]), dtype=torch.uint8)
    ours, theirs = (kernels.read_three_bits(section, count, group) for kernels in (CPU, REFERENCE))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@each_dtype
@pytest.mark.parametrize("group", [1, 3, 64, 128, 255])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000])
def test_one_bits_are_those_of_the_reference(dtype: torch.dtype, group: int, size: int):
    x = numbers(size, dtype, seed=size)
    for values in [x, x * 1e30, x * 1e-37, torch.full_like(x, torch.finfo(torch.float32).max), torch.zeros_like(x)]:
        section = REFERENCE.write_one_bits(values, group)
        assert same_bits(CPU.write_one_bits(values, group), section)
        assert same_bits(CPU.read_one_bits(section, size, group), REFERENCE.read_one_bits(section, size, group))


@each_dtype
@pytest.mark.parametrize("group", [1, 3, 64, 128, 255])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 1000])
def test_two_bits_are_those_of_the_reference(dtype: torch.dtype, group: int, size: int):
    x = numbers(size, dtype, seed=size)
    for values in [x, x * 1e30, x * 1e-37, torch.full_like(x, 0.1), torch.full_like(x, 1e5), torch.zeros_like(x)]:
        section = REFERENCE.write_two_bits(values, group)
        assert same_bits(CPU.write_two_bits(values, group), section)
        assert same_bits(CPU.read_two_bits(section, size, group), REFERENCE.read_two_bits(section, size, group))


def test_a_view_with_steps_is_read_as_it_is():
    values = torch.randn(200, generator=torch.Generator().manual_seed(0))[::2]
    assert same_bits(CPU.write_three_bits(values, 64), REFERENCE.write_three_bits(values.clone(), 64))
    assert same_bits(CPU.write_one_bits(values, 64), REFERENCE.write_one_bits(values.clone(), 64))
    assert same_bits(CPU.write_two_bits(values, 64), REFERENCE.write_two_bits(values.clone(), 64))


def test_the_processor_has_numba():
    assert type(value_kernels_for(torch.device("cpu"))) is CpuValueKernels
    assert type(value_kernels_for(torch.device("meta"))) is ValueKernels


@each_dtype
@pytest.mark.parametrize("group", [1, 3, 64, 128, 255])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 65, 1000])
def test_short_three_bits_are_those_of_the_reference(dtype: torch.dtype, group: int, size: int):
    x = numbers(size, dtype, seed=size)
    cases = [x, x.sign() * (x.abs() + 1), x * 1e30, x * 1e-37, x.abs().exp().clamp(max=1e38), torch.zeros_like(x)]
    for values in cases:
        section = REFERENCE.write_short_three_bits(values, group)
        assert same_bits(CPU.write_short_three_bits(values, group), section)
        # Both write the values of three bits.
        expected = REFERENCE.read_three_bits(REFERENCE.write_three_bits(values, group), size, group)
        for kernels in (CPU, REFERENCE):
            decoded, end = kernels.read_short_three_bits(section, size, group)
            assert same_bits(decoded, expected)
            assert (end + 7) // 8 == section.numel()


@given(st.binary(min_size=4, max_size=40), st.integers(1, 255), st.integers(0, 160))
def test_short_three_bits_of_anything(data: bytes, group: int, count: int):
    # Ranks may need more bits than there are, and heads may be any numbers.
    while 4 * -(-count // group) + (2 * count + 7) // 8 > len(data):
        count -= 1
    section = torch.tensor(list(data), dtype=torch.uint8)
    (ours, our_end), (theirs, their_end) = (
        kernels.read_short_three_bits(section, count, group) for kernels in (CPU, REFERENCE)
    )
    assert our_end == their_end
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
