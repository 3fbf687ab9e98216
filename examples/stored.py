"""Runs in a JSON file, written as each ends, so that a command that was cut off goes on after its last one."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def load(path: Path, settings: dict[str, Any], resume: bool) -> list[dict[str, Any]]:
    """The runs that an earlier call has finished.

    Args:
        path: Their file.
        settings: All that the result of a run depends on, as JSON would give it back.
        resume: Whether the command line says to go on from them.

    Raises:
        FileExistsError: There are some, and it does not.
        ValueError: They were made with other settings, or the file is damaged.
    """
    if not path.exists():
        return []
    if not resume:
        raise FileExistsError(f"{path} holds runs already. Go on with --resume, or name another --output.")
    try:
        stored = json.loads(path.read_text())
        made_with, runs = dict(stored["settings"]), [dict(run) for run in stored["runs"]]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged, or holds no runs: {error!r}. Delete it, or name another --output."
        ) from error
    differ = [name for name in settings if settings[name] != made_with.get(name)]
    if differ:
        raise ValueError(f"{path} holds runs with other settings: {', '.join(differ)}. Name another --output.")
    return runs


def save(runs: list[dict[str, Any]], path: Path, settings: dict[str, Any]) -> None:
    """Writes all runs; a call that is cut off here leaves the file as it was."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(json.dumps({"settings": settings, "runs": runs}, indent=1) + "\n")
    partial.replace(path)


def checksum(*contents: bytes) -> str:
    """SHA-256 of what runs are trained on, for their settings."""
    return hashlib.sha256(b"".join(contents)).hexdigest()
