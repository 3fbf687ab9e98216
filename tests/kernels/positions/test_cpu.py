"""The position kernels in numba against the reference, bit for bit, and both against the definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparsecomm.kernels import Parsed, PositionKernels
from lightning_sparsecomm.kernels.positions.cpu import CpuPositionKernels
from tests.kernels.bits import same_bits

KERNELS = [PositionKernels(), CpuPositionKernels()]
# Most runs are short; some need escapes, and long ones need many words of ones.
RUNS = st.lists(
    st.integers(0, 20) | st.sampled_from([63, 64, 65, 65_534, 65_535, 65_536, 131_070, 200_000]), max_size=30
)

each_kernels = pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: type(kernels).__name__)


def positions_of(runs: list[int]) -> Tensor:
    return torch.tensor(runs, dtype=torch.int64).add_(1).cumsum(0).sub_(1)


def bits_of(section: Tensor) -> str:
    """The bits in stream order."""
    return "".join(f"{byte:08b}"[::-1] for byte in section.tolist())


def golomb(runs: list[int], remainder_bits: int) -> str:
    """The definition, bit by bit."""
    stream = ""
    for run in runs:
        quotient, remainder = divmod(run, 2**remainder_bits)
        stream += "1" * quotient + "0" + "".join(str(remainder >> i & 1) for i in range(remainder_bits))
    return stream


def same_parsed(ours: Parsed, theirs: Parsed) -> bool:
    return same_bits(ours.indices, theirs.indices) and ours[1:] == theirs[1:]


@given(RUNS, st.integers(0, 31))
def test_golomb(runs: list[int], remainder_bits: int):
    indices = positions_of(runs)
    stream = golomb(runs, remainder_bits)
    count, size = len(runs), int(indices[-1]) + 1 if runs else 0
    for kernels in KERNELS:
        section = kernels.write_golomb(indices, remainder_bits)
        assert section.dtype == torch.uint8
        assert bits_of(section) == stream + "0" * (-len(stream) % 8)
        assert kernels.golomb_bits(indices, remainder_bits) == len(stream)
        for limit in (size, size + 1, 2**32 - 1):
            assert same_parsed(
                kernels.read_golomb(section, count, limit, remainder_bits), Parsed(indices, count, len(stream))
            )
        if count:
            # The last position is not below the size, so only the code words before it count.
            end = len(golomb(runs[:-1], remainder_bits))
            assert same_parsed(
                kernels.read_golomb(section, count, size - 1, remainder_bits), Parsed(indices[:-1], count - 1, end)
            )


@given(st.binary(max_size=40), st.integers(0, 31), st.integers(0, 500) | st.just(2**32 - 1), st.integers(0, 320))
def test_golomb_of_anything(data: bytes, remainder_bits: int, size: int, count: int):
    section = torch.tensor(list(data), dtype=torch.uint8)
    count = min(count, 8 * len(data) // (1 + remainder_bits))
    reference, cpu = (kernels.read_golomb(section, count, size, remainder_bits) for kernels in KERNELS)
    assert same_parsed(reference, cpu)
    assert cpu.held <= count and cpu.indices.numel() == cpu.held and 0 <= cpu.end <= 8 * len(data)
    assert bits_of(KERNELS[0].write_golomb(cpu.indices, remainder_bits))[: cpu.end] == bits_of(section)[: cpu.end]


@each_kernels
@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 4096])
@pytest.mark.parametrize("remainder_bits", [0, 3, 31])
def test_golomb_of_only_ones_stays_within_the_section(kernels: PositionKernels, length: int, remainder_bits: int):
    # Zeros around the section would end the code word, but a reader must not look at them.
    buffer = torch.zeros(length + 16, dtype=torch.uint8)
    buffer[8 : length + 8] = 0xFF
    parsed = kernels.read_golomb(buffer[8 : length + 8], 8 * length // (1 + remainder_bits), 2**32 - 1, remainder_bits)
    assert (parsed.indices.numel(), parsed.held, parsed.end) == (0, 0, 0)


@pytest.mark.slow
def test_golomb_of_a_quotient_that_overflows():
    # 2^32 ones and a zero, with 31 bits of remainder: the position, 2^63, does not fit in int64.
    section = torch.full((2**29 + 4,), 0xFF, dtype=torch.uint8)
    section[-4:] = 0
    assert CpuPositionKernels().read_golomb(section, 1, 2**32 - 1, 31)[1:] == (0, 0)


@given(RUNS, st.integers(-3, 3))
def test_run_lengths(runs: list[int], more: int):
    indices = positions_of(runs)
    words = [word for run in runs for word in [0xFFFF] * (run // 0xFFFF) + [run % 0xFFFF]]
    count = max(0, len(runs) + more)
    for kernels in KERNELS:
        section = kernels.write_run_lengths(indices)
        assert section.tolist() == [byte for word in words for byte in (word & 0xFF, word >> 8)]
        assert kernels.run_length_words(indices) == len(words)
        parsed = kernels.read_run_lengths(section, count)
        assert same_parsed(parsed, Parsed(indices[:count], len(runs), len(words)))


@given(st.lists(st.integers(0, 2**16 - 1) | st.sampled_from([0xFFFF, 0]), max_size=30), st.integers(0, 31))
def test_run_lengths_of_anything(words: list[int], count: int):
    section = torch.tensor([byte for word in words for byte in (word & 0xFF, word >> 8)], dtype=torch.uint8)
    reference, cpu = (kernels.read_run_lengths(section, count) for kernels in KERNELS)
    assert same_parsed(reference, cpu)
    assert cpu.held == sum(word != 0xFFFF for word in words)
    assert cpu.end == max((i + 1 for i, word in enumerate(words) if word != 0xFFFF), default=0)


@given(st.binary(max_size=40), st.integers(-9, 9))
def test_bitmap(data: bytes, more: int):
    section = torch.tensor(list(data), dtype=torch.uint8)
    expected = [i for i, bit in enumerate(bits_of(section)) if bit == "1"]
    count = max(0, len(expected) + more)
    for kernels in KERNELS:
        parsed = kernels.read_bitmap(section, count)
        end = expected[-1] + 1 if expected else 0
        assert same_parsed(parsed, Parsed(torch.tensor(expected[:count], dtype=torch.int64), len(expected), end))
        for size in {end, 8 * len(data)}:
            written = kernels.write_bitmap(torch.tensor(expected, dtype=torch.int64), size)
            assert written.tolist() == list(data[: (size + 7) // 8])


@each_kernels
@given(flags=st.lists(st.booleans(), max_size=40), after=st.binary(max_size=2))
def test_flags(kernels: PositionKernels, flags: list[bool], after: bytes):
    section = kernels.write_flags(torch.tensor(flags, dtype=torch.bool))
    assert section.numel() == (len(flags) + 7) // 8
    assert bits_of(section) == "".join(str(int(flag)) for flag in flags).ljust(8 * section.numel(), "0")
    longer = torch.cat([section, torch.tensor(list(after), dtype=torch.uint8)])
    read = kernels.read_flags(longer, len(flags))
    assert read.dtype == torch.bool and read.tolist() == flags


@each_kernels
@given(spans=st.lists(st.tuples(st.integers(-5, 2**40), st.integers(0, 9)), max_size=20))
def test_spans(kernels: PositionKernels, spans: list[tuple[int, int]]):
    # Not contiguous: columns of one tensor.
    starts, lengths = torch.tensor(spans, dtype=torch.int64).view(-1, 2).unbind(1)
    numbers = kernels.spans(starts, lengths)
    assert numbers.dtype == torch.int64
    assert numbers.tolist() == [start + i for start, length in spans for i in range(length)]


@each_kernels
def test_large_positions(kernels: PositionKernels):
    indices = torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 2])
    for remainder_bits in (24, 31):
        section = kernels.write_golomb(indices, remainder_bits)
        assert bits_of(section).startswith(golomb([0, 2**31 - 2, 0, 2**31 - 3], remainder_bits))
        assert kernels.read_golomb(section, 4, 2**32 - 1, remainder_bits).indices.tolist() == indices.tolist()
    section = kernels.write_run_lengths(indices)
    assert kernels.read_run_lengths(section, 4).indices.tolist() == indices.tolist()


@each_kernels
def test_positions_need_not_be_contiguous(kernels: PositionKernels):
    for count in range(4):
        indices = torch.arange(3, 20, 5)[:count]
        strided = torch.stack([indices, -indices], 1)[:, 0]
        assert same_bits(kernels.write_golomb(strided, 2), kernels.write_golomb(indices, 2))
        assert same_bits(kernels.write_run_lengths(strided), kernels.write_run_lengths(indices))
        assert same_bits(kernels.write_bitmap(strided, 20), kernels.write_bitmap(indices, 20))


def test_long_selections():
    generator = torch.Generator().manual_seed(0)
    for size, count, remainder_bits in ((30_000, 3000, 3), (10**6, 1000, 9), (9000, 4500, 0)):
        indices = torch.randperm(size, generator=generator)[:count].sort().values
        reference, cpu = KERNELS
        section = cpu.write_golomb(indices, remainder_bits)
        assert same_bits(section, reference.write_golomb(indices, remainder_bits))
        parsed = cpu.read_golomb(section, count, size, remainder_bits)
        assert same_parsed(parsed, reference.read_golomb(section, count, size, remainder_bits))
        assert same_bits(parsed.indices, indices)
        bitmap = cpu.write_bitmap(indices, size)
        assert same_bits(bitmap, reference.write_bitmap(indices, size))
        assert same_parsed(cpu.read_bitmap(bitmap, count), reference.read_bitmap(bitmap, count))
