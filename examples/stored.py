"""Runs in a JSON file, written as each one ends: an interrupted command resumes after the last."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def load(path: Path, settings: dict[str, Any], resume: bool) -> list[dict[str, Any]]:
    """The runs that earlier calls finished.

    Args:
        path: Their file.
        settings: All that the result of a run depends on, as JSON returns it.
        resume: Whether the user asked to resume.

    Raises:
        FileExistsError: There are runs, but the user did not ask to resume.
        ValueError: They were made with other settings, or the file is damaged.
    """
    if not path.exists():
        return []
    if not resume:
        raise FileExistsError(f"{path} already holds runs. Resume with --resume, or name another --output.")
    try:
        stored = json.loads(path.read_text())
        made_with, runs = dict(stored["settings"]), [dict(run) for run in stored["runs"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged or holds no runs: {error!r}. Delete it, or name another --output."
        ) from error
    differ = [name for name in settings if settings[name] != made_with.get(name)]
    if differ:
        raise ValueError(f"{path} holds runs with other settings: {', '.join(differ)}. Name another --output.")
    return runs


def save(runs: list[dict[str, Any]], path: Path, settings: dict[str, Any]) -> None:
    """Writes all runs. An interrupted call leaves the file as it was."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(json.dumps({"settings": settings, "runs": runs}, indent=1) + "\n")
    partial.replace(path)


def checksum(*contents: bytes) -> str:
    """SHA-256 of the training data, for the settings of runs."""
    return hashlib.sha256(b"".join(contents)).hexdigest()
