"""Values as bytes."""

from lightning_sparsecomm.codecs.values.base import ValueCodec
from lightning_sparsecomm.codecs.values.floats import Float16, Float32, Float64
from lightning_sparsecomm.codecs.values.shared_mean import SharedMean
from lightning_sparsecomm.codecs.values.two_bit import TwoBit

__all__ = ["VALUE_CODECS", "Float16", "Float32", "Float64", "SharedMean", "TwoBit", "ValueCodec"]

VALUE_CODECS: dict[int, ValueCodec] = {
    codec.code: codec for codec in (Float32(), Float16(), Float64(), SharedMean(), TwoBit())
}
"""The codec that decodes a value section, by the code in the payload."""
