"""Lightning's question before each batch, whether rank 0 was told to stop, asked without waiting for the answer."""

import logging
import math
import signal
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from lightning_sparsecomm.basis.far import FAR_SECONDS, FarWire
from lightning_sparsecomm.basis.groups import broadcast_later
from lightning_sparsecomm.basis.ledger import LIGHTNING
from lightning_sparsecomm.basis.wire import Waiting, Wire
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing.delta import DeltaSync

if TYPE_CHECKING:
    import pytorch_lightning as pl

ASKS = "_broadcast_sigterm_tensor"
"""What Lightning's epoch loop calls for it, from 2.5.3 on: a broadcast of one 64-bit integer."""

# How long a question may take without holding up training, though it waits behind what is being exchanged.
_UNDER_WAY_SECONDS = 1.0
_MOST_STEPS = 1000
_RECENT = 5
# A rank other than 0 that was told to stop waits for so many answers of rank 0, or so long, before it leaves alone:
# rank 0 may be told a moment later.
_MOST_ANSWERS, _MOST_SECONDS = 2, 2.0


class StopFlags:
    """What rank 0 says every few steps, and all ranks heed when it says the next, in the same step.

    Lightning says it in each step, and waits for it: a round trip in each, also where the method exchanges nothing in
    most of them, and longer while an exchange in flight fills the cable. Here nobody waits, unless it takes longer than
    a second and than rank 0 makes steps for, by its own count, which it tells along.

    Told is who gets SIGTERM. Lightning's handler of that signal broadcasts too, in the middle of a step. No other rank
    would take part, so here it only notes that it was called. Where rank 0 is told, all ranks stop. Another rank that
    is told alone leaves, as with Lightning, but after two answers of rank 0's.

    Args:
        wire: Of this rank, whose ledger counts the bytes. Broadcasts take place in the default group.
        device: Where tensors of the default group have to be.
    """

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self._wire, self._device = wire, device
        self._loop: Any = None
        self.notifier = _Notifier()
        # Questions that this rank has come to since it was told.
        self._asked = 0
        self._under_way: tuple[Work, Tensor] | None = None
        self._every, self._since = 1, 0
        self._times: deque[float] = deque(maxlen=_RECENT)

    def step(self, told: bool) -> bool:
        """Before each step: whether this rank is to stop now, alone or with all others. `told`: whether it was told.

        Raises:
            PeerError: Another rank is gone, or too late.
        """
        self._times.append(time.monotonic())
        self._since += 1
        if self._since < self._every:
            return False
        self._asked += told
        if self.end() or self._asked > _MOST_ANSWERS:
            return True
        self._since = 0
        flag = torch.tensor([told, self._enough()], device=self._device)
        self._wire.ledger.record(LIGHTNING, "broadcast", flag.nbytes)
        self._under_way = broadcast_later(flag, 0), flag
        return False

    def end(self) -> bool:
        """Waits for what is under way; whether all ranks are to stop. Errors as for `step`."""
        if self._under_way is None:
            return False
        (work, flag), self._under_way = self._under_way, None
        with Waiting(self._wire, f"broadcast of {flag.nbytes} bytes ({LIGHTNING})"):
            work.wait()
        stops, self._every = flag.tolist()
        return bool(stops)

    def replace(self, trainer: "pl.Trainer") -> None:
        """Takes the place of Lightning's question, and of its handler of SIGTERM, until `restore`."""
        self._loop, connector = trainer.fit_loop.epoch_loop, getattr(trainer, "_signal_connector", None)
        stop = _stop_of(type(self._loop))
        self.notifier.replace(trainer, connector)

        def ask() -> None:
            if self.step(self.notifier.told or bool(getattr(connector, "received_sigterm", False))):
                self.notifier.tell()
                raise stop

        setattr(self._loop, ASKS, ask)

    def restore(self) -> None:
        """Gives Lightning its own question and handler back."""
        vars(self._loop).pop(ASKS, None)
        self.notifier.restore()

    def _enough(self) -> int:
        """Steps that this rank makes while a broadcast arrives: down a tree, whose hops take a round trip each."""
        steps = [after - before for before, after in zip(self._times, list(self._times)[1:])]
        hops = math.ceil(math.log2(self._wire.world_size)) + 1
        arriving = max(_UNDER_WAY_SECONDS, hops * getattr(self._wire, "round_trip", 0.0))
        return min(_MOST_STEPS, math.ceil(arriving / max(min(steps), 1e-4))) if steps else 1


class PlainQuestion:
    """Lightning's question as it is, in each step; its handler of SIGTERM only notes the signal.

    The handler's broadcast, amid a step, would take the place of another collective: where all ranks are told, as a
    cluster does before it takes machines away, some would wait for ever.
    """

    def __init__(self) -> None:
        self.notifier = _Notifier()
        self._loop: Any = None

    def replace(self, trainer: "pl.Trainer") -> None:
        """Takes the place of Lightning's handler, until `restore`."""
        self._loop, notifier = trainer.fit_loop.epoch_loop, self.notifier
        question = getattr(self._loop, ASKS)
        notifier.replace(trainer, getattr(trainer, "_signal_connector", None))

        def ask() -> None:
            # Another rank waits for rank 0, which may be told a moment later.
            if notifier.told and (trainer.is_global_zero or notifier.told_for > _MOST_SECONDS):
                notifier.tell()
            try:
                question()
            except SystemExit:
                notifier.tell()
                raise

        setattr(self._loop, ASKS, ask)

    def end(self) -> None:
        """Nothing is under way."""

    def restore(self) -> None:
        """Gives Lightning its own handler back."""
        vars(self._loop).pop(ASKS, None)
        self.notifier.restore()


class _Notifier:
    """Stands in for the function by which Lightning handles SIGTERM: the same without its broadcast.

    Lightning stops a rank as soon as `received_sigterm` is set, amid an epoch, and others would wait for it. So in
    training that is set when ranks have agreed. Validation, where ranks exchange nothing, ends at once.

    Attributes:
        told: Whether the signal has come.
    """

    def __init__(self) -> None:
        self.told = False
        self._since = 0.0
        self._trainer: Any = None
        self._connector: Any = None
        self._handlers: list[Any] = []
        self._place: int | None = None

    def replace(self, trainer: "pl.Trainer", connector: Any) -> None:
        """Takes its place, where it is: not outside the main thread, nor in versions that have none."""
        self._trainer, self._connector = trainer, connector
        self._handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
        theirs = getattr(connector, "_sigterm_notifier_fn", None)
        if theirs is not None and theirs in self._handlers:
            self._place = self._handlers.index(theirs)
            self._handlers[self._place] = self._note

    @property
    def told_for(self) -> float:
        """Seconds since the signal has come."""
        return time.monotonic() - self._since

    def tell(self) -> None:
        """Tells Lightning that the signal has come."""
        if self._connector is not None:
            self._connector.received_sigterm = True

    def restore(self) -> None:
        if self._place is not None:
            self._handlers[self._place] = self._connector._sigterm_notifier_fn
            self._place = None

    def _note(self, signum: int, _: object) -> None:
        rank = self._trainer.global_rank
        # As Lightning says it, by the same logger; but with the rank among all.
        logging.getLogger(type(self._connector).__module__).info("[rank: %d] Received SIGTERM: %d", rank, signum)
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self.told:
            launcher.kill(signum)
        if not self.told:
            self.told, self._since = True, time.monotonic()
        if self._trainer.validating or self._trainer.sanity_checking:
            self.tell()


def _stop_of(kind: type) -> type[BaseException]:
    """What the loop's own Lightning raises to stop, as there may be two; the loop may be of a class of the user's."""
    modules = [sys.modules.get(each.__module__) for each in kind.__mro__]
    return next(vars(each)["SIGTERMException"] for each in modules if hasattr(each, "SIGTERMException"))  # type: ignore[no-any-return]


class NoQuestion:
    """Before and after a fit: nothing is asked."""

    def count(self, idle_since: float) -> None:
        """Notes what Lightning has asked before this batch. Raises `PeerError` if a rank was gone, or too late."""

    def before_validation(self) -> None:
        """Ends the validation that begins at once, on a rank that was told in the last batch before it."""

    def end(self) -> None:
        """Training is over, on all ranks."""

    def leave(self) -> None:
        """Nothing of training is left to do. Raises Lightning's `SIGTERMException` on a rank that was told."""

    def restore(self) -> None:
        """Gives Lightning its own question and handler back."""


class StopQuestion(NoQuestion):
    """Lightning's question in one fit: left as it is, or replaced where ranks would wait for it and for nothing else.

    That is where the way is long, and where a method exchanges nothing in most steps. Lightning's handler of SIGTERM is
    replaced in any case.
    """

    def __init__(self, trainer: "pl.Trainer", engine: Engine) -> None:
        self._wire = wire = engine.wire
        far = isinstance(wire, FarWire) and wire.round_trip >= FAR_SECONDS
        delayed = all(isinstance(sync, DeltaSync) for sync in engine.registry.methods[0].syncs)
        self._loop = trainer.fit_loop.epoch_loop
        self._asks = hasattr(self._loop, ASKS)
        asked = wire.world_size > 1 and self._asks
        self._replaced = asked and (far or delayed)
        self._flags: StopFlags | PlainQuestion | None = None
        if asked:
            self._flags = StopFlags(wire, trainer.strategy.root_device) if self._replaced else PlainQuestion()
            self._flags.replace(trainer)

    def count(self, idle_since: float) -> None:
        if self._asks and not self._replaced:
            self._wire.ledger.record(LIGHTNING, "broadcast", 8)
            # Lightning ignores it if that fails, and waits for nothing but the next batch before it.
            waited = time.monotonic() - idle_since
            self._wire.check_after(f"broadcast of 8 bytes ({LIGHTNING})", waited)

    def before_validation(self) -> None:
        if self._told is not None:
            self._told.tell()

    def end(self) -> None:
        if self._flags is not None:
            self._flags.end()

    def leave(self) -> None:
        if self._told is not None:
            raise _stop_of(type(self._loop))

    def restore(self) -> None:
        if self._flags is not None:
            self._flags.restore()

    @property
    def _told(self) -> _Notifier | None:
        """What was told of the signal, if this rank was."""
        notifier = None if self._flags is None else self._flags.notifier
        return notifier if notifier is not None and notifier.told else None
