"""The envelope: a round trip changes nothing, and altered payloads are refused."""

import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.codecs import HEADER_BYTES, Envelope, PayloadError, open_envelope, seal, sealed_bytes
from lightning_sparsecomm.codecs.payload import open_length, seal_length
from tests.reference.payloads import envelope as reference_envelope

TENSORS = [("weight", (2, 3)), ("bias", (2,)), ("scale", ())]
LAYOUT = Layout(TENSORS)


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def forged(flags: int, content: bytes) -> torch.Tensor:
    """A payload whose checksum is right, whatever its fields say."""
    head = struct.pack("<2sBBII", b"LS", 1, flags, LAYOUT.fingerprint, len(content))
    return tensor_of(head + struct.pack("<I", zlib.crc32(content, zlib.crc32(head))) + content)


@st.composite
def envelopes(draw: st.DrawFn) -> tuple[list[tuple[str, tuple[int, ...]]], bytes, list[bool] | None, int | None]:
    segments = draw(st.integers(0, 19))
    tensors = [(f"p{i}", (i,)) for i in range(segments)]
    present = draw(st.none() | st.lists(st.booleans(), min_size=segments, max_size=segments))
    nonfinite = draw(st.none() | st.integers(0, segments - 1)) if segments else None
    return tensors, draw(st.binary(max_size=40)), present, nonfinite


@given(envelopes(), st.binary(max_size=9))
def test_opens_what_was_sealed(case, padding):
    tensors, body, present, nonfinite = case
    layout = Layout(tensors)
    payload = seal(Envelope(tensor_of(body), present, nonfinite), layout)
    assert payload.dtype == torch.uint8
    assert bytes(payload.tolist()) == reference_envelope(body, tensors, present, nonfinite)
    assert payload.numel() <= sealed_bytes(len(body), layout)

    opened = open_envelope(torch.cat([payload, tensor_of(padding)]), layout, rank=0)
    assert bytes(opened.body.tolist()) == (body if nonfinite is None else b"")
    assert opened.present == (None if present is None or all(present) else present)
    assert opened.nonfinite_segment == nonfinite


def test_bound_is_reached():
    payload = seal(Envelope(tensor_of(b"12345"), [True, False, True]), LAYOUT)
    assert payload.numel() == sealed_bytes(5, LAYOUT) == HEADER_BYTES + 1 + 5
    empty = tensor_of(b"")
    assert seal(Envelope(empty, [True, False, True], 0), LAYOUT).numel() == sealed_bytes(0, LAYOUT)


@pytest.mark.parametrize("present", [None, [True, False, True]])
@pytest.mark.parametrize("nonfinite", [None, 2])
def test_any_altered_byte_is_noticed(present, nonfinite):
    payload = seal(Envelope(tensor_of(bytes(range(21))), present, nonfinite), LAYOUT)
    # Padded, so that a greater length field still lies within the received bytes.
    padded = torch.cat([payload, torch.zeros(300, dtype=torch.uint8)])
    for at in range(payload.numel()):
        for change in range(1, 256):
            altered = padded.clone()
            altered[at] ^= change
            with pytest.raises(PayloadError, match="rank 3's payload: "):
                open_envelope(altered, LAYOUT, rank=3)


@pytest.mark.parametrize("nonfinite", [None, 2])
def test_any_truncation_is_noticed(nonfinite):
    payload = seal(Envelope(tensor_of(b"body"), [True, False, True], nonfinite), LAYOUT)
    for length in range(payload.numel()):
        with pytest.raises(PayloadError, match="rank 1's payload: "):
            open_envelope(payload[:length], LAYOUT, rank=1)


def test_messages_say_where_what_and_why():
    payload = seal(Envelope(tensor_of(b"body")), LAYOUT)

    def message(altered: torch.Tensor, layout: Layout = LAYOUT) -> str:
        with pytest.raises(PayloadError) as caught:
            open_envelope(altered, layout, rank=1)
        return str(caught.value)

    def with_byte(at: int, value: int) -> torch.Tensor:
        altered = payload.clone()
        altered[at] = value
        return altered

    other = Layout([("weight", (2, 4))])
    assert message(payload, other) == (
        f"rank 1's payload: layout fingerprint at byte 4 is 0x{LAYOUT.fingerprint:08x},"
        f" expected 0x{other.fingerprint:08x}: the ranks train different parameters."
    )
    assert "magic at byte 0 is 0x4c54, expected 0x4c53" in message(with_byte(1, 0x54))
    assert "version at byte 2 is 2, expected 1: install the same" in message(with_byte(2, 2))
    assert "body length at byte 8 is 5, expected at most the 4 bytes" in message(with_byte(8, 5))
    assert "CRC-32 at byte 12 is" in message(with_byte(16, 0))
    assert "the end at byte 7 is too early, expected a header of 16 bytes" in message(payload[:7])
    assert "flags at byte 3 is 0x04, expected bits 0 and 1 only" in message(forged(4, b"body"))
    assert "body length at byte 8 is 0, expected at least 1, the presence" in message(forged(1, b""))
    assert "presence bitmap at byte 16 is 0x07, expected a 0 among its 3 bits" in message(forged(1, b"\x07body"))
    assert "presence bitmap at byte 16 is 0x0b" in message(forged(1, b"\x0bbody"))
    assert "body length at byte 8 is 5, expected 4, since flag bit 1" in message(forged(2, b"\0\0\0\0\0"))
    assert "body length at byte 8 is 4, expected 5, since flag bit 1" in message(forged(3, b"\x03\0\0\0"))
    assert "segment that is not finite at byte 16 is 3, expected less than 3" in message(forged(2, b"\x03\0\0\0"))
    assert "segment that is not finite at byte 17 is 256" in message(forged(3, b"\x03\0\1\0\0"))


def test_seal_refuses_what_does_not_fit():
    empty = tensor_of(b"")
    with pytest.raises(ValueError, match="one of the layout's 3 segments; got 3"):
        seal(Envelope(empty, None, 3), LAYOUT)
    with pytest.raises(ValueError, match="one of the layout's 3 segments; got -1"):
        seal(Envelope(empty, None, -1), LAYOUT)
    with pytest.raises(ValueError, match="each of 3 segments; got 2"):
        seal(Envelope(empty, [True, False]), LAYOUT)
    with pytest.raises(ValueError, match=r"body must have at most 4,294,967,295 bytes, .*; got 4,294,967,296"):
        seal(Envelope(torch.zeros(1, dtype=torch.uint8).expand(2**32)), LAYOUT)


def test_a_length_that_was_altered_or_is_of_another_round_is_refused() -> None:
    number = seal_length(1234, seed=7)
    assert open_length(number, 7, most=2000, rank=1) == 1234
    for bit in range(63):
        with pytest.raises(PayloadError, match="rank 1's payload: the checksum of its length"):
            open_length(number ^ 1 << bit, 7, most=2**40, rank=1)
    with pytest.raises(PayloadError, match="checksum of its length"):
        open_length(number, 8, most=2000, rank=1)
    with pytest.raises(PayloadError, match="expected 16 to 1000"):
        open_length(number, 7, most=1000, rank=1)
