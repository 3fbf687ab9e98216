"""Refuses versions of other packages that this one cannot work with, before it imports any of them."""

import importlib.metadata
import re

OLDEST = {
    "torch": "2.6",
    "pytorch-lightning": "2.5",
    "lightning": "2.5",
    "numpy": "1.26.4",
    "numba": "0.60",
}
"""The lower bounds of pyproject.toml, where they matter."""

COMPROMISED = {"pytorch-lightning": ("2.6.2", "2.6.3"), "lightning": ("2.6.2", "2.6.3")}
"""Releases that were published by attackers."""


def check() -> None:
    """Looks at what is installed, whatever installed it. What is missing is no concern of this.

    Raises:
        ImportError: A version is too old, or was compromised.
    """
    for name, oldest in OLDEST.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if _numbers(version) < _numbers(oldest):
            raise ImportError(
                f"lightning_sparsecomm needs {name} {oldest} or newer; got {version}. Run: pip install"
                f" '{name}>={oldest}'"
            )
        if version in COMPROMISED.get(name, ()):
            raise ImportError(
                f"{name} must not be {version}, a release that was compromised. Do not run it: install another one,"
                " and replace the secrets that this machine has held since."
            )


def _numbers(version: str) -> tuple[int, ...]:
    """Release numbers of a version: (2, 13, 0) of 2.13.0a1+cpu."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release is not None else ()
