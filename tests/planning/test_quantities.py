"""Rates, times and counts as people write them."""

import math
from collections.abc import Callable

import pytest

from lightning_sparsecomm.planning.quantities import as_bytes, as_rate, as_time, bits_per_second, count, seconds


def test_what_people_write() -> None:
    assert bits_per_second("bandwidth", "50mbit") == 50e6
    assert bits_per_second("bandwidth", " 1.5 Gbit ") == 1.5e9
    assert bits_per_second("bandwidth", "50 Mbit/s") == 50e6
    assert bits_per_second("bandwidth", "1 Tbit/s") == 1e12
    assert bits_per_second("bandwidth", "unlimited") == math.inf
    assert seconds("rtt", "20ms") == pytest.approx(0.02)
    assert seconds("rtt", "300us") == pytest.approx(3e-4)
    assert seconds("rtt", "0") == 0
    assert count("parameters", "124M") == 124_000_000
    assert count("parameters", "1.5B") == 1_500_000_000
    # Not whole as products of floats.
    assert count("parameters", "8.03B") == 8_030_000_000
    assert count("parameters", "66.9M") == 66_900_000
    assert count("parameters", "11,000,000") == 11_000_000
    assert count("parameters", "1,500.5k") == 1_500_500


@pytest.mark.parametrize(
    ("words", "number", "text"),
    [
        (as_time, 0.9996, "1 s"),
        (as_time, 0.9996e-3, "1 ms"),
        (as_time, 0.9994, "999 ms"),
        (as_time, 123.4, "123 s"),
        (as_time, 12_345.6, "12,346 s"),
        (as_time, 0.0, "0 ms"),
        (as_time, 2e-9, "0.002 us"),
        (as_rate, 999.7e6, "1 Gbit/s"),
        (as_rate, 4e12, "4 Tbit/s"),
        (as_rate, 0.5, "0.5 bit/s"),
        (as_bytes, 999.7e3, "1 MB"),
        (as_bytes, 999.6, "1 kB"),
        (as_bytes, 12.0, "12 B"),
        (as_bytes, 1.6e12, "1.6 TB"),
        (as_bytes, 1.6e15, "1,600 TB"),
    ],
)
def test_what_people_read(words: Callable[[float], str], number: float, text: str) -> None:
    assert words(number) == text


@pytest.mark.parametrize("text", ["100", "100 mb", "fast", "", "-3mbit", "0mbit", "50mbps", "mbit/s"])
def test_a_rate_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--bandwidth must be .*a rate with its unit.*; got .*100mbit"):
        bits_per_second("--bandwidth", text)


@pytest.mark.parametrize("text", ["20", "20 minutes", "ms", "1,5s", "1.2.3s", "-1s", "nan", "9" * 40 + "!"])
def test_a_time_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--rtt must be .*a time with its unit.*; got .*20ms"):
        seconds("--rtt", text)


@pytest.mark.parametrize("text", ["0", "1.5", "many", "12T", "0.3k2"])
def test_a_count_is_whole_and_positive(text: str) -> None:
    with pytest.raises(ValueError, match=r"--parameters must be .*124M"):
        count("--parameters", text)
    with pytest.raises(ValueError, match=r"--steps must be .*1000"):
        count("--steps", text)


def test_words() -> None:
    assert [as_rate(rate) for rate in (1e8, 2.5e9, 3e4, math.inf)] == [
        "100 Mbit/s",
        "2.5 Gbit/s",
        "30 kbit/s",
        "unlimited",
    ]
    assert [as_time(time) for time in (0.0123, 2.5, 250.0, 3e-5)] == ["12.3 ms", "2.5 s", "250 s", "30 us"]
    assert [as_bytes(size) for size in (12, 4.4e7, 2e9)] == ["12 B", "44 MB", "2 GB"]
