"""docs/gallery.md names each recipe once, and says what the code says."""

import inspect
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.channel import ClipLocalNorm, ErrorFeedback, LocalAdam, Memory, MomentumCorrection
from lightning_sparsecomm.codecs import SparseCodec
from lightning_sparsecomm.exchange import PowerSGD
from lightning_sparsecomm.methods import RECIPES
from lightning_sparsecomm.sharing import BucketSync, DeltaSync, Method

PAGE = Path(__file__).parent.parent / "docs" / "gallery.md"
COLUMNS = ["method", "paper", "composed of", "bytes", "bias", "state", "where it wins"]

STATE = {"residual": ErrorFeedback, "velocity": MomentumCorrection, "moments": LocalAdam, "factors": PowerSGD}
"""What the page calls the state of parts; others have words of their own."""

KNOWN = (ErrorFeedback, MomentumCorrection, LocalAdam, ClipLocalNorm)


@lru_cache
def rows() -> dict[str, dict[str, str]]:
    """The page's rows by recipe."""
    found: dict[str, dict[str, str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if name := re.fullmatch(r"`(\w+)`", cells[0]):
            assert line.startswith("| ") and len(cells) == len(COLUMNS), line
            assert name[1] not in found, f"{name[1]} has two rows"
            found[name[1]] = dict(zip(COLUMNS, cells))
    return found


def inner(part: object) -> Iterator[str]:
    """The parts that an exchange was given, without what only holds them together."""
    for name in inspect.signature(type(part)).parameters:
        value = getattr(part, name, None)
        if isinstance(value, SparseCodec):
            yield from inner(value)
        elif type(value).__module__.startswith("lightning_sparsecomm."):
            yield type(value).__name__


def composition(method: Method) -> str:
    """In one line: the first sync of a method, its memories in order, and its exchange."""
    sync: Any = method.syncs[0]
    if isinstance(sync, BucketSync):
        return f"`{type(sync).__name__}`"
    names = list(inner(sync.channel.exchange))
    exchange = type(sync.channel.exchange).__name__ + (f"({', '.join(names)})" if names else "")
    chain = [type(memory).__name__ for memory in sync.channel.memories] + [exchange]
    chain += ["outer SGD"] if getattr(sync, "outer", None) is not None else []
    return f"`{type(sync).__name__}`: `{' → '.join(chain)}`"


def test_each_recipe_has_one_row() -> None:
    assert sorted(rows()) == sorted(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_the_row_says_what_the_code_does(name: str) -> None:
    row, method = rows()[name], RECIPES[name]()
    assert row["composed of"] == composition(method)
    sync: Any = method.syncs[0]
    held = [word for word, part in STATE.items() if any(parts_in(sync, part))]
    held += ["anchor"] if isinstance(sync, DeltaSync) else []
    words = re.findall(r"\w+", row["state"])
    named = [word for word in (*STATE, "anchor") if word in words]
    if all(isinstance(memory, KNOWN) for memory in parts_in(sync, Memory)):
        assert named == held and (row["state"] == "none") == (not held)
    else:
        # A memory with words of its own.
        assert set(held) <= set(named) and row["state"] != "none"
    assert all(row.values())
