"""The envelope around every payload: what it is, whose layout it fits, whether it came whole. See docs/formats.md."""

import struct
import zlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sparsecomm.layout import Layout

HEADER_BYTES = 16
FORMAT_VERSION = 1
_MAGIC = b"LS"
_SOME_ABSENT = 1
_NONFINITE = 2
_SEGMENT_BYTES = 4
_MAX_LENGTH = 2**32 - 1
# No sparse body is longer: it has a head of 16 bytes, and for each element at most 5 of position and 8 of value.
_BODY_BYTES = 32
_ELEMENT_BYTES = 16


class PayloadError(RuntimeError):
    """The bytes that arrived are not what the format says: another program's, another model's, or damaged."""


class Envelope(NamedTuple):
    """What one rank tells the others in one round.

    Attributes:
        body: `[b]` uint8, a compressor's payload; not sent, and `[0]` when opened, where `nonfinite_segment` is given.
        present: For each segment of the layout, whether this rank had a gradient for it; None if for all.
        nonfinite_segment: The first segment whose gradient is not finite on this rank; None if all are.
    """

    body: Tensor
    present: list[bool] | None = None
    nonfinite_segment: int | None = None


def sealed_bytes(body_bytes: int, layout: Layout) -> int:
    """The length that no envelope around a body of at most `body_bytes` exceeds, whatever its flags."""
    return HEADER_BYTES + _bitmap_bytes(layout) + max(body_bytes, _SEGMENT_BYTES)


def most_bytes(layout: Layout) -> int:
    """The length that no envelope for this layout exceeds, whatever is sent and by what method: 16 bytes for each
    element, and a few. A compressor may write no more, for receivers believe no greater length."""
    return sealed_bytes(_BODY_BYTES + _ELEMENT_BYTES * layout.size, layout)


def check_length(length: int, most: int, rank: int) -> None:
    """Refuses a length that arrived ahead of its payload, before anything is allocated by it.

    Raises:
        PayloadError: It is less than an envelope's header, or more than `most`.
    """
    if not HEADER_BYTES <= length <= most:
        raise PayloadError(
            f"rank {rank}'s payload: length, sent ahead of it, is {length}, expected {HEADER_BYTES} to {most}: it was"
            " damaged on its way, or the ranks train different parameters."
        )


def seal(envelope: Envelope, layout: Layout) -> Tensor:
    """One payload that `open_envelope` turns back into `envelope`, and refuses if a byte of it was altered.

    Costs 16 bytes, and one bit for each segment where some are absent. The body is read on the CPU for its checksum.

    Returns:
        `[bytes]` uint8 on the body's device.

    Raises:
        ValueError: `present` or `nonfinite_segment` does not fit the layout, or the length does not fit 32 bits.
    """
    segments, device = len(layout.segments), envelope.body.device
    present, nonfinite = envelope.present, envelope.nonfinite_segment
    flags, parts = 0, [envelope.body]
    if nonfinite is not None:
        if not 0 <= nonfinite < segments:
            raise ValueError(f"nonfinite_segment must be one of the layout's {segments} segments; got {nonfinite}.")
        flags, parts = _NONFINITE, [_from_bytes(struct.pack("<I", nonfinite), device)]
    if present is not None:
        if len(present) != segments:
            raise ValueError(f"present must say yes or no for each of {segments} segments; got {len(present)} of them.")
        if not all(present):
            flags |= _SOME_ABSENT
            bitmap = np.packbits(np.array(present, dtype=np.bool_), bitorder="little")
            parts.insert(0, _from_bytes(bitmap.tobytes(), device))
    length = sum(part.numel() for part in parts)
    if length > _MAX_LENGTH:
        raise ValueError(
            f"a payload's body can have at most {_MAX_LENGTH:,} bytes; got {length:,}."
            " Send a lower density, or give the parameters to more than one optimizer or sync."
        )
    content = parts[0] if len(parts) == 1 else torch.cat(parts)
    head = struct.pack("<2sBBII", _MAGIC, FORMAT_VERSION, flags, layout.fingerprint, length)
    return torch.cat([_from_bytes(head + struct.pack("<I", _checksum(head, content)), device), content])


def open_envelope(payload: Tensor, layout: Layout, rank: int) -> Envelope:
    """What `seal` was given; everything is checked before it is used, and the body's bytes by their checksum.

    Args:
        payload: `[bytes]` uint8; bytes behind the envelope (an all-gather's padding) are ignored.
        layout: This rank's layout: the sender's must be equal.
        rank: Whom the payload came from, for messages.

    Returns:
        The envelope; its body is a view of `payload`.

    Raises:
        PayloadError: The payload is cut off, altered, of another format version, or of another layout.
    """

    def wrong(field: str, offset: int, value: object, expected: str) -> PayloadError:
        return PayloadError(f"rank {rank}'s payload: {field} at byte {offset} is {value}, expected {expected}")

    if payload.numel() < HEADER_BYTES:
        raise wrong("the end", payload.numel(), "too early", f"a header of {HEADER_BYTES} bytes: it was cut off.")
    header = payload[:HEADER_BYTES].cpu().numpy().tobytes()
    magic, version, flags, fingerprint, length, checksum = struct.unpack("<2sBBIII", header)
    if magic != _MAGIC:
        raise wrong("magic", 0, f"0x{magic.hex()}", f"0x{_MAGIC.hex()}: these are not lightning_sparsecomm's bytes.")
    if version != FORMAT_VERSION:
        raise wrong("version", 2, version, f"{FORMAT_VERSION}: install the same lightning_sparsecomm on all ranks.")
    if length > payload.numel() - HEADER_BYTES:
        raise wrong("body length", 8, length, f"at most the {payload.numel() - HEADER_BYTES} bytes that follow.")
    content = payload[HEADER_BYTES : HEADER_BYTES + length]
    # Before the fields below, so that what they say is the sender's word and not a damaged bit.
    actual = _checksum(header[:12], content)
    if checksum != actual:
        raise wrong("CRC-32", 12, f"0x{checksum:08x}", f"0x{actual:08x}: the payload was damaged on its way.")
    if flags & ~(_SOME_ABSENT | _NONFINITE):
        raise wrong("flags", 3, f"0x{flags:02x}", "bits 0 and 1 only: install the same version on all ranks.")
    if fingerprint != layout.fingerprint:
        expected = f"0x{layout.fingerprint:08x}: the ranks train different parameters."
        raise wrong("layout fingerprint", 4, f"0x{fingerprint:08x}", expected)

    segments, start = len(layout.segments), 0
    present: list[bool] | None = None
    if flags & _SOME_ABSENT:
        start = _bitmap_bytes(layout)
        if length < start:
            raise wrong("body length", 8, length, f"at least {start}, the presence bitmap's bytes.")
        bitmap = content[:start].cpu().numpy()
        bits: list[bool] = np.unpackbits(bitmap, bitorder="little").astype(np.bool_).tolist()
        present = bits[:segments]
        if any(bits[segments:]) or all(present):
            expected = f"a 0 among its {segments} bits and in all padding bits."
            raise wrong("presence bitmap", HEADER_BYTES, f"0x{bitmap.tobytes().hex()}", expected)
    if not flags & _NONFINITE:
        return Envelope(content[start:], present)
    if length - start != _SEGMENT_BYTES:
        raise wrong("body length", 8, length, f"{start + _SEGMENT_BYTES}, since flag bit 1 is set.")
    (segment,) = struct.unpack("<I", content[start:].cpu().numpy().tobytes())
    if segment >= segments:
        raise wrong("segment that is not finite", HEADER_BYTES + start, segment, f"less than {segments}.")
    return Envelope(content[length:], present, segment)


def _bitmap_bytes(layout: Layout) -> int:
    return (len(layout.segments) + 7) // 8


def _from_bytes(data: bytes, device: torch.device) -> Tensor:
    # A bytearray, since torch warns of memory that it may not write.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _checksum(head: bytes, content: Tensor) -> int:
    return zlib.crc32(content.cpu().contiguous().numpy().data, zlib.crc32(head))
