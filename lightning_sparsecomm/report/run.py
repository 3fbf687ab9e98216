"""One run as it was recorded: a JSON file in a folder, beside those of the runs that it is to be compared with."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_FORMAT = "lightning_sparsecomm run"
SUFFIX = ".run.json"


@dataclass(frozen=True)
class Point:
    """What was measured since the point before.

    Attributes:
        step: Optimizer steps so far.
        seconds: Since training began.
        loss: Mean of the training loss on rank 0; None where it was not finite, or unknown.
        sent_bytes: On the link so far in this run, by rank 0 for the method.
        values: Means per optimizer step, as CompressionMonitor logs them, and the residual's norm.
    """

    step: int
    seconds: float
    loss: float | None
    sent_bytes: float
    values: Mapping[str, float | None]


@dataclass
class Run:
    """A training, as rank 0 saw it.

    Attributes:
        name: Names the run on the page, and its file.
        strategy: What trained: the lines that were said at the start, or the strategy's class.
        world_size: Number of ranks.
        points: In the order of steps.
        rows: By purpose: calls, bytes handed over, and bytes on the link.
        ddp_link_bytes: What ddp would have sent.
        metrics: The Trainer's last metrics, by name; None where one was not finite.
        resumed_at: The step after which it goes on with an earlier run; 0 for a new one. Bytes, calls and time are
            those since then.
    """

    name: str
    strategy: str
    world_size: int
    points: list[Point] = field(default_factory=list)
    rows: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    ddp_link_bytes: float = 0.0
    metrics: dict[str, float | None] = field(default_factory=dict)
    resumed_at: int = 0

    @staticmethod
    def path(folder: Path, name: str) -> Path:
        """The file of a run with this name."""
        return folder / f"{name}{SUFFIX}"

    def save(self, folder: Path) -> Path:
        """Writes the run to its file in a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        path = self.path(folder, self.name)
        text = json.dumps(_finite({"format": _FORMAT, **asdict(self)}), indent=1, allow_nan=False)
        # A page that is made meanwhile must find a whole file.
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
        return path

    @classmethod
    def load(cls, path: Path) -> "Run":
        """Reads a run. Raises `ValueError` for a file that holds none."""
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            if state.pop("format") != _FORMAT:
                raise ValueError("another format")
            points = [Point(**point) for point in state.pop("points")]
            rows = {row: (calls, handed, link) for row, (calls, handed, link) in state.pop("rows").items()}
            return cls(points=points, rows=rows, **state)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} holds no run that CompressionReport has written ({error}). Remove it, or name another folder."
            ) from error


def _finite(value: Any) -> Any:
    """The same value with None for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
