"""The laws of codecs for positions and values."""

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout, SparseVector
from lightning_sparsecomm.codecs import (
    INDEX_CODECS,
    VALUE_CODECS,
    IndexCodec,
    IndexCoding,
    Raw32,
    ValueCodec,
    decode_sparse,
    encode_sparse,
)
from lightning_sparsecomm.testing.decoding import (
    check_bytes,
    check_damaged,
    check_error,
    check_length,
    check_positions,
    check_values,
    decoded_by,
    inputs,
    is_extreme,
)
from lightning_sparsecomm.testing.laws import check_kind, law
from lightning_sparsecomm.testing.samples import LAYOUTS, selections, vectors


def check_value_codec(codec: ValueCodec, tolerance: float = 0.0) -> None:
    """Checks the laws of a value codec.

    Receivers know it by its code, and decode what it encodes, exactly or within a tolerance; no section is longer than
    `bound_bytes`; a damaged section raises `PayloadError`, or decodes to as many finite values.

    >>> check_value_codec(BFloat16(), tolerance=2**-8)

    Args:
        codec: The codec.
        tolerance: Largest error of a decoded float32 value, relative to the largest magnitude that is encoded with it.
            0 for a codec that is exact. Values close to the largest or smallest float need only be finite.

    Raises:
        AssertionError: A law is violated.
        TypeError: `codec` is no value codec.
    """
    check_kind("codec", codec, ValueCodec)
    receiver = VALUE_CODECS.get(codec.code)
    _check_registered(codec, receiver, "@register_value_codec")
    _check_parameter(codec, codec.parameter, "")
    assert receiver is not None
    for layout in LAYOUTS:
        for chosen, indices in selections(layout.size).items():
            for kind, x in inputs(layout):
                where = f"for {chosen} of {kind}, {layout}"
                _check_values_of(codec, receiver, x[indices], indices, layout, where, tolerance, is_extreme(kind))
            if layout is LAYOUTS[0] or layout.size < 2:
                _check_damaged_values(codec, receiver, indices, layout, f"in the section for {chosen} of {layout}")


def _check_values_of(
    codec: ValueCodec,
    receiver: ValueCodec,
    values: Tensor,
    indices: Tensor,
    layout: Layout,
    where: str,
    tolerance: float,
    extreme: bool,
) -> None:
    name, count = type(codec).__name__, indices.numel()
    before = values.clone()
    section = codec.encode(values, indices, layout)
    for most in (count, layout.size):
        check_bytes(section, codec.bound_bytes(most, layout), f"{name}.encode", where)
    law(torch.equal(values, before), f"{name}.encode changed the values {where}")
    law(torch.equal(section, codec.encode(values, indices, layout)), f"{name}.encode is not pure {where}")
    decoded = decoded_by(lambda: receiver.decode(section, count, codec.parameter), f"{name}.decode", where)
    check_values(decoded, count, f"{name}.decode", where)
    own = not count or decoded.untyped_storage().data_ptr() != section.untyped_storage().data_ptr()
    law(own, f"{name}.decode must return memory of its own, not the section's, {where}")
    if not extreme:
        check_error(decoded, values, values, tolerance, f"{name}.decode", where)
    body = encode_sparse(SparseVector(indices, values, layout.size), layout, codec, Raw32())
    check_length(body, layout, f"a payload with {name}", where)
    whole = decode_sparse(body, layout.size).values
    law(torch.equal(whole, decoded), f"{name} decodes to other values as part of a whole payload {where}")


def _check_damaged_values(codec: ValueCodec, receiver: ValueCodec, indices: Tensor, layout: Layout, where: str) -> None:
    name, count = f"{type(codec).__name__}.decode", indices.numel()

    def decode(data: Tensor) -> Tensor:
        return receiver.decode(data, count, codec.parameter)

    def check(values: Tensor, where: str) -> None:
        check_values(values, count, name, where)

    section = codec.encode(vectors(layout.size)["random numbers"][indices], indices, layout)
    check_damaged(section, decode, check, name, where)


def check_index_codec(coding: IndexCoding) -> None:
    """Checks the laws of an index codec, or of what chooses between several.

    Receivers know it by its code, and decode exactly what it encodes; `section_bytes` is the length of the section, and
    `bound_bytes` no less; `encoded` does what `chosen` and `encode` do; a damaged section raises `PayloadError`, or
    decodes to as many sorted positions.

    >>> check_index_codec(Raw32())

    Args:
        coding: The codec, or what chooses one.

    Raises:
        AssertionError: A law is violated.
        TypeError: `coding` is no index codec.
    """
    check_kind("coding", coding, IndexCoding)
    for codec in coding.codecs():
        _check_registered(codec, INDEX_CODECS.get(codec.code), "@register_index_codec")
    for size in (0, 1, 2, 9, 300, 5000):
        for kind, indices in selections(size).items():
            codec = coding.chosen(indices, size)
            name, where = type(codec).__name__, f"for {kind} of {size}"
            law(codec in coding.codecs(), f"chosen must return one of codecs(); got {codec!r} {where}")
            _check_positions_of(codec, indices, size, coding.bound_bytes(indices.numel(), size), name, where)
            found, section = coding.encoded(indices, size)
            same = found == codec and torch.equal(section, codec.encode(indices, size))
            law(same, f"encoded must return what chosen and {name}.encode do {where}")


def _check_positions_of(
    codec: IndexCodec, indices: Tensor, size: int, bound: int | None, name: str, where: str
) -> None:
    count = indices.numel()
    parameter = codec.parameter(count, size)
    _check_parameter(codec, parameter, where)
    section = codec.encode(indices, size)
    check_bytes(section, bound, f"{name}.encode", where)
    promised = codec.section_bytes(indices, size)
    law(
        section.numel() == promised,
        f"{name}.encode wrote {section.numel()} bytes, but section_bytes says {promised} {where}",
    )

    def decode(data: Tensor) -> Tensor:
        return INDEX_CODECS[codec.code].decode(data, count, size, parameter)

    def check(decoded: Tensor, where: str) -> None:
        check_positions(decoded, size, f"{name}.decode", where)
        law(decoded.numel() == count, f"{name}.decode returned {decoded.numel()} positions, not {count}, {where}")

    decoded = decoded_by(lambda: decode(section), f"{name}.decode", where)
    law(torch.equal(decoded, indices), f"{name}.decode returned other positions than were encoded {where}")
    check_damaged(section, decode, check, f"{name}.decode", f"in the section {where}")


def _check_registered(codec: ValueCodec | IndexCodec, receiver: object, decorator: str) -> None:
    law(
        type(receiver) is type(codec),
        f"{type(codec).__name__} must be registered under its code, {codec.code}, where receivers find {receiver!r}."
        f" Decorate it with {decorator}, or give it another code from 128 to 255",
    )


def _check_parameter(codec: ValueCodec | IndexCodec, parameter: int, where: str) -> None:
    law(
        parameter in codec.parameters and 0 <= parameter <= 255,
        f"{type(codec).__name__}.parameter must be one of {codec.parameters} and fit a byte; got {parameter} {where}",
    )
