"""How many training samples are behind the steps of an optimizer."""

import math
from collections.abc import Sequence


class SampleCounts:
    """The samples behind each of an optimizer's last steps, where a front end counts them; NaN where unknown.

    Behind a step are the batches since the step before it: all of those whose gradients are accumulated. An optimizer
    that steps more than once in a batch has used the same samples again.

    >>> counts = SampleCounts()
    >>> for batch in (8, 8, 3):
    ...     counts.add(batch)
    >>> counts.step(keep=10)
    >>> counts.add(8)
    >>> counts.step(keep=10)
    >>> counts.behind(2), counts.behind(1), counts.behind(3)
    (27, 8, nan)
    """

    def __init__(self) -> None:
        self._steps: list[float] = []
        # Of the batches since the last step, and of the last batch.
        self._since: float = 0
        self._last = math.nan

    def add(self, samples: float) -> None:
        """The next batch has so many samples."""
        self._since += samples
        self._last = samples

    @property
    def next(self) -> float:
        """The samples behind the step that comes next, or is under way."""
        return self._since or self._last

    def step(self, keep: int) -> None:
        """A step is made. The last `keep` of all are kept."""
        self._steps.append(self.next)
        self._since = 0
        del self._steps[: max(0, len(self._steps) - keep)]

    def behind(self, steps: int) -> float:
        """The samples behind the last so many steps; NaN if those of one are unknown."""
        known = len(self._steps) - steps
        return sum(self._steps[known:]) if known >= 0 else math.nan

    def lack(self, steps: int) -> None:
        """The last so many steps were made by others: nothing of them was trained here."""
        self._steps = [0] * steps

    def state_dict(self) -> list[float]:
        """The samples behind each step that is kept, the last one last."""
        return list(self._steps)

    def load_state_dict(self, steps: Sequence[float]) -> None:
        """Takes over what `state_dict` returned."""
        self._steps = list(steps)
