"""Callbacks that change what a method does. Each class works with the Trainers of all Lightning packages."""

from typing import Any, Literal

from lightning_sparsecomm.basis.schedules import Warmup
from lightning_sparsecomm.frontends.monitor import CompressionMonitor as CompressionMonitor
from lightning_sparsecomm.frontends.packages import Callback
from lightning_sparsecomm.frontends.trainer import TrainerMixin
from lightning_sparsecomm.sharing.averaging import Averaging


class SparsityWarmup(Callback):
    """Sends more in the first steps or epochs, with any method. Afterwards the method's own density applies.

    It replaces a warm-up of the method's own. A method without a density (`dense`, `quantized`, `powersgd`, `diloco`
    and others) sends the same in every exchange.

    >>> round(SparsityWarmup(epochs=4).warmup.density(0.001, step=0, epoch=0), 3)
    0.251

    Args:
        steps: Length in optimizer steps; 0 if it is given in epochs.
        epochs: Length in epochs; 0 if it is given in steps.
        shape: How the density falls to the method's own p: "exponential" (p^((e+1)/(E+1)) in stage e of E; E is the
            number of epochs, or 4), "inverse_time" (1 − (1 − p)^max(1, T/t) in step t), or a list of densities for
            stages of equal length.

    Raises:
        ValueError: Both or neither of steps and epochs is given, the shape is unknown, or a density is outside (0, 1].
    """

    def __init__(
        self,
        steps: int = 0,
        epochs: int = 0,
        shape: Literal["exponential", "inverse_time"] | list[float] = "exponential",
    ) -> None:
        super().__init__()
        self.warmup = Warmup(steps, epochs, shape)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        _strategy_of(trainer, self).engine.warmup = self.warmup


class ParameterAveraging(Callback):
    """Averages the parameters over all ranks every `every` optimizer steps.

    It replaces the method's own averaging. If replicas are equal already, only their last bits change. Methods that
    exchange every few steps give all ranks the same weights then; it leaves their parameters alone, and warns.

    >>> ParameterAveraging(every=1000, buffers=True).averaging.every
    1000

    Args:
        every: Optimizer steps between two averages.
        buffers: Whether to average floating-point buffers too, such as running means of batch normalization.
        optimizer_state: Whether to average the optimizer's floating-point state too, such as momentum.

    Raises:
        ValueError: `every` is not a whole number of at least 1.
    """

    def __init__(self, every: int = 500, buffers: bool = False, optimizer_state: bool = False) -> None:
        super().__init__()
        self.averaging = Averaging(every, buffers, optimizer_state)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        _strategy_of(trainer, self).engine.replicas.averaging = self.averaging


def _strategy_of(trainer: Any, callback: object) -> TrainerMixin:
    if not isinstance(trainer.strategy, TrainerMixin):
        raise TypeError(
            f"strategy must be a sparsecomm strategy with the callback {type(callback).__name__}; got"
            f" {type(trainer.strategy).__name__}. Use strategy='sparsecomm' ('sparsecomm_dense' sends what ddp sends),"
            " or leave the callback out."
        )
    return trainer.strategy
