"""Selected elements as one self-contained payload: positions, then values. See docs/formats.md."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsecomm.codecs.compressor import Compressor
from lightning_sparsecomm.codecs.indices import INDEX_CODECS, IndexCodec, IndexCoding, Raw32
from lightning_sparsecomm.codecs.payload import PayloadError
from lightning_sparsecomm.codecs.selectors import Selector
from lightning_sparsecomm.codecs.values import VALUE_CODECS, Float32, ValueCodec
from lightning_sparsecomm.compensation import Wanted
from lightning_sparsecomm.layout import MAX_SIZE, Layout, SparseVector
from lightning_sparsecomm.rounds import Round

_HEAD = struct.Struct("<BBBBIII")


@dataclass(frozen=True)
class SparseCodec(Compressor):
    """What the selector chooses, each part in its codec: 16 bytes, the index section, the value section.

    Args:
        selector: Chooses the elements.
        values: How their values are sent.
        indices: How their positions are sent.

    Raises:
        ValueError: Receivers would not know a codec by its code.
    """

    selector: Selector
    # Defaults that all instances share: they are frozen.
    values: ValueCodec = Float32()  # noqa: RUF009
    indices: IndexCoding = Raw32()  # noqa: RUF009

    def __post_init__(self) -> None:
        parts: list[tuple[str, ValueCodec | IndexCodec, ValueCodec | IndexCodec | None]] = [
            ("values", self.values, VALUE_CODECS.get(self.values.code))
        ]
        parts.extend(("indices", codec, INDEX_CODECS.get(codec.code)) for codec in self.indices.codecs())
        for name, part, known in parts:
            if type(part) is not type(known):
                table = "VALUE_CODECS" if name == "values" else "INDEX_CODECS"
                raise ValueError(
                    f"{name} must be a codec that receivers know by its code; got {part!r}, whose code {part.code} is"
                    f" {known!r}'s. Enter it in {table} under a code of its own."
                )

    def wanted(self, round: Round) -> Sequence[Wanted]:
        return self.selector.wanted(round)

    def encode(self, x: Tensor, round: Round, candidates: Sequence[Tensor | None] = ()) -> Tensor:
        """The payload for the selected elements of `x`; `[bytes]` uint8.

        Raises:
            ValueError: `x` is not as long as the layout says, or the index section has 4 GiB or more.
        """
        if x.numel() != round.layout.size:
            raise ValueError(f"x must have the layout's {round.layout.size} elements; got {x.numel()}.")
        indices = self.selector.select(x, round, candidates)
        values = x if indices.numel() == x.numel() else x[indices]
        return encode_sparse(SparseVector(indices, values, x.numel()), round.layout, self.values, self.indices)

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        """What any `SparseCodec` encoded: the payload itself names its codecs. See `decode_sparse`."""
        return decode_sparse(payload, size)

    def bound_bytes(self, round: Round) -> int | None:
        count = self.selector.count(round)
        index_bytes = self.indices.bound_bytes(count, round.layout.size)
        value_bytes = self.values.bound_bytes(count, round.layout)
        return None if index_bytes is None or value_bytes is None else _HEAD.size + index_bytes + value_bytes


def encode_sparse(vector: SparseVector, layout: Layout, values: ValueCodec, indices: IndexCoding) -> Tensor:
    """The sparse body for these very elements of a vector over `layout`; `[bytes]` uint8 on their device.

    Raises:
        ValueError: The index section has 4 GiB or more.
    """
    count, size, device = vector.indices.numel(), vector.size, vector.indices.device
    codec = indices.chosen(vector.indices, size)
    index_section = codec.encode(vector.indices, size)
    if index_section.numel() > MAX_SIZE:
        raise ValueError(
            f"an index section can have at most {MAX_SIZE:,} bytes; got {index_section.numel():,}."
            " Send a lower density, or give the parameters to more than one optimizer or sync."
        )
    parameters = (codec.parameter(count, size), values.parameter)
    head = bytearray(_HEAD.pack(codec.code, values.code, *parameters, size, count, index_section.numel()))
    value_section = values.encode(vector.values, vector.indices, layout)
    return torch.cat([torch.frombuffer(head, dtype=torch.uint8).to(device), index_section, value_section])


def decode_sparse(body: Tensor, size: int) -> SparseVector:
    """The elements in a sparse body; everything is checked before it is used or allocated from.

    Args:
        body: `[bytes]` uint8, from any source.
        size: How long the vector must be. A few bytes may stand for that many elements, and for no more.

    Returns:
        On the body's device, in memory of its own.

    Raises:
        PayloadError: The bytes are not a sparse body, or that of a vector of another length.
    """

    def wrong(field: str, offset: int, value: int, expected: str) -> PayloadError:
        return PayloadError(f"sparse body: {field} at byte {offset} is {value}, expected {expected}.")

    if body.numel() < _HEAD.size:
        raise PayloadError(f"sparse body: ends at byte {body.numel()}, expected a head of {_HEAD.size} bytes.")
    head = _HEAD.unpack(body[: _HEAD.size].cpu().numpy().tobytes())
    index_code, value_code, index_parameter, value_parameter, sent_size, count, index_bytes = head
    if index_code not in INDEX_CODECS:
        raise wrong("index codec", 0, index_code, f"one of {sorted(INDEX_CODECS)}")
    if value_code not in VALUE_CODECS:
        raise wrong("value codec", 1, value_code, f"one of {sorted(VALUE_CODECS)}")
    if sent_size != size:
        raise wrong("size", 4, sent_size, f"{size}: the ranks train different parameters")
    if count > size:
        raise wrong("count", 8, count, f"at most the size, {size}")
    if index_bytes > body.numel() - _HEAD.size:
        raise wrong("index section bytes", 12, index_bytes, f"at most the {body.numel() - _HEAD.size} that follow")
    sections = body[_HEAD.size :]

    def values() -> Tensor:
        return VALUE_CODECS[value_code].decode(sections[index_bytes:], count, value_parameter)

    # What few bytes may stand for comes last: all positions, written as none; else values, of which many may share one.
    first = values() if count == size else None
    indices = INDEX_CODECS[index_code].decode(sections[:index_bytes], count, size, index_parameter)
    return SparseVector(indices, values() if first is None else first, size)
