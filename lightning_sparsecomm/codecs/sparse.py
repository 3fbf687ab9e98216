"""Selected elements as one self-contained payload: positions, then values. See docs/formats.md."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparsecomm.basis.allocation import picked
from lightning_sparsecomm.basis.layout import MAX_SIZE, Layout, SparseVector, Vector
from lightning_sparsecomm.basis.phases import phase
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.codecs.codec import IndexCoding, ValueCodec, ValueCoding
from lightning_sparsecomm.codecs.compressor import Compressor
from lightning_sparsecomm.codecs.indices import Raw32
from lightning_sparsecomm.codecs.payload import PayloadError
from lightning_sparsecomm.codecs.registry import INDEX_CODECS, VALUE_CODECS, is_same_class
from lightning_sparsecomm.codecs.selectors.base import Selector
from lightning_sparsecomm.codecs.selectors.candidates import HintedSelector
from lightning_sparsecomm.codecs.values import Float32, Float64

_HEAD = struct.Struct("<BBBBIII")

SPARSE_BYTES = _HEAD.size
"""What a sparse body has beside the sections of positions and values."""


@dataclass(frozen=True)
class SparseCodec(Compressor):
    """Sends the selected elements: a head of 16 bytes, the positions in one codec, the values in another.

    >>> codec = SparseCodec(TopK(density=0.5), Float16(), Golomb())
    >>> payload = codec.encode(Vector(torch.tensor([0.5, -3.0, 0.1, 2.0])), Round(Layout([("weight", (4,))])))
    >>> payload.numel(), codec.decode(payload, size=4).dense()
    (21, tensor([ 0., -3.,  0.,  2.]))

    Args:
        selector: Chooses the elements.
        values: Encodes their values. Instead of `Float32`, `Float64` does so where the model is that wide.
        indices: Encodes their positions.

    Raises:
        TypeError: `selector` or `indices` is no object of such a class.
        ValueError: A codec's class is not registered.
    """

    selector: Selector
    # All instances can share these defaults, as they are frozen.
    values: ValueCoding = Float32()  # noqa: RUF009
    indices: IndexCoding = Raw32()  # noqa: RUF009

    def __post_init__(self) -> None:
        for name, part, kind in (("selector", self.selector, Selector), ("indices", self.indices, IndexCoding)):
            if not isinstance(part, kind):
                raise TypeError(
                    f"{name} must be an object of a class derived from {kind.__name__}; got {part!r}. Use"
                    " SparseCodec(TopK(0.01), Float16(), Golomb()), for example."
                )
        choices = self.values.codecs() if isinstance(self.values, ValueCoding) else [self.values]
        for choice in choices:
            _check_registered("values", choice, VALUE_CODECS, "register_value_codec")
        for codec in self.indices.codecs():
            _check_registered("indices", codec, INDEX_CODECS, "register_index_codec")

    def encode(self, x: Vector, context: Round) -> Tensor:
        """The selected elements of `x`. Raises `ValueError` for a length unlike the layout's, or as `encode_sparse`."""
        return encode_sparse(self.select(x, context), context.layout, self.value_codec(context), self.indices)

    def select(self, x: Vector, context: Round) -> SparseVector:
        """The elements that `encode` sends. Raises `ValueError` for a length unlike the layout's."""
        size = x.values.numel()
        if size != context.layout.size:
            raise ValueError(f"x must have the layout's {context.layout.size} elements; got {size}.")
        with phase("select"):
            if isinstance(self.selector, HintedSelector):
                indices = self.selector.select_hinted(x.values, context, x.hints)
            else:
                indices = self.selector.select(x.values, context)
        return SparseVector(indices, x.values if indices.numel() == size else picked(x.values, indices), size)

    @property
    def reads_on_gpus(self) -> bool:
        return all(codec.reads_on_gpus for codec in (*self.values.codecs(), *self.indices.codecs()))

    @property
    def largest(self) -> float:
        return min(codec.largest for codec in self.values.codecs())

    def value_codec(self, context: Round) -> ValueCodec:
        """The codec of values in this round."""
        codec = self.values.chosen(self.selector.count(context), context.layout.size)
        return Float64() if context.dtype == torch.float64 and type(codec) is Float32 else codec

    def decode(self, payload: Tensor, size: int) -> SparseVector:
        """The vector that any `SparseCodec` encoded: the payload names its codecs. See `decode_sparse`."""
        return decode_sparse(payload, size)

    def bound_bytes(self, context: Round) -> int | None:
        count = self.selector.count(context)
        index_bytes = self.indices.bound_bytes(count, context.layout.size)
        value_bytes = self.value_codec(context).bound_bytes(count, context.layout)
        return None if index_bytes is None or value_bytes is None else _HEAD.size + index_bytes + value_bytes


def _check_registered(name: str, codec: object, codecs: Mapping[int, object], decorator: str) -> None:
    registered = codecs.get(getattr(codec, "code", -1))
    if registered is None or not is_same_class(type(codec), type(registered)):
        raise ValueError(
            f"{name} must be a codec of a registered class, so that receivers can decode it; got {codec!r}, of class"
            f" {type(codec).__qualname__}. Decorate it with @{decorator}."
        )


def encode_sparse(vector: SparseVector, layout: Layout, values: ValueCodec, indices: IndexCoding) -> Tensor:
    """All elements of `vector` as a payload: `[bytes]` uint8. Raises `ValueError` if positions need 4 GiB or more."""
    count, size, device = vector.indices.numel(), vector.size, vector.indices.device
    codec, index_section = indices.encoded(vector.indices, size)
    if index_section.numel() > MAX_SIZE:
        raise ValueError(
            f"index section must have at most {MAX_SIZE:,} bytes; got {index_section.numel():,}."
            " Send a lower density, or give the parameters to more than one optimizer or sync."
        )
    parameters = (codec.parameter(count, size), values.parameter)
    head = bytearray(_HEAD.pack(codec.code, values.code, *parameters, size, count, index_section.numel()))
    value_section = values.encode(vector.values, vector.indices, layout)
    return torch.cat([torch.frombuffer(head, dtype=torch.uint8).to(device), index_section, value_section])


def decode_sparse(body: Tensor, size: int) -> SparseVector:
    """The elements in a sparse body. Each field is checked before it is used or memory is allocated for it.

    Args:
        body: `[bytes]` uint8, from any source.
        size: Expected length of the vector. A few bytes can stand for at most that many elements.

    Returns:
        The elements, on the body's device. They share no memory with it.

    Raises:
        PayloadError: The bytes are not a sparse body, or hold a vector of another length.
    """

    def wrong(field: str, offset: int, value: int, expected: str) -> PayloadError:
        return PayloadError(f"sparse body: {field} at byte {offset} is {value}, expected {expected}.")

    if body.numel() < _HEAD.size:
        raise PayloadError(f"sparse body: ends at byte {body.numel()}, expected a head of {_HEAD.size} bytes.")
    head = _HEAD.unpack(body[: _HEAD.size].cpu().numpy().tobytes())
    index_code, value_code, index_parameter, value_parameter, sent_size, count, index_bytes = head
    if index_code not in INDEX_CODECS:
        raise wrong("index codec", 0, index_code, f"one of {sorted(INDEX_CODECS)}, registered on this rank")
    if value_code not in VALUE_CODECS:
        raise wrong("value codec", 1, value_code, f"one of {sorted(VALUE_CODECS)}, registered on this rank")
    if sent_size != size:
        raise wrong("size", 4, sent_size, f"{size}: the ranks train different parameters")
    if count > size:
        raise wrong("count", 8, count, f"at most the size, {size}")
    if index_bytes > body.numel() - _HEAD.size:
        raise wrong("index section bytes", 12, index_bytes, f"at most the {body.numel() - _HEAD.size} that follow")
    sections = body[_HEAD.size :]

    def values() -> Tensor:
        codec, section = VALUE_CODECS[value_code], sections[index_bytes:]
        section = section if codec.reads_on_gpus else section.cpu()
        # So that any codec may view it in a wider dtype.
        aligned = section if section.storage_offset() % 8 == 0 else section.clone()
        return codec.decode(aligned, count, value_parameter).to(body.device)

    # Few bytes can stand for many elements: a full selection has no index section, and one number can stand for many
    # values. The other section is decoded first, and refuses a count that its length does not support.
    first = values() if count == size else None
    codec, section = INDEX_CODECS[index_code], sections[:index_bytes]
    section = section if codec.reads_on_gpus else section.cpu()
    indices = codec.decode(section, count, size, index_parameter).to(body.device)
    return SparseVector(indices, values() if first is None else first, size)
