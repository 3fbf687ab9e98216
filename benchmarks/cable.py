"""What the lab's cables are asked to be: rates, round-trip time, jitter and loss, as text with units."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

UNLIMITED = "unlimited"
SLOWEST, FASTEST = 10**5, 10**11  # bits a second

# The fastest cable that the switch of switch.py carries; docs/network.md has the measurement.
FASTEST_WITH_LENGTH = "1gbit"

# Below, the lab's own delay of some tenths of a millisecond would be more than 5% of it.
SHORTEST_RTT, LONGEST_RTT = 0.01, 10.0  # seconds

# More, and TCP hardly connects.
MOST_LOSS = 0.5

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def bits_per_second(rate: str, name: str = "a rate") -> int | None:
    """The number for a rate such as `100mbit`; None for `unlimited`.

    Args:
        rate: The text.
        name: What the error calls it.

    Raises:
        ValueError: Not a rate, or one that cannot be shaped.
    """
    if rate == UNLIMITED:
        return None
    match = re.fullmatch(r"([0-9]+)(kbit|mbit|gbit)", rate)
    if match is None or not int(match[1]):
        raise ValueError(
            f"{name} must be a number of kbit, mbit or gbit a second, or {UNLIMITED}; got {rate!r}. Try 100mbit."
        )
    bits = int(match[1]) * _UNITS[match[2]]
    if not SLOWEST <= bits <= FASTEST:
        raise ValueError(f"{name} must be from 100kbit to 100gbit: no other can be shaped; got {rate}.")
    return bits


def seconds(time: str, name: str) -> float:
    """The number for a time such as `100ms` or `0.2s`.

    Raises:
        ValueError: Not a time.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s)", time)
    if match is None:
        digits = re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", time)
        raise ValueError(
            f"{name} must be a number with its unit, ms or s; got {time!r}. Try {time + 'ms' if digits else '100ms'}."
        )
    return float(match[1]) * (0.001 if match[2] == "ms" else 1)


def fraction(share: str, name: str) -> float:
    """The number for a percentage such as `0.1%`.

    Raises:
        ValueError: Not a percentage, or more than half.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", share)
    if match is None:
        raise ValueError(f"{name} must be a percentage; got {share!r}. Try 0.1%.")
    if float(match[1]) > 100 * MOST_LOSS:
        raise ValueError(f"{name} must be from 0% to {MOST_LOSS:.0%}, or TCP hardly connects; got {share}. Try 1%.")
    return float(match[1]) / 100


@dataclass(frozen=True)
class Cable:
    """The cable of one host. Between two hosts, the worse of their two cables counts, for each property.

    Args:
        rate: In both directions: `100mbit`, `1gbit`, ..., or `unlimited`.
        up: Rate from the host, where it differs from `rate`.
        down: Rate to the host, where it differs from `rate`.
        rtt: Round-trip time between this host and any other, such as `100ms`.
        jitter: The round-trip time wanders between `rtt - jitter` and `rtt + jitter`; its standard deviation is a third
            of `jitter`.
        loss: Share of packets that is lost in each direction, such as `0.1%`.

    Raises:
        ValueError: One of them is not what it should be, or the switch cannot do it.
    """

    rate: str = "100mbit"
    up: str | None = None
    down: str | None = None
    rtt: str = "0ms"
    jitter: str = "0ms"
    loss: str = "0%"

    def __post_init__(self) -> None:
        bits_per_second(self.rate)
        for name, rate in (("up", self.up), ("down", self.down)):
            if rate is not None:
                bits_per_second(rate, name)
        rtt, jitter = self.rtt_seconds, self.jitter_seconds
        if rtt and not SHORTEST_RTT <= rtt <= LONGEST_RTT:
            raise ValueError(
                f"rtt must be 0ms, or from {1000 * SHORTEST_RTT:g}ms, below which the lab's own delay is no longer"
                f" small, to {LONGEST_RTT:g}s; got {self.rtt}. Try 20ms."
            )
        if jitter > rtt:
            raise ValueError(
                f"jitter must be at most the rtt, {self.rtt}; got {self.jitter}. Give a larger rtt or a smaller jitter."
            )
        if self.needs_switch:
            self.require_slow()

    @classmethod
    def of(cls, text: str) -> "Cable":
        """The cable that a text such as `100mbit` or `100mbit, rtt 20ms, loss 0.1%` describes, as `str` writes it.

        Raises:
            ValueError: It describes none.
        """
        rate, *others = text.split(", ")
        cable = cls(rate)
        return cable.changed(",".join(other.replace(" ", "=", 1) for other in others)) if others else cable

    def require_slow(self) -> None:
        """Raises a ValueError where the switch, which gives cables length and losses, cannot carry its rates."""
        most = bits_per_second(FASTEST_WITH_LENGTH) or 0
        for name, rate, bits in (("up", self.up, self.up_bits), ("down", self.down, self.down_bits)):
            if bits is None or bits > most:
                raise ValueError(
                    f"with rtt or loss, {name if rate else 'rate'} must be at most {FASTEST_WITH_LENGTH}, which is what"
                    f" the switch can carry; got {rate or self.rate}. Give a slower one, or neither rtt nor loss."
                )

    @property
    def up_bits(self) -> int | None:
        """Bits a second from the host; None where unlimited."""
        return bits_per_second(self.up or self.rate)

    @property
    def down_bits(self) -> int | None:
        """Bits a second to the host; None where unlimited."""
        return bits_per_second(self.down or self.rate)

    @property
    def rtt_seconds(self) -> float:
        return seconds(self.rtt, "rtt")

    @property
    def jitter_seconds(self) -> float:
        return seconds(self.jitter, "jitter")

    @property
    def loss_fraction(self) -> float:
        return fraction(self.loss, "loss")

    @property
    def needs_switch(self) -> bool:
        """Whether it has a length, or loses packets: the kernel alone does neither."""
        return self.loss_fraction > 0 or self.rtt_seconds > 0

    def changed(self, text: str) -> "Cable":
        """This cable with what a text such as `rate=10mbit,rtt=200ms` changes.

        Raises:
            ValueError: No such property, or not a value for it.
        """
        names = [field.name for field in fields(self)]
        changes: dict[str, str | None] = {}
        for part in text.split(","):
            name, equals, value = part.partition("=")
            if not equals or name not in names:
                raise ValueError(
                    f"a cable's properties must be NAME=VALUE with names among {', '.join(names)}, and commas between;"
                    f" got {part!r}. Try rate=10mbit,rtt=200ms."
                )
            changes[name] = value
        if "rate" in changes:
            changes = {"up": None, "down": None} | changes
        convert: Callable[..., Cable] = replace
        return convert(self, **changes)

    def __str__(self) -> str:
        differing = [field for field in fields(self)[1:] if getattr(self, field.name) != field.default]
        return ", ".join([self.rate, *(f"{field.name} {getattr(self, field.name)}" for field in differing)])


def exception(text: str, cable: Cable, hosts: int, name: str) -> tuple[int, Cable]:
    """The host and its cable, for a text such as `3:rate=10mbit,rtt=200ms`.

    Args:
        text: The text.
        cable: What the text changes.
        hosts: How many there are.
        name: `rank` or `node`, for the error.

    Raises:
        ValueError: No such host, or not a cable.
    """
    number, colon, changes = text.partition(":")
    if not colon or not number.isdecimal() or int(number) >= hosts:
        raise ValueError(
            f"--{name} must be a number from 0 to {hosts - 1}, a colon, and what differs there; got {text!r}."
            f" Try {hosts - 1}:rate=10mbit,rtt=200ms."
        )
    return int(number), cable.changed(changes)
