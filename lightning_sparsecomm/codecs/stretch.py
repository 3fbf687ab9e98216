"""A few neighbouring elements of a long vector as a payload: positions count from the first of them."""

import struct

import torch
from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout, SparseVector
from lightning_sparsecomm.codecs.codec import IndexCoding, ValueCodec
from lightning_sparsecomm.codecs.payload import PayloadError
from lightning_sparsecomm.codecs.sparse import SPARSE_BYTES, decode_sparse, encode_sparse

_HEAD = struct.Struct("<II")

STRETCH_BYTES = _HEAD.size + SPARSE_BYTES
"""What a stretch has beside the sections of positions and values."""


def encode_stretch(vector: SparseVector, values: ValueCodec, indices: IndexCoding) -> Tensor:
    """All elements of `vector`: where the first one is, how far the last one reaches, and a sparse body of that length.

    So what positions cost depends on how dense the elements are between the first and the last one, wherever these are.
    Errors are those of `encode_sparse`.

    >>> vector = SparseVector(torch.tensor([1_000_000, 1_000_003]), torch.tensor([0.5, -2.0]), size=2_000_000)
    >>> decode_stretch(encode_stretch(vector, Float32(), Golomb()), size=2_000_000).indices
    tensor([1000000, 1000003])
    """
    first = int(vector.indices[0]) if vector.indices.numel() else 0
    span = int(vector.indices[-1]) + 1 - first if vector.indices.numel() else 0
    body = encode_sparse(SparseVector(vector.indices - first, vector.values, span), _layout(span), values, indices)
    head = torch.frombuffer(bytearray(_HEAD.pack(first, span)), dtype=torch.uint8)
    return torch.cat([head.to(body.device), body])


def decode_stretch(body: Tensor, size: int) -> SparseVector:
    """The elements in what `encode_stretch` returned for a vector of `size` elements.

    Raises:
        PayloadError: The bytes are something else, or hold positions beyond `size`.
    """
    if body.numel() < _HEAD.size:
        raise PayloadError(f"stretch: ends at byte {body.numel()}, expected a head of {_HEAD.size} bytes.")
    first, span = _HEAD.unpack(body[: _HEAD.size].cpu().numpy().tobytes())
    if first + span > size:
        raise PayloadError(f"stretch: begins at {first} and has {span} elements, expected an end within {size}.")
    vector = decode_sparse(body[_HEAD.size :], span)
    return SparseVector(vector.indices + first, vector.values, size)


def _layout(span: int) -> Layout:
    return Layout([("stretch", (span,))])
