"""A lighthouse of `sparsecomm lighthouse` for a benchmark, as a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from namespaces import die_with_parent


@contextmanager
def lighthouse(bind: str, *options: str) -> Iterator[str]:
    """Its address, such as `http://host:29510`. It serves until the context ends, or this process does.

    Args:
        bind: Where it listens; port 0 for any.
        options: More of the command's.
    """
    command = [sys.executable, "-m", "lightning_sparsecomm", "lighthouse", "--bind", bind, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[2].rstrip(",")
    finally:
        process.kill()
        process.wait()
