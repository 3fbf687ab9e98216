"""Dense vectors in 8, 4 or 2 bits for each element, with scales or magnitudes for each block."""

from typing import Any

import pytest
import torch

from lightning_sparsecomm.codecs import Blockwise, PayloadError, TwoBitBlocks, dense_codec
from lightning_sparsecomm.testing.samples import damaged, vectors


@pytest.mark.few(14)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", [1, 7, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 2, 255, 256, 257, 1000])
def test_an_element_is_off_by_half_a_scale(bits: Any, block: int, dtype: torch.dtype, size: int) -> None:
    codec = Blockwise(bits, block)
    for kind, x in vectors(size, dtype).items():
        before = x.clone()
        data = codec.encode(x)
        assert data.dtype == torch.uint8
        assert data.numel() == codec.size_bytes(size) == 4 * -(-size // block) + (size if bits == 8 else -(-size // 2))
        decoded = codec.decode(data, size)
        assert decoded.dtype == torch.float32
        assert torch.equal(x, before)
        assert bool(decoded.isfinite().all())
        if dtype == torch.float64 and kind == "the largest numbers":
            continue
        for part, found in zip(x.split(block), decoded.double().split(block)):
            largest = float(part.abs().max()) if size else 0.0
            # Numbers below float32's smallest are rounded to zero or to that.
            off = (part - found).abs() - largest * (0.5 / codec.most + 2e-6)
            assert bool((off <= 1e-43 * codec.most).all())


def test_what_is_a_multiple_is_exact() -> None:
    for codec in (Blockwise(8, 16), Blockwise(4, 16)):
        x = torch.arange(-codec.most, codec.most + 1).repeat_interleave(16 // 2) * 0.25
        x[::8] = codec.most * 0.25
        torch.testing.assert_close(codec.decode(codec.encode(x), x.numel()), x)


def test_bytes_are_as_the_format_says() -> None:
    """Worked out by hand, after docs/formats.md."""
    x = torch.tensor([7.0, -3.2, 0.4, -14.0, 2.0])
    four = [0, 0, 0x80, 0x3F, 0, 0, 0, 0x40, 0xD7, 0x90, 0x01]
    assert Blockwise(4, 3).encode(x).tolist() == four
    eight = [*torch.tensor([7 / 127, 14 / 127]).view(torch.uint8).tolist()]
    assert Blockwise(8, 3).encode(x).tolist() == [*eight, 127, 256 - 58, 7, 256 - 127, 18]


@pytest.mark.parametrize("bits", [8, 4])
def test_damaged_bytes_decode_to_finite_numbers_or_are_refused(bits: Any) -> None:
    codec = Blockwise(bits, 8)
    data = codec.encode(torch.randn(21))
    refused = []
    for what, altered in damaged(data):
        try:
            decoded = codec.decode(altered, 21)
        except PayloadError as error:
            refused.append(str(error))
        else:
            assert decoded.shape == (21,)
            assert bool(decoded.isfinite().all()), what
    assert len(refused) >= 6
    assert all(text.startswith("quantized vector: ") for text in refused)


@pytest.mark.parametrize(
    ("codec", "data", "count", "text"),
    [
        (Blockwise(8, 4), [0, 0, 0x80, 0x3F, 0x80], 1, "a multiple is below -127"),
        (Blockwise(4, 4), [0, 0, 0x80, 0x3F, 0x08], 1, "a multiple is below -7"),
        (Blockwise(4, 4), [0, 0, 0x80, 0x3F, 0x11], 1, "the last 4 bits are not 0"),
        (Blockwise(8, 4), [0, 0, 0x80, 0xBF, 1], 1, "a scale is not from 0 to"),
        (Blockwise(8, 4), [0, 0, 0xC0, 0x7F, 1], 1, "a scale is not from 0 to"),
        (Blockwise(8, 4), [0, 0, 0x80, 0x3F], 1, "has 4 bytes, expected 5 for 1 elements"),
    ],
)
def test_what_encode_never_writes_is_refused(codec: Blockwise, data: list[int], count: int, text: str) -> None:
    with pytest.raises(PayloadError, match=text):
        codec.decode(torch.tensor(data, dtype=torch.uint8), count)


@pytest.mark.parametrize("bits", [2, 16, "8", True, 8.5])
def test_refuses_other_bits(bits: Any) -> None:
    with pytest.raises(ValueError, match="bits must be 8 or 4, for each element on the wire; got"):
        Blockwise(bits)


@pytest.mark.parametrize("block", [0, -1, 2.0, True])
def test_refuses_blocks_without_elements(block: Any) -> None:
    with pytest.raises(ValueError, match=r"block must be a whole number, at least 1: .*got .*Use 256"):
        Blockwise(8, block)


@pytest.mark.parametrize("block", [1, 7, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 3, 127, 128, 129, 1000])
def test_two_bits_are_never_farther_than_zero(block: int, dtype: torch.dtype, size: int) -> None:
    """So what error feedback keeps never grows by rounding. That holds for each block."""
    codec = TwoBitBlocks(block)
    for x in vectors(size, dtype).values():
        data = codec.encode(x)
        assert data.numel() == codec.size_bytes(size) == 4 * -(-size // block) + -(-size // 4)
        decoded = codec.decode(data, size)
        assert decoded.dtype == torch.float32
        assert bool(decoded.isfinite().all())
        for part, found in zip(x.double().split(block), decoded.double().split(block)):
            # Scaled, as squares of the largest numbers exceed float64.
            scale = float(part.abs().max()) if part.numel() else 0.0
            scale = scale or 1.0
            assert float(((part - found) / scale).square().sum()) <= float((part / scale).square().sum()) * (1 + 1e-6)


def test_of_normal_values_two_bits_lose_an_eighth() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    codec = TwoBitBlocks()
    lost = x - codec.decode(codec.encode(x), x.numel())
    assert 0.11 < float(lost.square().sum() / x.square().sum()) < 0.13


def test_damaged_two_bits_decode_to_finite_numbers_or_are_refused() -> None:
    codec = TwoBitBlocks(8)
    refused = 0
    for what, altered in damaged(codec.encode(torch.randn(21))):
        try:
            decoded = codec.decode(altered, 21)
        except PayloadError:
            refused += 1
        else:
            assert decoded.shape == (21,)
            assert bool(decoded.isfinite().all()), what
    assert refused >= 6


@pytest.mark.parametrize(
    ("bits", "block", "text"),
    [
        (3, None, "bits must be 8, 4 or 2"),
        (True, None, "bits must be 8, 4 or 2"),
        (2, 256, "block must be a whole number from 1 to 255 with 2 bits"),
        (2, 0, "block must be a whole number from 1 to 255 with 2 bits"),
        (4, 0, "block must be a whole number, at least 1"),
    ],
)
def test_no_such_codec(bits: Any, block: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        dense_codec(bits, block)
