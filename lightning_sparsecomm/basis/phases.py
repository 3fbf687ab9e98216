"""Where the time of exchanges goes: seconds by phase."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

PHASES = ("update", "select", "encode", "wait", "decode")
"""`update` is all that is none of the others: memories take in gradients, and results are written."""

Profile = Callable[[str], AbstractContextManager[object]]

_running: "ContextVar[Clock | None]" = ContextVar("the clock of the exchange that runs", default=None)


class Clock:
    """Adds up the host's seconds in each phase of exchanges; time in an inner phase does not count for the outer one.

    On CUDA, kernels run after they were started: their time is that of the phase in which the host waits for them.

    Attributes:
        seconds: By phase.
        profile: Called with a phase's name, or `exchange` for all phases, it returns a context that is held open then;
            None for nothing.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.profile: Profile | None = None
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """An exchange: in its context `phase` adds to this clock, and all other time is `update`."""
        token = _running.set(self)
        try:
            with self.within("update", "exchange"):
                yield
        finally:
            _running.reset(token)

    @contextmanager
    def within(self, name: str, profiled_as: str | None = None) -> Iterator[None]:
        """A context whose time is added to a phase."""
        profiled = self.profile is not None and name not in self._open
        self._charge()
        self._open.append(name)
        try:
            with self.profile(profiled_as or name) if profiled and self.profile is not None else nullcontext():
                yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


def phase(name: str) -> AbstractContextManager[None]:
    """A phase of the exchange that runs in this thread; nothing where none runs. For exchanges, codecs and wires.

    Args:
        name: One of `PHASES`.
    """
    clock = _running.get()
    return nullcontext() if clock is None else clock.within(name)
