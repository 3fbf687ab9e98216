"""What crossed the wire, by purpose and collective: bytes handed over, and the bytes on the link that follow."""

import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lightning_sparsecomm.basis.phases import PHASES, Clock

Collective = Literal["all_reduce", "all_gather", "all_to_all", "broadcast", "send"]

# Rows of the ledger. The first three are ours; ratios count these alone.
GRADIENTS = "gradients"
UPDATES = "weight updates"
PARAMETERS = "parameters"
OURS = (GRADIENTS, UPDATES, PARAMETERS)
SETUP = "set-up"
SAVING = "checkpoints"
PROBING = "measuring the network"
COMPARISON = "comparison of replicas"
UNEVEN = "uneven inputs"
DDP_SETUP = "DDP set-up"
DDP_BUFFERS = "DDP buffers"
DDP_UNUSED = "DDP unused-parameter map"
LIGHTNING = "Lightning, metrics"
INSIDE = "inside nodes"
MEMBERSHIP = "membership"
JOINING = "state for joining replicas"


def link_bytes(collective: Collective, handed_bytes: float, world_size: int) -> float:
    """Bytes that one rank puts on the link, averaged over ranks, for `handed_bytes` that each rank hands over.

    A model, by each collective's published algorithm: a ring all-reduce sends every byte 2(W-1)/W times (Patarasuk &
    Yuan 2009), an all-gather sends it to W-1 others, an all-to-all keeps 1/W and sends each other part once (pairwise
    exchange, Thakur et al. 2005), and a broadcast crosses the network W-1 times in all. What is sent to one rank alone
    counts on the sender.

    Raises:
        ValueError: An unknown collective.
    """
    if collective == "all_reduce":
        return handed_bytes * 2 * (world_size - 1) / world_size
    if collective == "all_gather":
        return handed_bytes * (world_size - 1)
    if collective in ("all_to_all", "broadcast"):
        return handed_bytes * (world_size - 1) / world_size
    if collective == "send":
        return handed_bytes
    raise ValueError(
        f"collective must be one of {', '.join(get_args(Collective))}, whose bytes on the link are known; got"
        f" {collective!r}. Enter its bytes as those of collectives it is made of."
    )


@dataclass
class Traffic:
    """How often a collective was called, and bytes in the tensors handed over, padding and headers included."""

    calls: int = 0
    handed_bytes: int = 0


@dataclass(frozen=True)
class _Former:
    """Totals when the world last changed its size."""

    handed: dict[tuple[str, Collective], int] = field(default_factory=dict)
    ddp_bytes: int = 0
    ddp_gathered_bytes: int = 0


_TOTALS = (
    "ddp_bytes",
    "ddp_gathered_bytes",
    "sent_elements",
    "elements",
    "steps",
    "clamped_elements",
)


class Ledger:
    """What crossed the wire, by purpose and collective.

    Each row is a purpose. The method sends `gradients`, `weight updates` and `parameters` (averages of replicas that
    differ); the other rows are what DDP and Lightning send with any method. Bytes handed over are exact; bytes on the
    link follow from them by `link_bytes`.

    >>> ledger = Ledger(world_size=4)
    >>> ledger.record("gradients", "all_gather", handed_bytes=1000)
    >>> ledger.handed_bytes("gradients"), ledger.link_bytes("gradients")  # to 3 others
    (1000, 3000)

    Attributes:
        clock: Seconds of exchanges, by phase.
    """

    def __str__(self) -> str:
        return summary_table(self)

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.rows: dict[str, dict[Collective, Traffic]] = {}
        self.ddp_bytes = 0
        self.ddp_gathered_bytes = 0
        self.sent_elements = 0
        self.elements = 0
        self.clock = Clock()
        self.steps = 0
        self.clamped_elements = 0
        # Whether others of the same run have warned of clamped values.
        self.has_warned = False
        # Numbers of ranks of calls that are not between all, by row.
        self._sizes: dict[str, int] = {}
        # What was on the link, by row, and what ddp would have put there, while the world had other sizes; and the
        # totals up to then.
        self._former_link: dict[str, float] = {}
        self._former_ddp = 0.0
        self._former = _Former()

    def resize(self, world_size: int) -> None:
        """Counts what follows as sent in a world of another size. What was entered before keeps its link bytes."""
        if world_size == self.world_size:
            return
        self._former_link = {row: self.link_bytes(row) for row in self.rows}
        self._former_ddp = self.ddp_link_bytes
        self._former = self._totals()
        self.world_size = world_size

    def divide(self, sizes: dict[str, int]) -> None:
        """Counts the calls of these rows as between so many ranks, instead of all."""
        self._sizes = dict(sizes)

    @property
    def nodes(self) -> int:
        """Number of nodes that gradients are shared between; 0 where all ranks share them alike."""
        return self._sizes.get(GRADIENTS, 0)

    def _totals(self) -> _Former:
        handed = {(row, kind): t.handed_bytes for row, kinds in self.rows.items() for kind, t in kinds.items()}
        return _Former(handed, self.ddp_bytes, self.ddp_gathered_bytes)

    def clamp(self, count: int, largest: float) -> None:
        """Enters values that were clamped to the largest that the wire can carry; warns of the first ones."""
        if count and not self.clamped_elements and not self.has_warned:
            warnings.warn(
                f"{count:,} values beyond ±{largest:,.0f}, the range of float16 on the wire, were clamped in this step."
                " Error feedback sends the rest later; without it, that is lost. Use values='bfloat16' or"
                " wire_dtype='bfloat16', which have float32's range. strategy.ledger.clamped_elements counts on.",
                stacklevel=2,
            )
        self.clamped_elements += count

    def exchanging(self) -> AbstractContextManager[None]:
        """A context whose time is that of an exchange; see `Clock.running`."""
        return self.clock.running()

    @property
    def exchange_seconds(self) -> float:
        """Seconds in exchanges: selecting, coding, and waiting for the network."""
        return sum(self.clock.seconds.values())

    def record(self, row: str, collective: Collective, handed_bytes: int, calls: int = 1) -> None:
        """Enters calls. Raises `ValueError` for an unknown collective, which has no price on the link."""
        link_bytes(collective, handed_bytes, self.world_size)
        traffic = self.rows.setdefault(row, {}).setdefault(collective, Traffic())
        traffic.calls += calls
        traffic.handed_bytes += handed_bytes

    def add(self, other: "Ledger") -> None:
        """Enters the calls and counts of another ledger, without its clock."""
        for row, kinds in other.rows.items():
            for collective, traffic in kinds.items():
                self.record(row, collective, traffic.handed_bytes, traffic.calls)
        for total in _TOTALS:
            setattr(self, total, getattr(self, total) + getattr(other, total))

    def handed_bytes(self, row: str = GRADIENTS) -> int:
        """Bytes that this rank handed to the backend for one purpose."""
        return sum(traffic.handed_bytes for traffic in self.rows.get(row, {}).values())

    def link_bytes(self, row: str = GRADIENTS) -> float:
        """Bytes that this rank put on the link for one purpose. On average over ranks, as many come in."""
        return self._former_link.get(row, 0) + sum(
            link_bytes(
                kind,
                traffic.handed_bytes - self._former.handed.get((row, kind), 0),
                self._sizes.get(row, self.world_size),
            )
            for kind, traffic in self.rows.get(row, {}).items()
        )

    @property
    def ddp_link_bytes(self) -> float:
        """Link bytes of DDP for the same gradients in their own dtype: an all-reduce; an all-gather of sparse ones."""
        reduced = link_bytes("all_reduce", self.ddp_bytes - self._former.ddp_bytes, self.world_size)
        gathered = self.ddp_gathered_bytes - self._former.ddp_gathered_bytes
        return self._former_ddp + reduced + link_bytes("all_gather", gathered, self.world_size)

    @property
    def sent_link_bytes(self) -> float:
        """Bytes that this rank put on the link for the method, whatever it sent."""
        return sum(self.link_bytes(row) for row in OURS)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank handed to the backend for the method: what the papers count as upstream."""
        return sum(self.handed_bytes(row) for row in OURS)

    def compression_ratio(self) -> float:
        """Link bytes over link bytes: DDP's for the same steps, by ours. `nan` in a world of one: nothing is sent."""
        sent = self.sent_link_bytes
        return self.ddp_link_bytes / sent if sent else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """All totals, as plain numbers."""
        rows = {row: {kind: list(vars(t).values()) for kind, t in kinds.items()} for row, kinds in self.rows.items()}
        state = {"rows": rows, "seconds": dict(self.clock.seconds), **{name: getattr(self, name) for name in _TOTALS}}
        if self._former_link:
            state["link"] = {"rows": {row: self.link_bytes(row) for row in rows}, "ddp": self.ddp_link_bytes}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces all totals by those of an earlier run in a world of the same size, which this one goes on with."""
        self.rows, self._former_link, self._former_ddp, self._former = {}, {}, 0.0, _Former()
        self.add_rows(state)
        for name in _TOTALS:
            setattr(self, name, state.get(name, 0))
        if "link" in state:
            self._former_link, self._former_ddp = dict(state["link"]["rows"]), state["link"]["ddp"]
            self._former = self._totals()
        # Version 0.1 saved only the sum.
        seconds = state.get("seconds", {"update": state.get("exchange_seconds", 0.0)})
        self.clock.seconds = {name: float(seconds.get(name, 0.0)) for name in PHASES}

    def add_rows(self, state: dict[str, Any]) -> None:
        """Adds the calls that another ledger has entered, from its `state_dict`."""
        for row, kinds in state["rows"].items():
            for kind, (calls, handed_bytes) in kinds.items():
                self.record(row, kind, handed_bytes, calls)

    def density(self) -> float:
        """Elements sent by elements trained, over all steps. `nan` before the first."""
        return self.sent_elements / self.elements if self.elements else float("nan")


def summary_table(ledger: Ledger) -> str:
    """What one rank sent for each purpose, as a table for a terminal."""

    def line(name: str, calls: str, handed: str, link: str) -> str:
        return f"{name:<26}{calls:>9}{handed:>15}{link:>15}"

    lines = [line(f"sent by one rank of {ledger.world_size}", "calls", "handed over", "on the link")]
    for row in sorted(ledger.rows, key=lambda row: row not in OURS):
        calls = sum(traffic.calls for traffic in ledger.rows[row].values())
        lines.append(line(row, f"{calls:,}", _size(ledger.handed_bytes(row)), _size(ledger.link_bytes(row))))
    lines.append(line("gradients, had it been ddp", "", _size(ledger.ddp_bytes), _size(ledger.ddp_link_bytes)))
    if ledger.world_size == 1:
        lines.append("One process: nothing crosses a network, so nothing is saved.")
    elif ledger.sent_link_bytes:
        lines.append(
            f"compression ratio {ledger.compression_ratio():,.1f} over {ledger.steps:,} steps,"
            f" density {ledger.density():.3g}, {ledger.exchange_seconds:.1f} s in exchange"
        )
        phases = [f"{name} {seconds:.1f} s" for name, seconds in ledger.clock.seconds.items() if seconds > 0]
        if len(phases) > 1:
            lines.append(f"of these: {', '.join(phases)}")
    lines.append("On the link: by the collectives' published algorithms, from the bytes handed over.")
    if ledger.nodes > 1:
        lines.append(f"Of the model, this rank's part, also had it been ddp. {INSIDE!r} does not leave the node.")
    return "\n".join(lines)


def _size(count: float) -> str:
    """Bytes in decimal units, as for networks."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:,.2f} {unit}"
    return f"{count:,.0f} B"
