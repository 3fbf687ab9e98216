"""Codecs for values."""

from lightning_sparsecomm.codecs.values.base import VALUE_CODECS as VALUE_CODECS
from lightning_sparsecomm.codecs.values.base import ValueCodec as ValueCodec
from lightning_sparsecomm.codecs.values.base import register_value_codec as register_value_codec
from lightning_sparsecomm.codecs.values.floats import Float16 as Float16
from lightning_sparsecomm.codecs.values.floats import Float32 as Float32
from lightning_sparsecomm.codecs.values.floats import Float64 as Float64
from lightning_sparsecomm.codecs.values.shared_mean import SharedMean as SharedMean
from lightning_sparsecomm.codecs.values.two_bit import TwoBit as TwoBit
