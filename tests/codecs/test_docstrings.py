"""The examples in docstrings do what they say."""

import doctest
import importlib
import pkgutil

import pytest

from lightning_sparsecomm import codecs

MODULES = [module.name for module in pkgutil.walk_packages(codecs.__path__, f"{codecs.__name__}.")]
EXAMPLES = {
    "lightning_sparsecomm.codecs.registry",
    "lightning_sparsecomm.codecs.selectors.blocks",
    "lightning_sparsecomm.codecs.selectors.chunks",
    "lightning_sparsecomm.codecs.selectors.one_sided",
    "lightning_sparsecomm.codecs.selectors.top_k",
    "lightning_sparsecomm.codecs.sketch",
}


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
    assert (results.attempted > 0) == (name in EXAMPLES)
