"""From vectors to bytes: what is selected, how it is written, and the envelope it travels in."""

from lightning_sparsecomm.codecs.blocks import TopBlocks
from lightning_sparsecomm.codecs.chunks import ChunkTopK
from lightning_sparsecomm.codecs.compressor import Compressor
from lightning_sparsecomm.codecs.indices import (
    INDEX_CODECS,
    Auto,
    Bitmap,
    Golomb,
    IndexCodec,
    IndexCoding,
    Raw32,
    RunLength16,
    Runs,
)
from lightning_sparsecomm.codecs.one_sided import OneSidedTopK
from lightning_sparsecomm.codecs.payload import (
    HEADER_BYTES,
    Envelope,
    PayloadError,
    check_length,
    most_bytes,
    open_envelope,
    seal,
    sealed_bytes,
)
from lightning_sparsecomm.codecs.selectors import Selector, TopK
from lightning_sparsecomm.codecs.sketch import CountSketch
from lightning_sparsecomm.codecs.sparse import SparseCodec, decode_sparse, encode_sparse
from lightning_sparsecomm.codecs.values import (
    VALUE_CODECS,
    Float16,
    Float32,
    Float64,
    SharedMean,
    TwoBit,
    ValueCodec,
)

__all__ = [
    "HEADER_BYTES",
    "INDEX_CODECS",
    "VALUE_CODECS",
    "Auto",
    "Bitmap",
    "ChunkTopK",
    "Compressor",
    "CountSketch",
    "Envelope",
    "Float16",
    "Float32",
    "Float64",
    "Golomb",
    "IndexCodec",
    "IndexCoding",
    "OneSidedTopK",
    "PayloadError",
    "Raw32",
    "RunLength16",
    "Runs",
    "Selector",
    "SharedMean",
    "SparseCodec",
    "TopBlocks",
    "TopK",
    "TwoBit",
    "ValueCodec",
    "check_length",
    "decode_sparse",
    "encode_sparse",
    "most_bytes",
    "open_envelope",
    "seal",
    "sealed_bytes",
]
