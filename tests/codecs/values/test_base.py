"""The codes of the value codecs."""

from lightning_sparsecomm.codecs import (
    VALUE_CODECS,
    BFloat16,
    Float16,
    Float32,
    Float64,
    Multiples,
    OneBit,
    SharedMean,
    ShortThreeBit,
    SignedMeans,
    ThreeBit,
    TwoBit,
)


def test_registry_names_each_codec_by_its_code():
    assert {code: type(codec) for code, codec in VALUE_CODECS.items()} == {
        1: Float32,
        2: Float16,
        3: Float64,
        4: SharedMean,
        5: TwoBit,
        6: BFloat16,
        7: ThreeBit,
        8: ShortThreeBit,
        9: OneBit,
        10: Multiples,
        11: SignedMeans,
    }
    assert all(codec.code == code for code, codec in VALUE_CODECS.items())
