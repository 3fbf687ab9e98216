"""The sparse codec: its laws, its golden bytes, the decoder in docs/formats.md, and altered bytes."""

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparsecomm.basis.layout import Layout, Vector
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.codecs import (
    INDEX_CODECS,
    VALUE_CODECS,
    AdaptiveGolomb,
    Auto,
    Bitmap,
    Envelope,
    Float16,
    Float32,
    Float64,
    Golomb,
    IndexCoding,
    Multiples,
    OneBit,
    PayloadError,
    Raw32,
    RunLength16,
    Runs,
    SharedMean,
    ShortThreeBit,
    SignedMeans,
    SparseCodec,
    ThreeBit,
    TopK,
    TwoBit,
    ValueCodec,
    decode_sparse,
    open_envelope,
    register_index_codec,
    register_value_codec,
    seal,
)
from tests.reference.payloads import (
    GROUP,
    STEP,
    GoldenCase,
    golden_bytes,
    golden_cases,
    record,
    reference_payload,
    sparse_body,
)

VALUES: dict[str, ValueCodec] = {
    "Float32": Float32(),
    "Float16": Float16(),
    "Float64": Float64(),
    "SharedMean": SharedMean(),
    "TwoBit": TwoBit(GROUP),
    "ThreeBit": ThreeBit(GROUP),
    "ShortThreeBit": ShortThreeBit(GROUP),
    "OneBit": OneBit(GROUP),
    "Multiples": Multiples(STEP),
    "Once": Multiples(STEP, once=True),
    "SignedMeans": SignedMeans(),
    "SignedMean": SignedMeans(1),
}
INDICES: dict[str, IndexCoding] = {
    "Raw32": Raw32(),
    "RunLength16": RunLength16(),
    "Golomb": Golomb(),
    "Bitmap": Bitmap(),
    "Runs": Runs(),
    "AdaptiveGolomb": AdaptiveGolomb(),
    "Auto": Auto(),
}
FORMATS = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def round_of(x: torch.Tensor) -> Round:
    return Round(Layout([("weight", tuple(x.shape))]))


@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45]) | st.floats(-1e9, 1e9, width=32), max_size=20),
    st.sampled_from([0.01, 0.3, 1.0]),
    st.sampled_from(["model", "tensor"]),
    st.sampled_from(["Float32", "Float16", "Float64"]),
    st.sampled_from(list(INDICES)),
)
def test_decoded_is_what_was_selected(elements, density, scope, values, indices):
    x = torch.tensor(elements, dtype=torch.float32)
    context = round_of(x)
    selector = TopK(density, scope)
    codec = SparseCodec(selector, VALUES[values], INDICES[indices])
    payload = codec.encode(Vector(x), context)
    decoded = codec.decode(payload, x.numel())

    selected = selector.select(x, context)
    assert bytes(payload.tolist()) == sparse_body(selected.tolist(), x[selected].tolist(), x.numel(), values, indices)
    assert decoded.size == x.numel()
    assert torch.equal(decoded.indices, selected)
    bound = codec.bound_bytes(context)
    assert bound is None or payload.numel() <= bound
    if values != "Float16":
        # sent + residual = x, exactly: an element is either sent or kept.
        residual = x - decoded.dense()
        assert torch.equal(residual + decoded.dense(), x)
        assert not residual[selected].any()


def test_bound():
    codec = SparseCodec(TopK(0.1), Float16())
    layout = Layout([("weight", (100,))])
    assert codec.bound_bytes(Round(layout)) == 16 + 10 * 4 + 10 * 2
    # If all can be selected, positions usually cost nothing, but can cost much: no bound.
    assert SparseCodec(TopK(1.0)).bound_bytes(Round(layout)) is None
    # No bound either where padding would undo what Golomb's code saves: ranks exchange lengths.
    assert SparseCodec(TopK(0.1), SharedMean(), Golomb()).bound_bytes(Round(layout)) is None
    assert SparseCodec(TopK(0.5), TwoBit(), Auto()).bound_bytes(Round(layout)) == 16 + 13 + 4 + 13
    assert SparseCodec(TopK(0.5), ThreeBit(), Auto()).bound_bytes(Round(layout)) == 16 + 13 + 4 + 19
    assert SparseCodec(TopK(0.5), OneBit(), Auto()).bound_bytes(Round(layout)) == 16 + 13 + 2 + 7


def test_decodes_by_the_payload_alone():
    x = torch.tensor([0.0, 2.0, 0.1])
    payload = SparseCodec(TopK(1.0), Float64()).encode(Vector(x), round_of(x))
    decoded = SparseCodec(TopK(0.5), Float16()).decode(payload, 3)
    assert decoded.values.dtype == torch.float64
    assert torch.equal(decoded.dense(), x.double())


def test_refuses_a_vector_of_another_length():
    with pytest.raises(ValueError, match="x must have the layout's 3 elements; got 4"):
        SparseCodec(TopK()).encode(Vector(torch.ones(4)), round_of(torch.ones(3)))
    payload = SparseCodec(TopK()).encode(Vector(torch.ones(3)), round_of(torch.ones(3)))
    with pytest.raises(PayloadError, match="size at byte 4 is 3, expected 4: the ranks train different parameters"):
        decode_sparse(payload, 4)


@pytest.mark.parametrize("indices", list(INDICES))
def test_few_bytes_stand_for_no_more_elements_than_the_receiver_has(indices):
    # One mean for all 2³² − 1 elements: refused for its size, before 48 GiB are allocated.
    codec = INDICES[indices].codecs()[0]
    head = struct.pack("<BBBBIII", codec.code, 4, 0, 0, 2**32 - 1, 2**32 - 1, 0)
    body = tensor_of(head + b"\xff\xff\xff\xff\x0f" + struct.pack("<f", 1.0))
    with pytest.raises(PayloadError, match="size at byte 4 is 4294967295, expected 8"):
        decode_sparse(body, 8)


def test_payload_names_the_codec_that_was_chosen():
    x = torch.zeros(4000)
    cases = (([0, 1], 6, 0), ([900, 1800], 3, 10), ([3999], 2, 0), (range(0, 4000, 2), 4, 0), (range(4000), 2, 0))
    for selected, code, parameter in cases:
        x[list(selected)] = 1.0
        body = SparseCodec(TopK(1.0), indices=Auto()).encode(Vector(x), round_of(x))
        assert body[:4].tolist() == [code, 1, parameter, 0]
        assert decode_sparse(body, 4000).indices.tolist() == list(selected)
        x.zero_()


def test_refuses_codecs_that_are_not_registered():
    @dataclass(frozen=True)
    class Squeezed(Float32):
        code: ClassVar[int] = 199

    @dataclass(frozen=True)
    class Impostor(Raw32):
        pass

    values = (
        r"values must be a codec of a registered class.*got .*, of class .*\. Decorate it with @register_value_codec"
    )
    for stranger in (Squeezed(), "float32", None):
        with pytest.raises(ValueError, match=values):
            SparseCodec(TopK(), values=stranger)
    with pytest.raises(
        ValueError, match=r"indices must be .* class .*Impostor\. Decorate it with @register_index_codec"
    ):
        SparseCodec(TopK(), indices=Impostor())


def test_a_registered_codec_of_ones_own_goes_through_a_payload():
    @dataclass(frozen=True)
    class Halved(Float32):
        code: ClassVar[int] = 200

        def encode(self, values, indices, layout):
            return super().encode(values / 2, indices, layout)

        def decode(self, section, count, parameter):
            return super().decode(section, count, parameter) * 2

    @dataclass(frozen=True)
    class FromTheEnd(Raw32):
        code: ClassVar[int] = 255

        def encode(self, indices, size):
            return super().encode((size - 1 - indices).flip(0), size)

        def decode(self, section, count, size, parameter):
            return (size - 1 - super().decode(section, count, size, parameter)).flip(0)

    x = torch.tensor([0.0, -3.0, 0.25, 7.0, 1.0])
    with mock.patch.dict(VALUE_CODECS), mock.patch.dict(INDEX_CODECS):
        register_value_codec(Halved)
        register_index_codec(FromTheEnd)
        body = SparseCodec(TopK(0.4), Halved(), FromTheEnd()).encode(Vector(x), round_of(x))
        assert bytes(body.tolist()) == struct.pack("<BBBBIII2I2f", 255, 200, 0, 0, 5, 2, 8, 1, 3, -1.5, 3.5)
        assert decode_sparse(body, 5).dense().tolist() == [0.0, -3.0, 0.0, 7.0, 0.0]
    with pytest.raises(
        PayloadError, match=r"index codec at byte 0 is 255, expected one of \[1, 2, 3, 4, 5, 6\], registered"
    ):
        decode_sparse(body, 5)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ((0, 1, 0, 0, 8, 0, 0), r"index codec at byte 0 is 0, expected one of \[1, 2, 3, 4, 5, 6\]"),
        ((1, 99, 0, 0, 8, 0, 0), r"value codec at byte 1 is 99, expected one of \[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11\]"),
        ((1, 1, 7, 0, 8, 1, 0), "index codec parameter at byte 2 is 7, expected 0 for Raw32"),
        ((2, 1, 1, 0, 8, 1, 0), "index codec parameter at byte 2 is 1, expected 0 for RunLength16"),
        ((3, 1, 32, 0, 8, 1, 0), "index codec parameter at byte 2 is 32, expected 0 to 31 for Golomb"),
        ((4, 1, 3, 0, 8, 1, 0), "index codec parameter at byte 2 is 3, expected 0 for Bitmap"),
        ((5, 1, 3, 0, 8, 1, 0), "index codec parameter at byte 2 is 3, expected 0 for Runs"),
        ((6, 1, 3, 0, 8, 1, 0), "index codec parameter at byte 2 is 3, expected 0 for AdaptiveGolomb"),
        ((1, 1, 0, 7, 8, 0, 0), "value codec parameter at byte 3 is 7, expected 0 for Float32"),
        ((1, 4, 0, 7, 8, 0, 0), "value codec parameter at byte 3 is 7, expected 0 for SharedMean"),
        ((1, 5, 0, 0, 8, 0, 0), "value codec parameter at byte 3 is 0, expected 1 to 255 for TwoBit"),
        ((1, 7, 0, 0, 8, 0, 0), "value codec parameter at byte 3 is 0, expected 1 to 255 for ThreeBit"),
        ((1, 8, 0, 0, 8, 0, 0), "value codec parameter at byte 3 is 0, expected 1 to 255 for ShortThreeBit"),
        ((1, 9, 0, 0, 8, 0, 0), "value codec parameter at byte 3 is 0, expected 1 to 255 for OneBit"),
        ((1, 1, 0, 0, 8, 9, 0), "count at byte 8 is 9, expected at most the size, 8"),
        ((1, 1, 0, 0, 8, 0, 5), "index section bytes at byte 12 is 5, expected at most the 4 that follow"),
        ((1, 1, 0, 0, 8, 1, 0), "raw index section: has 0 bytes, expected 4"),
        ((1, 1, 0, 0, 8, 1, 4), "value section: has 0 bytes, expected 4"),
        # 48 GiB would be allocated if positions were decoded before the value section is checked.
        ((1, 1, 0, 0, 2**32 - 1, 2**32 - 1, 0), "value section: has 4 bytes, expected 17179869180"),
    ],
)
def test_messages_say_where_and_what(head, message):
    with pytest.raises(PayloadError, match=message):
        decode_sparse(tensor_of(struct.pack("<BBBBIII", *head) + bytes(4)), head[4])


@pytest.mark.parametrize(
    ("values", "indices"),
    [(name, "Raw32") for name in VALUES] + [("Float32", name) for name in INDICES] + [("SharedMean", "Golomb")],
)
@pytest.mark.parametrize("density", [0.4, 1.0])
def test_altered_bodies_decode_to_something_sound_or_not_at_all(values, indices, density):
    x = torch.tensor([0.5, -3.0, 0.25, 7.0, 1.0])
    body = SparseCodec(TopK(density), VALUES[values], INDICES[indices]).encode(Vector(x), round_of(x))
    for at in range(body.numel()):
        for change in (*(1 << bit for bit in range(8)), 0x7C, 0x7F, 0xFF):
            altered = body.clone()
            altered[at] ^= change
            try:
                decoded = decode_sparse(altered, x.numel())
            except PayloadError:
                continue
            # It may decode: every index codec reads an empty section as all positions, and other parameters may fit.
            assert not 4 <= at < 8, "a size was altered and believed"
            assert decoded.indices.numel() == decoded.values.numel() <= decoded.size
            assert bool((decoded.indices.diff() > 0).all())
            assert bool((decoded.indices < decoded.size).all())
            assert bool(decoded.values.isfinite().all())
    for length in range(body.numel()):
        with pytest.raises(PayloadError):
            decode_sparse(body[:length], x.numel())


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case.name)
def test_golden(case: GoldenCase, request: pytest.FixtureRequest):
    if request.config.getoption("--record-golden", default=False):
        record(case)
    recorded = golden_bytes(case.name)
    assert recorded == reference_payload(case)

    layout = Layout(case.tensors)
    x = torch.from_numpy(case.vector())
    codec = SparseCodec(TopK(case.density), VALUES[case.values], INDICES[case.indices])
    body = codec.encode(Vector(x), Round(layout))
    assert bytes(seal(Envelope(body, case.present, case.nonfinite_segment), layout).tolist()) == recorded

    opened = open_envelope(tensor_of(recorded), layout, rank=0)
    assert (opened.present, opened.nonfinite_segment) == (case.present, case.nonfinite_segment)
    if case.nonfinite_segment is None:
        decoded, mine = (decode_sparse(each, layout.size) for each in (opened.body, body))
        assert decoded.size == layout.size
        assert torch.equal(decoded.indices, mine.indices)
        assert torch.equal(decoded.values, mine.values)


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case.name)
def test_the_documents_decoder(case: GoldenCase):
    (source,) = re.findall(r"```python\n(.*?)```", FORMATS, re.DOTALL)
    names: dict[str, object] = {}
    exec(source, names)
    decode = names["decode"]
    assert callable(decode)
    recorded = golden_bytes(case.name)
    layout = Layout(case.tensors)
    fingerprint, present, nonfinite, size, elements = decode(recorded, len(case.tensors))
    assert fingerprint == layout.fingerprint
    assert (present, nonfinite) == (case.present, case.nonfinite_segment)
    if nonfinite is None:
        decoded = decode_sparse(open_envelope(tensor_of(recorded), layout, rank=0).body, layout.size)
        assert size == decoded.size
        assert elements == dict(zip(decoded.indices.tolist(), decoded.values.tolist(), strict=True))
    for at in range(len(recorded)):
        with pytest.raises(AssertionError):
            decode(recorded[:at] + bytes([recorded[at] ^ 1]) + recorded[at + 1 :], len(case.tensors))


def test_the_documents_worked_example():
    (dump,) = re.findall(r"```text\n(.*?)```", FORMATS, re.DOTALL)
    lines = dump.splitlines()
    data = bytes.fromhex(" ".join(line.split("  ")[1] for line in lines))
    assert [int(line.split("  ")[0], 16) for line in lines] == list(range(0, len(data), 16))
    assert data == golden_bytes("worked_example")


def test_a_value_section_can_be_viewed_in_any_dtype_wherever_it_begins() -> None:
    begins = []

    class Watching(Float32):
        def decode(self, section: torch.Tensor, count: int, parameter: int) -> torch.Tensor:
            begins.append(section.storage_offset())
            return super().decode(section, count, parameter)

    x = torch.arange(1.0, 10.0)
    payload = SparseCodec(TopK(0.5), Float32(), Bitmap()).encode(Vector(x), round_of(x))
    with mock.patch.dict(VALUE_CODECS, {Float32.code: Watching()}):
        for shift in range(8):
            whole = torch.cat([payload.new_zeros(shift), payload])
            assert torch.equal(decode_sparse(whole[shift:], 9).dense(), torch.where(x >= 6, x, 0.0))
    assert begins and all(begin % 8 == 0 for begin in begins)
