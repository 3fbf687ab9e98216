"""What the command that tries versions reads, says and refuses. No test installs anything."""

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import versions
from lightning_sparsecomm.versions import OLDEST

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_fine"/>
<testcase classname="tests.test_a" name="test_skipped"><skipped message="needs 2 NVIDIA GPUs"/></testcase>
<testcase classname="tests.test_a" name="test_wrong"><failure message="AssertionError"/></testcase>
<testcase classname="tests.test_a" name="test_wrong"><error message="at teardown"/></testcase>
<testcase classname="tests.test_a" name="test_broken"><error message="at setup"/></testcase>
</testsuite></testsuites>"""

RUN = {
    "corner": "newest",
    "python": "3.11.7",
    "versions": {"torch": "2.14.1", "pytorch-lightning": "2.6.6", "numpy": "2.4.6", "numba": "0.68.1"},
    "commit": "1234567",
    "date": "2026-11-24",
    "passed": 4059,
    "skipped": 2,
    "failed": [],
    "passed_alone": ["tests.test_a::test_wrong"],
}


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["versions.py", *arguments])
    versions.main()


def test_a_report_is_counted(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    failed = ["tests.test_a::test_wrong", "tests.test_a::test_broken"]
    assert versions.outcome_of(tmp_path / "report.xml") == versions.Outcome(
        ["tests.test_a::test_fine"], ["tests.test_a::test_skipped"], failed
    )


def test_corners_have_names_of_their_own_and_one_is_what_ci_runs() -> None:
    assert len({corner.name for corner in versions.CORNERS}) == len(versions.CORNERS) >= 6
    assert [corner.pins for corner in versions.CORNERS if corner.constrained] == [()]


def test_interpreters_are_asked_for_their_version(tmp_path: Path) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert versions.interpreter(here, [sys.executable]) == sys.executable
    shim = tmp_path / "python9.8"
    shim.write_text("#!/bin/sh\necho no such version >&2\nexit 127\n")
    shim.chmod(0o755)
    assert versions.interpreter("9.8", [str(shim)]) is None
    shim.write_text("#!/bin/sh\necho 9.8.7\n")
    assert versions.interpreter("9.8", [str(shim)]) == str(shim)


def test_a_corner_without_an_interpreter_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "CORNERS", [versions.Corner("future", "9.8")])
    with pytest.raises(SystemExit, match="1 corners were not run"):
        command(monkeypatch, f"--output={tmp_path}/runs.json")
    assert "Not run: future: no Python 9.8 on this machine; name one with --interpreters" in capsys.readouterr().out
    command(monkeypatch, "--list")
    assert "future: Python 9.8 (not on this machine), the newest of everything" in capsys.readouterr().out


def test_what_cannot_be_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> None:
        raise versions.CornerError("pip ended with 1")

    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    monkeypatch.setattr(versions, "CORNERS", [versions.Corner("impossible", here)])
    monkeypatch.setattr(versions, "run", run)
    with pytest.raises(SystemExit):
        command(monkeypatch, f"--output={tmp_path}/runs.json", f"--interpreters={sys.executable}")
    assert "Not run: impossible: pip ended with 1" in capsys.readouterr().out
    assert not (tmp_path / "runs.json").exists()


def test_runs_are_kept_and_those_that_failed_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    monkeypatch.setattr(versions, "CORNERS", [versions.Corner(name, here) for name in ("a", "b")])
    ran: list[str] = []

    def run(corner: versions.Corner, *arguments: object) -> dict[str, object]:
        ran.append(corner.name)
        return {**RUN, "corner": corner.name, "failed": ["test_x"] if corner.name == "a" and len(ran) < 3 else []}

    monkeypatch.setattr(versions, "run", run)
    arguments = [f"--output={tmp_path}/runs.json", f"--interpreters={sys.executable}"]
    with pytest.raises(SystemExit, match="a: test_x"):
        command(monkeypatch, *arguments)
    command(monkeypatch, *arguments, "--resume")
    assert ran == ["a", "b", "a"]
    assert [each["corner"] for each in json.loads((tmp_path / "runs.json").read_text())["runs"]] == ["a", "b"]
    capsys.readouterr()
    command(monkeypatch, *arguments, "--only-print")
    row = "| 3.11.7 | 2.14.1 | 2.6.6 | 2.4.6 | 0.68.1 | 4,059 | 1 | 0 | 2 | 1234567 | 2026-11-24 |"
    assert capsys.readouterr().out.splitlines()[2:] == [f"| `a` {row}", f"| `b` {row}"]


def test_unknown_corners_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command(monkeypatch, "latest")
    assert re.search("a corner must be one of oldest, .*; got latest. --list describes them.", capsys.readouterr().err)


def test_the_table_in_the_docs_is_that_of_the_stored_runs() -> None:
    stored = json.loads((versions.CHECKOUT / "docs" / "results" / "versions.json").read_text())
    assert versions.table(stored["runs"]) in (versions.CHECKOUT / "docs" / "versions.md").read_text(encoding="utf-8")
    # Bounds are what passed.
    oldest = next(run for run in stored["runs"] if run["corner"] == "oldest")
    assert not oldest["failed"]
    for name, bound in OLDEST.items():
        assert oldest["versions"][name].startswith(bound), name
