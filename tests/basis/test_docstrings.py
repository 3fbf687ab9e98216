"""The examples in docstrings do what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["arguments", "layout", "scheduled", "schedules"])
def test_docstrings(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"lightning_sparsecomm.basis.{name}"))
    assert results.failed == 0
    assert results.attempted > 0
