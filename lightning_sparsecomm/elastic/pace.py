"""How long a replica takes for a step."""

import time
from collections import deque

_ROUNDS = 5


class Pace:
    """Seconds for each step between exchanges: the least of the last five rounds, as one may include a validation.

    >>> pace = Pace()
    >>> pace.begin()
    >>> pace.end(steps=10)
    >>> pace.seconds > 0
    True
    """

    def __init__(self) -> None:
        self._begin: float | None = None
        self._recent: deque[float] = deque(maxlen=_ROUNDS)

    def begin(self) -> None:
        """An exchange has ended."""
        self._begin = time.perf_counter()

    def end(self, steps: int) -> None:
        """The next one begins, after so many steps."""
        if self._begin is not None and steps:
            self._recent.append((time.perf_counter() - self._begin) / steps)
        self._begin = None

    @property
    def seconds(self) -> float:
        """0 before the first round."""
        return min(self._recent, default=0.0)
