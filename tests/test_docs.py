"""The pages: links lead somewhere, quoted errors are ours, and what the reference lists has an example."""

import ast
import importlib
import re
from functools import lru_cache
from pathlib import Path

import lightning_fabric
import pytest
import pytorch_lightning

import lightning_sparsecomm
from lightning_sparsecomm import methods, testing
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.basis.schedules import ByLength
from lightning_sparsecomm.sharing import GradientSync

ROOT = Path(lightning_sparsecomm.__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
LISTED = [
    name
    for page in sorted((ROOT / "docs" / "reference").glob("*.md"))
    for name in re.findall(r"^::: (lightning_sparsecomm\.[\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
]
QUOTES = [
    " ".join(line.removeprefix("> ") for line in quote.splitlines())
    for quote in re.findall(
        r"(?:^> .*\n)+", (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
    )
]


def named(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", LISTED)
def test_what_the_reference_lists_has_an_example(name: str) -> None:
    assert ">>>" in (named(name).__doc__ or "")


def test_the_reference_lists_what_is_public() -> None:
    listed = {named(name) for name in LISTED}
    for module in (lightning_sparsecomm, methods, testing):
        public = {getattr(module, name) for name in module.__all__ if name not in ("methods", "RECIPES")}
        assert public <= listed, module.__name__


def slug(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.replace("`", "")).strip().lower().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_titles(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [slug(title) for title in titles], link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_rows_are_in_tables(page: Path) -> None:
    """Each with as many cells as its table's head; a row after other text would be shown as text."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        _, rule, *_ = rows = table.splitlines()
        assert re.fullmatch(r"\|(?: ?:?-+:? ?\|)+", rule), rows[0]
        for row in rows:
            assert len(re.findall(r"(?<!\\)\|", row)) == rule.count("|"), row


@lru_cache
def _patterns() -> list[re.Pattern[str]]:
    """Every long text in the source, ours and Lightning's, as a pattern: what is filled in matches anything."""
    ours = sorted((ROOT / "lightning_sparsecomm").rglob("*.py"))
    theirs = [
        *Path(pytorch_lightning.__file__).parent.glob("trainer/connectors/accelerator_connector.py"),
        *Path(lightning_fabric.__file__).parent.glob("connector.py"),
    ]
    found = set()
    for path in [*ours, *theirs]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts: list[str | None] = [node.value]
            elif isinstance(node, ast.JoinedStr):
                parts = [str(p.value) if isinstance(p, ast.Constant) else None for p in node.values]
            else:
                continue
            text = "".join(part or "" for part in parts)
            # One that is short, or whose fixed part is, would match anything.
            if len(text.strip()) >= 15 and "\n\n" not in text:
                # A quote may end where a sentence of the message does.
                for end in {len(text), *(m.end() for m in re.finditer(r"\.(?= )", text))}:
                    left, pattern = end, ""
                    for part in parts:
                        fixed = (part or "")[:left]
                        left -= len(fixed)
                        pattern += ".+?" if part is None else re.escape(re.sub(r"\s+", " ", fixed))
                        if left <= 0:
                            break
                    if len(re.sub(r"\.\+\?", "", pattern)) >= 15:
                        found.add(pattern.removeprefix(r"\ "))
    return [re.compile(pattern) for pattern in sorted(found, key=len, reverse=True)]


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: quote[:30])
def test_quoted_errors_are_in_the_source(quote: str) -> None:
    rest = quote
    for pattern in _patterns():
        rest = pattern.sub("", rest, count=1)
    # What was filled in between two texts of one message may be left.
    assert len(rest) < 0.5 * len(quote), rest


def test_there_are_pages_quotes_and_references() -> None:
    assert len(PAGES) > 15
    assert len(QUOTES) > 15
    assert len(LISTED) > 50


def test_the_densities_of_the_default_are_those_of_the_code() -> None:
    page = (ROOT / "docs/guide/tune.md").read_text(encoding="utf-8")
    lengths, _, *rows = re.findall(r"^\| .*|^\|-.*", page.partition("## The default's density")[2], re.MULTILINE)[:8]
    for column, length in enumerate(int(each.replace(",", "")) for each in lengths.split("|")[2:-1]):
        said = [row.split("|")[2:-1][column].strip(" %") for row in rows]
        for adam, (density, every, dense) in enumerate((said[:3], said[3:])):
            for number, method in ((density, methods.default().for_run(length, 4)), (dense, methods.default(every=1))):
                part = method.fallback if adam else method
                assert part is not None
                exact = 100 * next(parts_in(part.syncs, ByLength)).for_length(length)
                assert float(number) == pytest.approx(exact, abs=0.501 / 10 ** len(number.partition(".")[2]))
                syncs = [sync for sync in part.syncs if isinstance(sync, GradientSync) and not sync.takes_few_rows]
                steps = {sync.every for sync in syncs}
                assert steps == {1 if number is dense else int(every)}
