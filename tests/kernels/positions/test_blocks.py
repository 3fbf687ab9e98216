"""The kernels for blocks with their own codes, in numba and in torch: bit for bit, and against the definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.kernels import PositionKernels
from lightning_sparsecomm.kernels.positions.blocks import LAST_CODE, ParsedBlocks
from lightning_sparsecomm.kernels.positions.cpu import CpuPositionKernels
from tests.kernels.bits import same_bits
from tests.kernels.positions.test_cpu import bits_of, positions_of
from tests.reference.payloads import adaptive_section, adaptive_word, low_first, near

KERNELS = [PositionKernels(), CpuPositionKernels()]
REFERENCE, CPU = KERNELS

each_kernels = pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: type(kernels).__name__)


@st.composite
def runs(draw: st.DrawFn) -> list[int]:
    """Several blocks, each with runs of its own scale."""
    found: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        most = draw(st.sampled_from([0, 1, 3, 10, 100, 5000]))
        length = draw(st.sampled_from([1, 2, 63, 64, 65]))
        chance = draw(st.randoms(use_true_random=False))
        found += [
            chance.randint(0, most) if chance.random() < 0.9 else chance.randint(0, 40 * most) for _ in range(length)
        ]
    return found


def same_parsed(ours: ParsedBlocks, theirs: ParsedBlocks) -> bool:
    return same_bits(ours.indices, theirs.indices) and ours[1:] == theirs[1:]


def stream(runs: list[int], codes: list[int]) -> str:
    """The definition, bit by bit."""
    words = [adaptive_word(run, codes[i // 64]) for i, run in enumerate(runs)]
    changes = [before != code for before, code in zip([0, *codes], codes)]
    named = "".join(low_first(code, 6) for code, change in zip(codes, changes) if change)
    return "".join("01"[change] for change in changes) + named + "".join(map("".join, zip(*words)))


@given(runs())
def test_the_chosen_codes(runs: list[int]):
    indices, expected = positions_of(runs), adaptive_section(runs)
    for kernels in KERNELS:
        codes = kernels.choose_codes(indices)
        assert codes.dtype == torch.uint8 and codes.numel() == -(-len(runs) // 64)
        section = kernels.write_blocks(indices, codes)
        assert section.tolist() == list(expected)
        assert (kernels.blocks_bits(indices, codes) + 7) // 8 == len(expected)


@given(runs(), st.data())
def test_any_codes(runs: list[int], data: st.DataObject):
    indices, count = positions_of(runs), len(runs)
    blocks = [runs[i : i + 64] for i in range(0, count, 64)]
    # Those that would not take thousands of bits for a run.
    codes = [data.draw(st.sampled_from([*near(block, 0) - {0}, *range(20, LAST_CODE + 1)])) for block in blocks]
    expected = stream(runs, codes)
    size = int(indices[-1]) + 1 if runs else 0
    for kernels in KERNELS:
        section = kernels.write_blocks(indices, torch.tensor(codes, dtype=torch.uint8))
        assert bits_of(section) == expected + "0" * (-len(expected) % 8)
        assert kernels.blocks_bits(indices, torch.tensor(codes, dtype=torch.uint8)) == len(expected)
        read, begin = kernels.read_codes(section, count)
        assert read.tolist() == codes and expected[begin:] == "".join(stream(runs, codes)[begin:])
        for limit in (size, size + 1, 2**32 - 1):
            assert same_parsed(
                kernels.read_blocks(section, count, limit), ParsedBlocks(indices, count, len(expected), -1)
            )
        if count:
            # The last position is not below the size.
            parsed = kernels.read_blocks(section, count, size - 1)
            assert same_parsed(parsed, ParsedBlocks(indices[:-1], count - 1, 0, -1))


@given(st.binary(max_size=60), st.integers(0, 400) | st.just(2**32 - 1), st.integers(0, 480))
def test_of_anything(data: bytes, size: int, count: int):
    section = torch.tensor(list(data), dtype=torch.uint8)
    while count + -(-count // 64) > 8 * len(data):
        count -= 1
    reference, cpu = (kernels.read_blocks(section, count, size) for kernels in KERNELS)
    assert same_parsed(reference, cpu)
    assert cpu.indices.numel() <= cpu.held <= count and 0 <= cpu.end <= 8 * len(data)
    if cpu.held == count:
        codes, _ = REFERENCE.read_codes(section, count)
        for kernels in KERNELS:
            written = kernels.write_blocks(cpu.indices, codes)
            assert bits_of(written)[: cpu.end] == bits_of(section)[: cpu.end]


@each_kernels
@pytest.mark.parametrize("codes", ["0" * 8, "1 100000", "1 010000"])
def test_bits_around_a_section_are_not_read(kernels: PositionKernels, codes: str):
    bits = codes.replace(" ", "").ljust(8, "0")
    # A prefix that does not end within the section, and ones around it that would end it.
    buffer = torch.full((26,), 0xFF, dtype=torch.uint8)
    buffer[8:18] = torch.tensor([int(bits[::-1], 2), *[0] * 9])
    parsed = kernels.read_blocks(buffer[8:18], 1, 2**32 - 1)
    assert (parsed.indices.numel(), parsed.held) == (0, 0)


@each_kernels
def test_large_positions(kernels: PositionKernels):
    indices = torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 2])
    for code in (58, 59, 60, 61, 62, 63):
        section = kernels.write_blocks(indices, torch.tensor([code], dtype=torch.uint8))
        assert bits_of(section).startswith(stream([0, 2**31 - 2, 0, 2**31 - 3], [code]))
        assert kernels.read_blocks(section, 4, 2**32 - 1).indices.tolist() == indices.tolist()


@each_kernels
def test_positions_need_not_be_contiguous(kernels: PositionKernels):
    indices = torch.arange(3, 900, 5)
    strided = torch.stack([indices, -indices], 1)[:, 0]
    codes = kernels.choose_codes(indices)
    assert same_bits(kernels.choose_codes(strided), codes)
    assert same_bits(kernels.write_blocks(strided, codes), kernels.write_blocks(indices, codes))


def test_long_selections():
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(200, generator=generator).pow(3).repeat_interleave(500)
    indices = (torch.rand(chances.numel(), generator=generator) < chances).nonzero().view(-1)
    codes = CPU.choose_codes(indices)
    assert len(set((codes % 3).tolist())) == 3
    assert same_bits(codes, REFERENCE.choose_codes(indices))
    section = CPU.write_blocks(indices, codes)
    assert same_bits(section, REFERENCE.write_blocks(indices, codes))
    for kernels in KERNELS:
        assert same_bits(kernels.read_blocks(section, indices.numel(), chances.numel()).indices, indices)


@pytest.mark.parametrize("scale", [0.5, 3.0, 100.0])
def test_chosen_codes_of_many_blocks(scale: float) -> None:
    """Also where the code of the block before is worth keeping by a bit."""
    gaps = torch.rand(64 * 1000).log().neg() * scale * torch.rand(1000).add(0.5).repeat_interleave(64)
    indices = (gaps.long() + 1).cumsum(0) - 1
    assert same_bits(REFERENCE.choose_codes(indices), CPU.choose_codes(indices))
