"""Codecs are registered by their code: one class for each, which receivers can make without arguments."""

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import pytest

from lightning_sparsecomm.codecs import (
    INDEX_CODECS,
    VALUE_CODECS,
    Float32,
    Raw32,
    SparseCodec,
    TopK,
    ValueCodec,
    register_index_codec,
    register_value_codec,
)

KINDS = [
    (register_index_codec, INDEX_CODECS, Raw32, "IndexCodec"),
    (register_value_codec, VALUE_CODECS, Float32, "ValueCodec"),
]


@pytest.fixture(autouse=True)
def _registered_for_this_test() -> Iterator[None]:
    with mock.patch.dict(INDEX_CODECS), mock.patch.dict(VALUE_CODECS):
        yield


def codec_class(base: type[Any], code: Any, name: str = "Mine") -> type[Any]:
    return dataclass(frozen=True)(type(name, (base,), {"__module__": __name__, "code": code}))


@pytest.mark.parametrize(("decorator", "codecs", "base", "base_name"), KINDS)
class TestBothKinds:
    def test_enters_an_instance_and_returns_the_class(self, decorator, codecs, base, base_name):
        mine = codec_class(base, 130)
        assert decorator(mine) is mine
        assert codecs[130] == mine()
        assert type(codecs[130]) is mine
        decorator(codec_class(base, 128, "First"))
        decorator(codec_class(base, 255, "Last"))
        assert [code for code in codecs if code > 127] == [128, 130, 255]

    def test_refuses_a_code_that_belongs_to_another_class(self, decorator, codecs, base, base_name):
        for free, taken in ((128, 1), (129, 128)):
            text = (
                f"code must differ from the codes of all other codecs; got {taken} for {__name__}.Mine, but it belongs"
                f" to {type(codecs[taken]).__module__}.{type(codecs[taken]).__qualname__}."
                f" Use {free}: codes 128 to 255 are free for codecs of your own."
            )
            before = dict(codecs)
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                decorator(codec_class(base, taken))
            assert codecs == before
            decorator(codec_class(base, 128, "Other"))

    def test_refuses_a_subclass_that_inherits_its_code(self, decorator, codecs, base, base_name):
        class Heir(base):
            pass

        with pytest.raises(ValueError, match=f"got 1 for .*Heir, but it belongs to .*{base.__name__}\\. Use 128"):
            decorator(Heir)

    def test_a_class_defined_again_replaces_the_earlier_one(self, decorator, codecs, base, base_name):
        earlier, again = (decorator(codec_class(base, 140)) for _ in range(2))
        assert earlier is not again
        assert type(codecs[140]) is again
        assert decorator(again) is again
        part = "values" if decorator is register_value_codec else "indices"
        # Instances from before the cell ran again are as good.
        for mine in (earlier, again):
            assert getattr(SparseCodec(TopK(), **{part: mine()}), part) == mine()

    def test_refuses_what_is_no_codec_class(self, decorator, codecs, base, base_name):
        for stranger in (base(), int, "Raw32", Raw32 if base is Float32 else Float32):
            with pytest.raises(TypeError, match=f"codec_class must be a subclass of {base_name}; got .*derive it"):
                decorator(stranger)

    def test_refuses_a_class_without_a_code(self, decorator, codecs, base, base_name):
        text = r"code must be a class attribute.*Mine has none\. Add `code: ClassVar\[int\] = 128`: codes 128 to 255"
        with pytest.raises(TypeError, match=text):
            decorator(codec_class(base, None))

    @pytest.mark.parametrize("code", [0, -1, 256, 128.0, True, "128"])
    def test_refuses_a_code_that_is_no_byte(self, decorator, codecs, base, base_name, code):
        text = f"code must be a whole number from 1 to 255.*got {code!r} for .*Mine. Use 128: codes 128 to 255 are free"
        with pytest.raises(ValueError, match=text):
            decorator(codec_class(base, code))

    def test_refuses_a_class_that_needs_arguments(self, decorator, codecs, base, base_name):
        @dataclass(frozen=True)
        class Needy(base):
            bits: int
            code: ClassVar[int] = 150

        text = r"codec_class must be callable without arguments.*got .*Needy: .*'bits'.* give every parameter a default"
        with pytest.raises(TypeError, match=text):
            decorator(Needy)
        assert 150 not in codecs


def test_refuses_an_abstract_class():
    class Unfinished(ValueCodec):
        code: ClassVar[int] = 150

    with pytest.raises(TypeError, match=r"got .*Unfinished: .*abstract.*Implement its abstract methods"):
        register_value_codec(Unfinished)  # type: ignore[type-abstract]


def test_names_a_code_even_when_none_is_free():
    for code in range(128, 256):
        register_value_codec(codec_class(Float32, code, f"Codec{code}"))
    with pytest.raises(ValueError, match=r"got 128 for .*Mine, but it belongs to .*Codec128"):
        register_value_codec(codec_class(Float32, 128))


def test_copies_of_a_codec_are_registered_too():
    mine = register_value_codec(codec_class(Float32, 160))()
    assert SparseCodec(TopK(), copy.deepcopy(mine)).values == mine
