"""What replicas leave at the lighthouse when their run has ended, for those that were away then.

A lighthouse keeps nothing but the names of replicas that have told that they live. It lists them on its page for
browsers, also those that are gone. So replicas that end tell that they live once more, under a name that says how.
"""

import http.client
import re
import urllib.request
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import NamedTuple

_WAIT = timedelta(seconds=5)

# As long as a page can be that lists some thousands of names.
_PAGE_BYTES = 1 << 24


class LastWord(NamedTuple):
    """How a run has ended.

    Attributes:
        run: The name of the first state that its replicas have shared.
        state: The name of the last one.
        steps: Optimizer steps.
    """

    run: str
    state: str
    steps: int


def leave(word: LastWord, lighthouse: str, module: ModuleType) -> None:
    """Leaves it at the lighthouse, if that can be reached.

    Args:
        word: What is left.
        lighthouse: Its address.
        module: torchft.
    """
    with suppress(RuntimeError, TimeoutError):
        client = module.coordination.LighthouseClient(lighthouse, _WAIT)
        client.heartbeat(f"run {word.run} ended with {word.state} after {word.steps} steps", _WAIT)


def find(run: str, lighthouse: str) -> LastWord | None:
    """How a run has ended; None if it has not, or if the lighthouse does not tell."""
    # The lighthouse is reached without a proxy otherwise, too.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{lighthouse.rstrip('/')}/status", timeout=_WAIT.total_seconds()) as page:
            text = page.read(_PAGE_BYTES).decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException):
        return None
    found = re.search(rf"run {re.escape(run)} ended with (\w+) after (\d+) steps", text)
    return LastWord(run, found[1], int(found[2])) if found else None
