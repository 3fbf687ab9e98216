"""What users are told: the method at the start, phases for a profiler, and the ledger of processes that it started."""

import logging
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from lightning_sparsecomm.basis.ledger import Ledger
from lightning_sparsecomm.basis.phases import Profile
from lightning_sparsecomm.frontends.expected import Expected
from lightning_sparsecomm.frontends.packages import FABRICS, TRAINERS
from lightning_sparsecomm.planning.model_layout import ModelLayout
from lightning_sparsecomm.planning.saving import times_fewer_bytes
from lightning_sparsecomm.run.announcement import announcement
from lightning_sparsecomm.run.length import warn_of_short_run
from lightning_sparsecomm.run.node_turns import advice
from lightning_sparsecomm.run.rehearsal import compile_kernels

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies.launchers.multiprocessing import _MultiProcessingLauncher
else:
    _MultiProcessingLauncher = object


def say(line: str, told: object) -> None:
    """Prints a line as Lightning prints its own; `told` is an object of Lightning's, or derived from one."""
    # Lightning prints what its own loggers get, and those below them.
    modules = (kind.__module__ for kind in type(told).__mro__)
    logging.getLogger(next(module for module in modules if module.startswith((*TRAINERS, *FABRICS)))).info(line)


def announce(lines: Sequence[str], trainer: "pl.Trainer", name: str = "") -> None:
    """Says the lines on the terminal, and enters them as a hyperparameter in the Trainer's loggers.

    Its default name has the step where a fit does not begin at 0, as some loggers refuse another value in the same run.
    """
    name = name or (f"sparsecomm_from_step_{trainer.global_step}" if trainer.global_step else "sparsecomm")
    for line in lines:
        say(line, trainer)
    note({name: "; ".join(line.removeprefix("sparsecomm: ") for line in lines)}, trainer)


def note(hyperparameters: dict[str, str], trainer: "pl.Trainer") -> None:
    """Enters hyperparameters in the Trainer's loggers. A logger may refuse: MLflow's, where one changes in a run."""
    for logger in trainer.loggers:
        try:
            logger.log_hyperparams(hyperparameters)
        except Exception as error:
            warnings.warn(
                f"{type(logger).__name__} did not take the hyperparameters {', '.join(hyperparameters)}"
                f" ({type(error).__name__}: {error}). Training goes on without them there.",
                stacklevel=2,
            )


def say_start(strategy: Any, trainer: "pl.Trainer", found: Expected, length: float) -> None:
    """Says the method of each optimizer, and enters it and the model's layout in the loggers. On rank 0.

    Args:
        strategy: Of the Trainer; keeps the lines as `announced`.
        trainer: About to train.
        found: What is expected of the fit.
        length: Steps by which the method's form was chosen.
    """
    engine, registry = strategy.engine, strategy.engine.registry
    warn_of_short_run(registry, engine.warmup, found.steps, found.epochs)
    fewer = [times_fewer_bytes(engine, each, length, found.epoch_steps) for each in registry.optimizers]
    usual = strategy.method.for_run(length, engine.wire.world_size)
    lines = announcement(
        registry,
        length,
        strategy.taking_part,
        estimated=found.estimated,
        fewer=fewer,
        come_and_go=strategy.come_and_go,
        may_end_sooner=found.may_end_sooner,
        usual=usual,
        warms_up=engine.warmup is not None,
    )
    strategy.announced = [*lines, *advice(registry, strategy.num_nodes, strategy.num_processes)]
    announce(strategy.announced, trainer)
    layout = ModelLayout.of(registry.modules, [each.optimizer for each in registry.optimizers])
    note({"sparsecomm_model": layout.line()}, trainer)


def get_ready(strategy: Any, trainer: "pl.Trainer") -> None:
    """Compiles kernels, and lets a chooser begin, before the first step. A collective.

    What it chooses is said on rank 0: on the terminal, in the loggers, and above the end table.
    """

    def tell(line: str) -> None:
        if trainer.is_global_zero:
            strategy.announced = [*strategy.announced, line]
            announce([line], trainer, f"sparsecomm_step_{trainer.global_step}")

    chooser = strategy.chooser
    choices = list(chooser.choices.values()) if chooser is not None else None
    first = strategy.local_rank == 0
    compile_kernels(strategy.engine, first, strategy.barrier, lambda line: say(line, trainer), choices)
    if chooser is not None:
        chooser.say = tell
        chooser.begin()


def get_fabric_ready(strategy: Any) -> None:
    """Compiles kernels before Fabric's first step, and says which method each optimizer has. A collective."""
    engine, chooser = strategy.engine, strategy.chooser
    choices = list(chooser.choices.values()) if chooser is not None else None
    compile_kernels(engine, strategy.local_rank == 0, strategy.barrier, lambda line: say(line, strategy), choices)
    if strategy.is_global_zero:
        optimizers = engine.registry.optimizers
        fewer = [times_fewer_bytes(engine, each, engine.length) for each in optimizers]
        for line in announcement(engine.registry, engine.length, strategy.world_size, fewer=fewer):
            say(line, strategy)


def profile_of(profiler: Any, strategy: str) -> Profile | None:
    """Phases of exchanges as actions of a Trainer's profiler; None where the Trainer has none."""
    if type(profiler).__name__ == "PassThroughProfiler":
        return None

    def profile(phase: str) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = profiler.profile(f"[Strategy]{strategy}.{phase}")
        return context

    return profile


def forget_actions(profiler: object, prefix: str) -> None:
    """Takes actions whose names begin so out of a profiler's report: those of callbacks that no user has added."""
    for records in ("recorded_durations", "profiled_actions"):
        actions = getattr(profiler, records, {})
        for name in [name for name in actions if name.startswith(prefix)]:
            del actions[name]


class ReportingLauncherMixin(_MultiProcessingLauncher):
    """Brings rank 0's ledger back from processes started by fork or spawn. The bindings combine it with a launcher."""

    def get_extra_results(self, trainer: "pl.Trainer") -> dict[str, Any]:
        extra = super().get_extra_results(trainer)
        strategy: Any = trainer.strategy
        if strategy.ledger is not None:
            extra["sparsecomm"] = strategy.ledger.world_size, strategy.ledger.state_dict(), list(strategy.announced)
        return extra

    def update_main_process_results(self, trainer: "pl.Trainer", extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        if "sparsecomm" in extra:
            strategy: Any = trainer.strategy
            world_size, state, strategy.announced = extra["sparsecomm"]
            strategy.ledger = Ledger(world_size)
            strategy.ledger.load_state_dict(state)
