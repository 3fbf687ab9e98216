"""Codecs for positions."""

from lightning_sparsecomm.codecs.indices.auto import Auto as Auto
from lightning_sparsecomm.codecs.indices.base import INDEX_CODECS as INDEX_CODECS
from lightning_sparsecomm.codecs.indices.base import IndexCodec as IndexCodec
from lightning_sparsecomm.codecs.indices.base import IndexCoding as IndexCoding
from lightning_sparsecomm.codecs.indices.base import register_index_codec as register_index_codec
from lightning_sparsecomm.codecs.indices.bits import Bitmap as Bitmap
from lightning_sparsecomm.codecs.indices.bits import Golomb as Golomb
from lightning_sparsecomm.codecs.indices.words import Raw32 as Raw32
from lightning_sparsecomm.codecs.indices.words import RunLength16 as RunLength16
from lightning_sparsecomm.codecs.indices.words import Runs as Runs
