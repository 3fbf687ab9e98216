"""What only one replica does of those that come and go: the one that leads saves and logs."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_sparsecomm.elastic.turns import ElasticTurns
from lightning_sparsecomm.frontends.counting import CountingMixin
from lightning_sparsecomm.frontends.leading_checkpoints import LeadingCheckpoints
from lightning_sparsecomm.frontends.leading_loggers import LeadingLoggers
from lightning_sparsecomm.frontends.packages import TRAINERS
from lightning_sparsecomm.frontends.progress import progress_of
from lightning_sparsecomm.run.contents import State

if TYPE_CHECKING:
    import pytorch_lightning as pl


class LeadingMixin(CountingMixin):
    """The part of a replica's strategy that lets the replica write while it leads."""

    turns: ElasticTurns | None = None
    log_each_replica = False

    _leading_loggers: LeadingLoggers | None = None
    _leading_checkpoints: LeadingCheckpoints | None = None
    # Whether this replica led as that was last settled; None before it is known. From which step on it logs.
    _led: bool | None = None
    _logs_from = 0
    # Callbacks of LightningCLI that have yet to write a file of arguments, once this replica leads.
    _savers: list[Any] = []  # noqa: RUF012

    def setup_environment(self) -> None:
        super().setup_environment()
        trainer = self._trainer
        if trainer.state.fn == "fit":
            self.turns, self._led, self._logs_from = None, None, 0
            # Before Lightning makes the loggers' experiments, and callbacks look for their folders.
            if not self.log_each_replica:
                self._leading_loggers = LeadingLoggers(trainer)
                self._savers = [*self._savers, *_config_savers(trainer)]
                for saver in self._savers:
                    saver.already_saved = True
            self._leading_checkpoints = LeadingCheckpoints(trainer, lambda: self._leads)

    def teardown(self) -> None:
        if self._leading_checkpoints is not None:
            self._leading_checkpoints.release()
        super().teardown()

    def _settle_lead(self) -> None:
        """Lets this replica write, or no more, as it leads or not since the last meeting."""
        if self.turns is None:
            return
        leads, led, steps = self.turns.leads, self._led, self.engine.registry.steps
        if leads and not led:
            # What the former leader may have logged is not logged again.
            self._logs_from = steps + self.turns.lead.short
        self._led = leads
        if self._leading_loggers is not None:
            self._leading_loggers.settle(leads and steps >= self._logs_from)
        if leads and not led:
            assert self._leading_checkpoints is not None
            self._save_config(led is None)
            self._leading_checkpoints.take_over(led is None)

    def _save_config(self, first: bool) -> None:
        trainer, savers = self._trainer, self._savers
        self._savers = []
        for saver in savers:
            saver.already_saved = False
            if first or not saver.save_to_log_dir or not _is_saved(trainer, saver):
                saver.setup(trainer, trainer.lightning_module, "fit")
            saver.already_saved = True

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        # Replicas have met in it. All change at this place, so that two never write for one step.
        self._settle_lead()
        return result

    def on_exception(self, exception: BaseException) -> None:
        if self.turns is not None and not self.turns.leads:
            # It may have lost the lead in the meeting that has raised: its loggers say nothing of it.
            self._settle_lead()
        super().on_exception(exception)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Notes it, and saves on the replica that leads."""
        if self._leading_checkpoints is not None:
            self._leading_checkpoints.saved(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self._leading_checkpoints is not None:
            self._leading_checkpoints.removed(filepath)
        super().remove_checkpoint(filepath)

    def _progress(self) -> State:
        """What a replica that joins gets from this one."""
        assert self._leading_checkpoints is not None and self.turns is not None
        own = {"behind": self.turns.lead.behind, "checkpoints": self._leading_checkpoints.to_json()}
        return progress_of(self._trainer) | own

    @property
    def _leads(self) -> bool:
        return self.turns is None or self.turns.leads

    @property
    def writes(self) -> bool:
        """Whether this replica writes what one of all is to write."""
        return self.log_each_replica or self._leads


def _config_savers(trainer: "pl.Trainer") -> list[Any]:
    modules = [sys.modules.get(f"{package}.cli") for package in TRAINERS]
    kinds = tuple(module.SaveConfigCallback for module in modules if module is not None)
    callbacks: list[Any] = vars(trainer)["callbacks"]
    return [each for each in callbacks if isinstance(each, kinds) and not each.already_saved]


def _is_saved(trainer: "pl.Trainer", saver: Any) -> bool:
    return Path(trainer.log_dir or "", str(saver.config_filename)).exists()
