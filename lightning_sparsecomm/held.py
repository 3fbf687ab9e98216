"""What parts of a method hold between steps, as it is saved: by kind, and then by parameter name."""

from collections.abc import Iterable
from typing import Any

Held = dict[str, dict[str, Any]]
"""Kind, such as the class of a memory, to parameter name, to what is held for it: a tensor, mostly."""


def take(state: Held, kind: str, names: Iterable[str]) -> dict[str, Any]:
    """What is held of one kind for some parameters. It is taken out of `state`: what is left there in the end was
    taken by nobody."""
    held = state.get(kind, {})
    return {name: held.pop(name) for name in names if name in held}


def prefixed(prefix: str, held: Held) -> Held:
    """The same under longer names."""
    return {f"{prefix}.{kind}": parts for kind, parts in held.items()}


def within(prefix: str, held: Held) -> Held:
    """What `prefixed` has made, under the short names again; it shares what it holds with `held`."""
    return {kind.removeprefix(f"{prefix}."): parts for kind, parts in held.items() if kind.startswith(f"{prefix}.")}
