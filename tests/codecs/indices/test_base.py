"""The laws of every index codec: exact, within its bound, and strict about received bytes."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_sparsecomm.codecs import INDEX_CODECS, AdaptiveGolomb, Bitmap, IndexCodec, PayloadError
from lightning_sparsecomm.kernels import PositionKernels
from tests.codecs.indices.selections import selections

CODECS = list(INDEX_CODECS.values())


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@given(selection=selections())
def test_round_trip(codec: IndexCodec, selection: tuple[list[int], int]):
    positions, size = selection
    if codec == Bitmap():
        # A bitmap has a bit for each element of the vector.
        assume(size <= 2**16)
    indices = torch.tensor(positions, dtype=torch.int64)
    before = indices.clone()
    section = codec.encode(indices, size)
    assert section.dtype == torch.uint8
    assert section.dim() == 1
    assert section.numel() == codec.section_bytes(indices, size)
    decoded = codec.decode(section, len(positions), size, codec.parameter(len(positions), size))
    assert decoded.dtype == torch.int64
    assert decoded.tolist() == positions
    assert torch.equal(indices, before)
    for count in range(len(positions), min(size, len(positions) + 3) + 1):
        bound = codec.bound_bytes(count, size)
        assert bound is None or section.numel() <= bound


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_full_selection_costs_nothing(codec: IndexCodec):
    assert codec.encode(torch.arange(1000), 1000).numel() == 0


def test_registry_names_each_codec_by_its_code():
    assert {code: codec.code for code, codec in INDEX_CODECS.items()} == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6}


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@given(data=st.binary(max_size=12), count=st.integers(0, 30), size=st.integers(0, 90), parameter=st.integers(0, 31))
def test_whatever_is_decoded_is_sound(codec: IndexCodec, data: bytes, count: int, size: int, parameter: int):
    assume(count <= size)
    section = torch.tensor(list(data), dtype=torch.uint8)
    try:
        decoded = codec.decode(section, count, size, parameter)
    except PayloadError:
        return
    assert parameter in codec.parameters
    assert decoded.numel() == count
    assert bool((decoded.diff() > 0).all())
    assert count == 0 or (int(decoded[0]) >= 0 and int(decoded[-1]) < size)
    # Decoders accept only what encoders write: one section for each selection and parameter, or for each block's code.
    if codec == AdaptiveGolomb():
        kernels = PositionKernels()
        written = kernels.write_blocks(decoded, kernels.read_codes(section, count)[0]) if count < size else section[:0]
        assert written.tolist() == list(data)
    elif parameter == codec.parameter(count, size):
        assert codec.encode(decoded, size).tolist() == list(data)
