"""State as it is saved: by kind, such as the class of a memory, and then by name, mostly that of a parameter."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_sparsecomm.channel.memory import Memory
from lightning_sparsecomm.exchange import Exchange

Saved = dict[str, dict[str, Any]]
"""Kind to name to what is held: a tensor, mostly."""


def pop_named(saved: Saved, kind: str, names: Iterable[str]) -> dict[str, Any]:
    """Removes what is held of one kind under some names, and returns it. What is left in the end has found no place."""
    held = saved.get(kind, {})
    return {name: held.pop(name) for name in names if name in held}


def add_prefix(prefix: str, saved: Saved) -> Saved:
    """The same state, its kinds with a prefix."""
    return {f"{prefix}.{kind}": parts for kind, parts in saved.items()}


def strip_prefix(prefix: str, saved: Saved) -> Saved:
    """Inverse of `add_prefix`. It leaves out other kinds, and shares its dictionaries with `saved`."""
    return {kind.removeprefix(f"{prefix}."): parts for kind, parts in saved.items() if kind.startswith(f"{prefix}.")}


def saved_of(parts: Sequence[Memory | Exchange], names: Sequence[str]) -> Saved:
    """What the parts of a channel hold. A part's class is its kind, numbered where there are several of one.

    Tensors under other names than the channel's parameters' are saved with the name of the first, since two channels
    may hold others of the same name.

    Raises:
        TypeError: A part holds something that cannot be saved.
    """
    saved: Saved = {}
    known = set(names)
    for kind, part in _kinds(parts):
        groups = part.state_dict() if isinstance(part, Memory) else {"": part.state_dict()}
        for group, tensors in groups.items():
            for name, tensor in tensors.items():
                if not isinstance(name, str) or not isinstance(tensor, Tensor):
                    raise TypeError(
                        f"state_dict of {type(part).__name__} must hold tensors by name; got {type(tensor).__name__}"
                        f" for {name!r}. Save numbers as torch.tensor(number)."
                    )
            if tensors:
                joined = kind if group == _only_group(part) else f"{kind}.{group}"
                saved[joined] = {name if name in known else name + _owner(names): tensors[name] for name in tensors}
    return saved


def load_saved(parts: Sequence[Memory | Exchange], names: Sequence[str], saved: Saved) -> None:
    """Gives parts what `saved_of` returned for parts of the same kinds, and takes it out of `saved`."""
    owner = _owner(names)
    for kind, part in _kinds(parts):
        state: dict[str, dict[str, Tensor]] = {}
        for joined in [each for each in saved if each == kind or each.startswith(f"{kind}.")]:
            group = joined.removeprefix(kind).removeprefix(".") or _only_group(part)
            others = pop_named(saved, joined, [name for name in saved[joined] if name.endswith(owner)])
            state[group] = pop_named(saved, joined, names)
            state[group] |= {name.removesuffix(owner): tensor for name, tensor in others.items()}
        if isinstance(part, Memory):
            part.load_state_dict(state)
        else:
            part.load_state_dict(state.get("", {}))


def _owner(names: Sequence[str]) -> str:
    return f" of {next(iter(names), None)}"


def _kinds(parts: Sequence[Memory | Exchange]) -> Iterator[tuple[str, Memory | Exchange]]:
    met: Counter[str] = Counter()
    for part in parts:
        kind = type(part).__name__
        met[kind] += 1
        yield (kind if met[kind] == 1 else f"{kind} {met[kind]}"), part


def _only_group(part: Memory | Exchange) -> str:
    """The group that is saved under the part's kind alone."""
    return next(iter(part.held)) if isinstance(part, Memory) and len(part.held) == 1 else ""
