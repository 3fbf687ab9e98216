"""Exchanges in flight, on one replica: watched, and held up."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparsecomm.basis.digests import digest_of
from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.elastic.flight import RoundInFlight
from lightning_sparsecomm.elastic.meetings import Meetings
from lightning_sparsecomm.elastic.units import units_of
from lightning_sparsecomm.elastic.wire import ElasticWire
from lightning_sparsecomm.sharing.delta_share import DeltaShare
from lightning_sparsecomm.sharing.streamed import StreamedShare

# Bounds waits for events.
_SECONDS = 60


class _Books:
    """What one replica's units have trained, exchanged and kept, by unit; and what all replicas share, by state."""

    def __init__(self) -> None:
        self.shared: dict[str, str] = {}
        # How many steps replicas have made while each exchange was in flight.
        self.meanwhile: list[int] = []
        self._units: dict[DeltaShare, dict[str, Tensor]] = {}

    def watch(self) -> None:
        """Keeps books of all that happens from now on, in this process."""
        before_update, after_update = DeltaShare.before_update, DeltaShare.after_update
        prepare, commit, landing, land = Channel.prepare, Channel.commit, Meetings._land, StreamedShare.land
        began: dict[DeltaShare, Tensor] = {}
        given: dict[int, Sequence[Tensor | None]] = {}

        def unit_of(channel: Channel) -> DeltaShare | None:
            return next((unit for unit in self._units if unit.channel is channel), None)

        def before(unit: DeltaShare) -> None:
            before_update(unit)
            began[unit] = _flat([weight.detach() for _, weight in unit.parameters])

        def after(unit: DeltaShare) -> None:
            after_update(unit)
            # Kernels are compiled by taking steps on small stand-ins.
            if isinstance(unit.wire, ElasticWire):
                now = _flat([weight.detach() for _, weight in unit.parameters])
                self._add(unit, "trained", now - began[unit])

        def prepared(channel: Channel, gradients: Sequence[Tensor | None], *args: Any, **options: Any) -> None:
            given[id(channel)] = [None if each is None else each.detach().clone() for each in gradients]
            prepare(channel, gradients, *args, **options)

        def committed(channel: Channel) -> Any:
            exchanged, unit = commit(channel), unit_of(channel)
            if unit is not None:
                changes = [
                    torch.zeros_like(weight) if each is None else each
                    for each, (_, weight) in zip(given[id(channel)], unit.parameters)
                ]
                sent = exchanged.sent
                self._add(unit, "weighted", _flat(changes))
                self._add(unit, "sent", (sent if isinstance(sent, Tensor) else sent.dense()).double())
                if unit.weight:
                    self._add(unit, "exchanged", _flat(changes) / unit.weight)
            return exchanged

        def landed(turns: Meetings) -> None:
            before = turns.state
            landing(turns)
            if turns.state != before:
                units = [unit for each in turns._registry.optimizers for unit in units_of(each)]
                anchors = [anchor for unit in units for _, anchor in unit.in_common()]  # type: ignore[union-attr]
                self.shared[turns.state] = "".join(map(digest_of, anchors))

        def used(unit: StreamedShare) -> None:
            self.meanwhile.append(unit.steps)
            land(unit)

        DeltaShare.before_update, DeltaShare.after_update = before, after  # type: ignore[method-assign]
        Channel.prepare, Channel.commit = prepared, committed  # type: ignore[method-assign]
        Meetings._land, StreamedShare.land = landed, used  # type: ignore[method-assign]

    def report(self) -> dict[str, Any]:
        """How much is missing of what was trained, and of what was exchanged, by the largest element of each."""
        return {"shared": self.shared, "meanwhile": self.meanwhile} | {
            name: max((_missing(unit, books, name) for unit, books in self._units.items()), default=0.0)
            for name in ("trained", "weighted")
        }

    def _add(self, unit: DeltaShare, name: str, amount: Tensor) -> None:
        books = self._units.setdefault(unit, {})
        books[name] = books[name] + amount if name in books else amount


def _missing(unit: DeltaShare, books: dict[str, Tensor], name: str) -> float:
    nothing = torch.zeros(unit.layout.size, dtype=torch.float64)
    if name == "trained":
        error = books.get("trained", nothing) - books.get("exchanged", nothing)
    else:
        residuals = unit.channel.residuals
        if any(residual.decay != 1 for residual in residuals):
            # By definition it forgets.
            return 0.0
        held = residuals[0].held["residual"].flat.double() if residuals else nothing
        error = books.get("weighted", nothing) - books.get("sent", nothing) - held
    return float(error.abs().max() / books.get("trained", nothing).abs().max().clamp(min=1e-9))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.flatten().double() for each in tensors])


BOOKS = _Books()


def watch_flights() -> None:
    """Alters this process: `BOOKS` are kept."""
    BOOKS.watch()


def hold_until_steps(steps: int) -> Callable[[], None]:
    """Alters this process: an exchange in flight ends only when training has made so many more steps.

    Where training waited for it, it would fail after a time.
    """

    def before() -> None:
        run, after_step, made = RoundInFlight._run, StreamedShare.after_step, threading.Condition()

        def stepped(unit: StreamedShare) -> None:
            after_step(unit)
            with made:
                made.notify_all()

        def running(flight: RoundInFlight) -> None:
            units = [unit for unit in BOOKS._units if isinstance(unit, StreamedShare) and unit.stream is flight]
            with made:
                assert made.wait_for(lambda: all(unit.steps >= steps for unit in units), _SECONDS), "training waits"
            run(flight)

        StreamedShare.after_step = stepped  # type: ignore[method-assign]
        RoundInFlight._run = running  # type: ignore[method-assign]

    return before
