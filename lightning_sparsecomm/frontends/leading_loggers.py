"""Loggers of replicas that come and go: those of the one that leads write, those of the others do nothing."""

import importlib
import inspect
import operator
import warnings
from collections.abc import Callable
from copy import copy
from functools import lru_cache, partial
from types import new_class
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_sparsecomm.frontends.packages import TRAINERS
from lightning_sparsecomm.frontends.shared_csv import begun_by_others, with_others

if TYPE_CHECKING:
    import pytorch_lightning as pl

# What a replica writes, once, when it takes the lead, if it was not asked to before.
_LASTING = ("log_hyperparams", "log_graph")


class LeadingLoggers:
    """The loggers of a Trainer, which write only while its replica leads.

    Until it is known which replica leads, calls are held. Then they are made or, on other replicas, dropped, but
    hyperparameters and graphs: these are held until the replica leads.

    Args:
        trainer: Its loggers become objects of classes derived from their own, for good.

    Attributes:
        writes: Whether they write now; None as long as that is not known.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self.writes: bool | None = None
        # As in Lightning, first those of Weights & Biases: they watch what TensorBoard writes.
        self._loggers = sorted(trainer.loggers, key=lambda logger: not _is("WandbLogger", logger))
        self._held: list[tuple[str, Callable[[], object]]] = []
        for logger in self._loggers:
            _follow_the_lead(logger, self)

    def settle(self, leads: bool) -> None:
        """Lets the loggers write from now on, or no more."""
        if leads == self.writes:
            return
        known, lost = self.writes is not None, self.writes
        if lost:
            for logger in self._loggers:
                _put_away(logger)
        self.writes = leads
        held = [each for each in self._held if not known or each[0] in _LASTING]
        self._held = [] if leads else [each for each in held if each[0] in _LASTING]
        if leads:
            for logger in self._loggers:
                _begin(logger, first=not known)
            for name, write in held:
                _make(name, write)

    def call(self, name: str, write: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of a logger or of its experiment, holds the call, or drops it. Then the result is None."""
        if self.writes:
            return write(*args, **kwargs)
        if self.writes is None or name in _LASTING:
            # A user may change a dictionary later on.
            args = tuple(copy(each) if isinstance(each, dict) else each for each in args)
            self._held.append((name, partial(write, *args, **kwargs)))
        return None

    def reach(self, find: Callable[[], Any]) -> Any:
        """What `find` finds while this replica leads; else an object on which all can be called, and which follows."""
        return find() if self.writes else _stand_in(self, find)


def _make(name: str, write: Callable[[], object]) -> None:
    """Makes a call that was held. Hyperparameters that a logger refuses are no reason to lose the replica."""
    try:
        write()
    except Exception as error:
        if name not in _LASTING:
            raise
        warnings.warn(
            f"a logger refused {name}, called when this replica took the lead ({type(error).__name__}: {error})."
            " Training goes on without it there.",
            stacklevel=2,
        )


def _follow_the_lead(logger: Any, loggers: LeadingLoggers) -> None:
    """Gives the logger a class derived from its own: so it is still an object of that."""
    kind = type(logger)
    if hasattr(kind, "_sc_loggers"):
        # It has followed in an earlier fit. A folder that it thought of then may be another replica's by now.
        kind._sc_loggers = loggers
        _forget_number(logger)
        return
    led = _led(kind)
    led._sc_loggers = loggers
    led._sc_numbers = vars(logger).get("_version", 0) is None
    logger.__class__ = led


def _led(kind: type[Any]) -> type[Any]:
    class Led(kind):  # type: ignore[misc]
        """A logger whose public methods, and experiment, are those of its own class only while its replica leads."""

        # Of the current fit, or of the last one.
        _sc_loggers: ClassVar[LeadingLoggers]
        # Whether the logger numbers its versions: no user has chosen one.
        _sc_numbers: ClassVar[bool]

        def __getattribute__(self, name: str) -> Any:
            find = partial(super().__getattribute__, name)
            if name.startswith("_"):
                return find()
            loggers = Led._sc_loggers
            if name == "experiment":
                return loggers.reach(find)
            if inspect.isroutine(getattr(Led, name, None)) and not loggers.writes:
                return partial(loggers.call, name, find())
            return find()

        def __reduce_ex__(self, protocol: Any) -> Any:
            # As its own class, which can be found by name.
            reduced: tuple[Any, ...] = super().__reduce_ex__(protocol)
            return object.__new__, (kind,), *reduced[2:]

    Led.__name__, Led.__qualname__, Led.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    Led.__doc__ = kind.__doc__
    return Led


def _begin(logger: Any, first: bool) -> None:
    """Makes the experiment, as Lightning does before it trains.

    Args:
        logger: One that may write.
        first: Whether this replica leads from the beginning. Otherwise what there is may be others' of this run.
    """
    if not first:
        _forget_number(logger)
        begun_by_others(logger)
    if hasattr(logger, "experiment"):
        with_others(logger.experiment)


def _forget_number(logger: Any) -> None:
    if type(logger)._sc_numbers and vars(logger).get("_experiment") is None:
        logger._version = None


def _put_away(logger: Any) -> None:
    """Writes what waits. TensorBoard reads one file after another, so what comes later has to go to a new one."""
    logger.save()
    experiment = vars(logger).get("_experiment")
    if experiment is not None and _is("TensorBoardLogger", logger):
        experiment.close()


def _is(name: str, logger: object) -> bool:
    """Whether it is an object of Lightning's class of that name, or of one derived from it; of either package."""
    return any(kind.__name__ == name and kind.__module__.startswith(TRAINERS) for kind in type(logger).__mro__)


@lru_cache
def _stand_in_class() -> type[Any]:
    # What Lightning gives to ranks other than 0.
    dummies = [importlib.import_module(f"{package}.loggers.logger").DummyExperiment for package in TRAINERS]
    return new_class("StandIn", (_StandIn, *dict.fromkeys(dummies)))


def _stand_in(loggers: LeadingLoggers, find: Callable[[], Any]) -> Any:
    return _stand_in_class()(loggers, find)


class _StandIn:
    """Stands for an experiment, or for a part of one: what is called on it is called, held or dropped."""

    def __init__(self, loggers: LeadingLoggers, find: Callable[[], Any]) -> None:
        self._loggers, self._find = loggers, find

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._loggers.reach(lambda: getattr(self._find(), name))

    def __getitem__(self, key: Any) -> Any:
        return self._loggers.reach(lambda: self._find()[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._loggers.call("", lambda: operator.setitem(self._find(), key, value))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._loggers.call("", lambda *args, **kwargs: self._find()(*args, **kwargs), *args, **kwargs)
