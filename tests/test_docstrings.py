"""The examples in docstrings run, and everything that the reference pages list has one."""

import doctest
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import lightning_sparsecomm
from lightning_sparsecomm import basis, channel, codecs, exchange, methods, sharing, testing
from lightning_sparsecomm.codecs import INDEX_CODECS, VALUE_CODECS

ROOT = Path(lightning_sparsecomm.__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "lightning_sparsecomm").rglob("*.py")
    if ">>>" in path.read_text(encoding="utf-8")
)


# What docs/reference tells readers that its examples assume.
ASSUMED = {"torch": torch, "Tensor": torch.Tensor, "ClassVar": ClassVar, "dataclass": dataclass} | {
    name: value
    for room in (basis, channel, codecs, exchange, sharing, testing, methods, lightning_sparsecomm)
    for name, value in vars(room).items()
    if not name.startswith("_")
}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    registered = dict(INDEX_CODECS), dict(VALUE_CODECS)
    module = importlib.import_module(name)
    # Functions that only we call are shown with their modules' own names.
    own = {key: value for key, value in vars(module).items() if getattr(value, "__module__", None) == name}
    results = doctest.testmod(module, globs=own | ASSUMED, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0
    assert results.attempted > 0
    assert registered == (INDEX_CODECS, VALUE_CODECS)
