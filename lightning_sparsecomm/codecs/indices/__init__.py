"""Positions as bytes."""

from lightning_sparsecomm.codecs.indices.auto import Auto
from lightning_sparsecomm.codecs.indices.base import IndexCodec, IndexCoding
from lightning_sparsecomm.codecs.indices.bits import Bitmap, Golomb
from lightning_sparsecomm.codecs.indices.runs import Runs
from lightning_sparsecomm.codecs.indices.words import Raw32, RunLength16

__all__ = ["INDEX_CODECS", "Auto", "Bitmap", "Golomb", "IndexCodec", "IndexCoding", "Raw32", "RunLength16", "Runs"]

INDEX_CODECS: dict[int, IndexCodec] = {
    codec.code: codec for codec in (Raw32(), RunLength16(), Golomb(), Bitmap(), Runs())
}
"""The codec that decodes an index section, by the code in the payload."""
