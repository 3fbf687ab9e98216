"""Rates, times and counts as people write them: 100mbit, 20ms, 124M."""

import math
import re
from decimal import Decimal

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}

_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}

_MOST = 10**15
"""Of what is counted; up to there a float tells each whole number."""

# A comma stands between groups of three digits: 1,5s could mean two things.
_QUANTITY = re.compile(r"\s*((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def bits_per_second(name: str, text: str) -> float:
    """A rate: 50mbit, 1gbit, 100 Mbit/s, or unlimited.

    >>> bits_per_second("bandwidth", "100mbit"), bits_per_second("bandwidth", "1 Gbit/s")
    (100000000.0, 1000000000.0)

    Raises:
        ValueError: Not a positive number with a unit.
    """
    plain = text.strip()
    if plain.lower() == "unlimited":
        return math.inf
    if plain.lower().endswith("bit/s"):
        plain = plain[:-2]
    rule = "a rate with its unit, kbit, mbit or gbit (per second), or unlimited"
    return _parsed(name, plain, _RATES, rule, "100mbit")


def seconds(name: str, text: str) -> float:
    """A time: 20ms, 1.5s, 300us. 0 needs no unit.

    >>> seconds("rtt", "20ms")
    0.02

    Raises:
        ValueError: Not a number with a unit.
    """
    if text.strip() in ("0", "0.0"):
        return 0.0
    return _parsed(name, text, _TIMES, "a time with its unit, us, ms or s", "20ms", least=0.0)


def count(name: str, text: str) -> int:
    """A count: 11000000, 11M, 1.5B.

    >>> count("parameters", "124M")
    124000000

    Raises:
        ValueError: Not a whole number of at least 1.
    """
    example = "124M" if name.endswith("parameters") else "1000"
    number = _parsed(name, text, _COUNTS, "a whole number, or one with k, M or B behind it", example)
    if not 1 <= number <= _MOST or number != round(number):
        raise ValueError(
            f"{name} must be a whole number from 1 to {_MOST:,}; got {text!r}. Write {name}={example}, for example."
        )
    return round(number)


def _parsed(
    name: str, text: str, units: dict[str, float], rule: str, example: str, least: float = math.ulp(0.0)
) -> float:
    match = _QUANTITY.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in units:
        raise ValueError(f"{name} must be {rule}; got {text!r}. Write {example}, for example.")
    # As decimals: 8.03 times a billion is a whole number.
    number = float(Decimal(match[1].replace(",", "")) * Decimal(str(units[unit])))
    if not least <= number < math.inf:
        raise ValueError(f"{name} must be positive, {rule}; got {text!r}. Write {example}, for example.")
    return number


def as_rate(bits: float) -> str:
    """A rate in words: 100 Mbit/s."""
    if math.isinf(bits):
        return "unlimited"
    return _with_unit(bits, (1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1.0, "bit/s"))


def as_time(seconds: float) -> str:
    """A time in words: 12.3 ms."""
    return _with_unit(seconds, (1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if seconds else "0 ms"


def as_bytes(size: float) -> str:
    """A size in words: 44 MB."""
    return _with_unit(size, (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= 999.5 else f"{size:.0f} B"


def _with_unit(number: float, *units: tuple[float, str]) -> str:
    """Three digits, in the largest unit of which there is at least one after rounding, or in the smallest."""
    size, unit = next((each for each in units if number >= 0.9995 * each[0]), units[-1])
    count = number / size
    return f"{count:,.0f} {unit}" if count >= 99.95 else f"{count:.3g} {unit}"
