"""The envelope around every payload: format, layout, presence and checksum. See docs/formats.md."""

import struct
import zlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.kernels import checksum_kernels_for

HEADER_BYTES = 16
FORMAT_VERSION = 1
_MAGIC = b"LS"
_SOME_ABSENT = 1
_NONFINITE = 2
# Fewer bytes are read in less time than it takes to start the kernels that read them on a GPU.
_SHORT = 1 << 18
_SEGMENT_BYTES = 4
_MAX_LENGTH = 2**32 - 1
# Of a length that is sent ahead; the rest of 63 bits is its checksum.
_LENGTH_BITS = 40
# Sparse bodies of our own codecs are shorter: they have a head of 16 bytes, and each element costs at most 5 bytes of
# position and 8 of value.
_BODY_BYTES = 32
_ELEMENT_BYTES = 16


class PayloadError(RuntimeError):
    """Received bytes do not follow the format: they are damaged, or come from another program or another model.

    >>> decode_sparse(torch.zeros(3, dtype=torch.uint8), size=8)
    Traceback (most recent call last):
    lightning_sparsecomm.codecs.payload.PayloadError: sparse body: ends at byte 3, expected a head of 16 bytes.
    """


def wrong_section(section: str, found: str, expected: object) -> PayloadError:
    """The error for a section of a sparse body."""
    return PayloadError(f"{section} section: {found}, expected {expected}.")


class Envelope(NamedTuple):
    """What one rank tells the others in one round.

    Attributes:
        body: `[b]` uint8, a compressor's payload. Not sent if `nonfinite_segment` is given: then `[0]` when opened.
        present: For each segment of the layout, whether the rank has a gradient for it; None if it has all.
        nonfinite_segment: The first segment whose gradient is not finite on the rank; None if all are finite.
    """

    body: Tensor
    present: list[bool] | None = None
    nonfinite_segment: int | None = None


def sealed_bytes(body_bytes: int, layout: Layout) -> int:
    """The greatest length of an envelope whose body has at most `body_bytes` bytes."""
    return HEADER_BYTES + _bitmap_bytes(layout) + max(body_bytes, _SEGMENT_BYTES)


def most_bytes(layout: Layout) -> int:
    """The greatest length of any envelope for this layout, with any compressor: receivers refuse a greater one."""
    return sealed_bytes(_BODY_BYTES + _ELEMENT_BYTES * layout.size, layout)


def check_length(length: int, most: int, rank: int) -> None:
    """Raises `PayloadError` for a length, sent ahead of a payload, that is less than a header's or more than `most`.

    Call it before memory is allocated for the payload.
    """
    if not HEADER_BYTES <= length <= most:
        raise PayloadError(
            f"rank {rank}'s payload: length, sent ahead of it, is {length}, expected {HEADER_BYTES} to {most}: it was"
            " damaged in transit, or the ranks train different parameters."
        )


def seal_length(length: int, seed: int) -> int:
    """A length to be sent ahead of a payload, as one 64-bit integer with a checksum.

    `seed` is the round's, so an earlier round's number does not pass for this one's.
    """
    return length | _length_checksum(length, seed) << _LENGTH_BITS


def open_length(number: int, seed: int, most: int, rank: int) -> int:
    """The length in what rank `rank` has sealed. Raises `PayloadError` if it was altered, or is more than `most`.

    If it were believed, ranks would gather payloads of different sizes, and Gloo would end the process.
    """
    length = number & (1 << _LENGTH_BITS) - 1
    if number != seal_length(length, seed):
        raise PayloadError(
            f"rank {rank}'s payload: the checksum of its length, sent ahead of it, does not match: it was damaged in"
            " transit, or the ranks are in different steps."
        )
    check_length(length, most, rank)
    return length


def _length_checksum(length: int, seed: int) -> int:
    checksum = zlib.crc32(length.to_bytes(8, "little") + seed.to_bytes(8, "little"))
    return checksum & (1 << 63 - _LENGTH_BITS) - 1


def seal(envelope: Envelope, layout: Layout) -> Tensor:
    """Packs an envelope into one payload. `open_envelope` unpacks it, and refuses it if any byte was altered.

    The payload is `[bytes]` uint8 on the body's device. It adds 16 bytes to the body, and one bit for each segment if
    some are absent.

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
            raise ValueError(f"present must have a bool for each of {segments} segments; got {len(present)}.")
        if not all(present):
            flags |= _SOME_ABSENT
            bitmap = np.packbits(np.array(present, dtype=np.bool_), bitorder="little")
            parts.insert(0, _from_bytes(bitmap.tobytes(), device))
    length = sum(part.numel() for part in parts)
    if length > _MAX_LENGTH:
        raise ValueError(
            f"body must have at most {_MAX_LENGTH:,} bytes, as its length has 32 bits; got {length:,}."
            " Send a lower density, or give the parameters to more than one optimizer or sync."
        )
    content = parts[0] if len(parts) == 1 else torch.cat(parts)
    head = struct.pack("<2sBBII", _MAGIC, FORMAT_VERSION, flags, layout.fingerprint, length)
    return torch.cat([_from_bytes(head + struct.pack("<I", _checksum(head, content)), device), content])


def open_envelope(payload: Tensor, layout: Layout, rank: int) -> Envelope:
    """Unpacks what `seal` packed. Each field is checked before it is used, and all bytes by their checksum.

    Args:
        payload: `[bytes]` uint8, from any source. Bytes after the envelope, such as an all-gather's padding, are
            ignored.
        layout: This rank's layout; the sender's must be equal.
        rank: The sender, for messages.

    Returns:
        The envelope; its body is a view of `payload`.

    Raises:
        PayloadError: The payload is truncated or altered, or has another format version or another layout.
    """

    def wrong(field: str, offset: int, value: object, expected: str) -> PayloadError:
        return PayloadError(f"rank {rank}'s payload: {field} at byte {offset} is {value}, expected {expected}")

    if payload.numel() < HEADER_BYTES:
        raise wrong("the end", payload.numel(), "too early", f"a header of {HEADER_BYTES} bytes: it was truncated.")
    header = payload[:HEADER_BYTES].cpu().numpy().tobytes()
    magic, version, flags, fingerprint, length, checksum = struct.unpack("<2sBBIII", header)
    if magic != _MAGIC:
        raise wrong("magic", 0, f"0x{magic.hex()}", f"0x{_MAGIC.hex()}: these are not lightning_sparsecomm's bytes.")
    if version != FORMAT_VERSION:
        raise wrong("version", 2, version, f"{FORMAT_VERSION}: install the same lightning_sparsecomm on all ranks.")
    if length > payload.numel() - HEADER_BYTES:
        raise wrong("body length", 8, length, f"at most the {payload.numel() - HEADER_BYTES} bytes that follow.")
    content = payload[HEADER_BYTES : HEADER_BYTES + length]
    # Checked before the fields below: an error in those is then the sender's, not a damaged bit.
    actual = _checksum(header[:12], content)
    if checksum != actual:
        raise wrong("CRC-32", 12, f"0x{checksum:08x}", f"0x{actual:08x}: the payload was damaged in transit.")
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


def readable(payloads: Tensor, on_gpus: bool) -> Tensor:
    """Payloads, `[W, bytes]` uint8, where they are read fastest: short ones on the CPU, and all unless `on_gpus`."""
    return payloads if on_gpus and payloads.shape[1] >= _SHORT else payloads.cpu()


def _bitmap_bytes(layout: Layout) -> int:
    return (len(layout.segments) + 7) // 8


def _from_bytes(data: bytes, device: torch.device) -> Tensor:
    # A bytearray, because torch warns about read-only memory.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _checksum(head: bytes, content: Tensor) -> int:
    return checksum_kernels_for(content.device).crc32(content, zlib.crc32(head))
