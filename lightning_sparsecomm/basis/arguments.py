"""Checks of constructor arguments that many parts share."""

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta


def is_number(value: object) -> bool:
    """Whether `value` is an int or a float, and not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole_number(value: object) -> bool:
    """Whether `value` is an int, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole_number(name: str, value: int, least: int, meaning: str, remedy: str) -> None:
    """Raises `ValueError` unless `value` is a whole number, at least `least`; `remedy` says what to use instead."""
    if not is_whole_number(value) or value < least:
        rule = f"{f'at least {least}' if least else '0 or more'}{f': {meaning}' if meaning else ''}"
        raise ValueError(f"{name} must be a whole number, {rule}; got {value!r}. {remedy}")


def check_booleans(**booleans: bool) -> None:
    """Raises `TypeError` for the first value that is not a bool: the string "no", for example, would count as True."""
    for name, value in booleans.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False; got {value!r}. Leave it out for its default.")


def check_texts(**texts: str | None) -> None:
    """Raises `TypeError` for the first value that is neither a text nor None."""
    for name, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} must be a text; got {value!r}. Leave it out for its default.")


def check_durations(**durations: timedelta) -> None:
    """Raises `ValueError` for the first value that is not a positive timedelta."""
    for name, value in durations.items():
        if not isinstance(value, timedelta) or value <= timedelta(0):
            raise ValueError(f"{name} must be a positive timedelta; got {value!r}. Leave it out for its default.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence with the known name nearest to one that is unknown, after a space; empty if none is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def check_one_of(name: str, value: object, known: Iterable[str], remedy: str) -> None:
    """Raises `ValueError` unless `value` is a known name, with the nearest of them; `remedy` says what to use."""
    known = list(known)
    if value not in known:
        raise ValueError(
            f"{name} must be one of {', '.join(known)}; got {value!r}.{did_you_mean(str(value), known)} {remedy}"
        )


def options_of(function: Callable[..., object]) -> list[str] | None:
    """The names of a function's parameters, but `self`; None if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.name != "self"]


def check_options(call: str, given: Mapping[str, object], known: Iterable[str]) -> None:
    """Raises `TypeError` for the first option that is unknown, with the nearest one that is known."""
    known = list(known)
    for name in given:
        if name not in known:
            raise TypeError(
                f"{call} has no option {name!r}.{did_you_mean(name, known)} Its options: {', '.join(known)}."
            )


@contextmanager
def plain_for_command_lines() -> Iterator[None]:
    """Where LightningCLI makes an object, an error in its block ends the program with the one sentence that it holds.

    jsonargparse would list it among those of all types that it has tried, after all values it was given.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_globals.get("__name__", "").startswith("jsonargparse."):
                raise SystemExit(f"error: {error}") from error
        raise


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Makes errors raised in its block name the caller's own parameters, given for each of the part's parameters.

    A part's errors begin with the name of the part's parameter. A recipe that passes `block_density` on to a part as
    `density` translates that name. Errors that begin with another word pass unchanged.

    >>> with renamed(density="block_density"):
    ...     raise ValueError("density must be in (0, 1]; got 0.")
    Traceback (most recent call last):
        ...
    ValueError: block_density must be in (0, 1]; got 0.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        message = str(error)
        word = re.match(r"\w+", message)
        if word is None or word[0] not in names:
            raise
        raise type(error)(names[word[0]] + message[word.end() :]) from None
