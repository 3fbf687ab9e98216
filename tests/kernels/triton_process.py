"""Runs comparisons with Triton in a process of their own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton")


def run(module: str, call: str, cache: Path, **environment: str) -> None:
    """Calls a function of `module` in a new process.

    Triton decides on import whether it interprets. And a process that has used a GPU must not fork any more, which
    tests in other modules do.
    """
    program = f"from {module} import *; {call}; print('all compared')"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0 and done.stdout.endswith("all compared\n"), done.stdout
