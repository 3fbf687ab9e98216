"""How many times fewer bytes a run will send than ddp."""

import math

from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.codecs import Threshold
from lightning_sparsecomm.planning.exchanges import every_late, more_by_epochs, share_of_exchanges
from lightning_sparsecomm.planning.rehearsed import rehearse
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.optimizers import TrackedOptimizer
from lightning_sparsecomm.sharing.delta import DeltaSync
from lightning_sparsecomm.sharing.gradient import GradientSync
from lightning_sparsecomm.sharing.gradients import NamedParameters

# A rehearsal at a run's start may take some tenths of a second.
_ELEMENTS = 1_000_000


def times_fewer_bytes(engine: Engine, tracked: TrackedOptimizer, length: float, epoch_steps: float = math.inf) -> float:
    """ddp's bytes on the link by those of an optimizer's method, after warm-ups; from a rehearsal of some steps.

    Args:
        engine: The run, before its first step. Nothing of it is touched.
        tracked: The optimizer.
        length: Its steps.
        epoch_steps: Steps of an epoch; infinite where unknown.

    Returns:
        NaN where no step is left, where nothing is sent, where the method cannot be rehearsed, or where bytes follow
        from how large gradients are, which no rehearsal tells.
    """
    ranks, nodes = engine.wire.world_size, engine.registry.nodes
    # Between nodes, ddp's ring has one cable for all ranks of a node, and the method has one rank's bytes.
    between = ranks if nodes is None else nodes.between.world_size
    # Nothing is sent for parameters that are frozen.
    parameters = [each for each in engine.registry.held_by(tracked.optimizer) if each[1].requires_grad]
    if tracked.method is None or between == 1 or not parameters or not length:
        return math.nan
    if any(parts_in(tracked.method, Threshold)):
        return math.nan
    try:
        kinds = [(tracked.optimizer, parameters)]
        sent = rehearse(tracked.method, kinds, between, length, _ELEMENTS, timed=False).link_bytes
        sent *= more_by_epochs([sync for sync, _ in tracked.method.parts(parameters)], length, epoch_steps)
    except Exception:
        # A part from outside may need what only a real run has.
        return math.nan
    sent += _averaged(engine, tracked, parameters, length) * 2 * (between - 1) / between
    dense = sum(parameter.nbytes for _, parameter in parameters)
    sent += _at_the_end(tracked, parameters) * 2 * (between - 1) / between / length
    return dense * 2 * (ranks - 1) / ranks / sent if sent else math.nan


def _at_the_end(tracked: TrackedOptimizer, parameters: NamedParameters) -> int:
    """The bytes of what waits in residuals after the last step, and is then exchanged whole."""
    assert tracked.method is not None
    finished = [
        piece
        for sync, piece in tracked.method.parts(parameters)
        if isinstance(sync, GradientSync) and sync.finishes(tracked.optimizer)
    ]
    return sum(parameter.nbytes for piece in finished for _, parameter in piece)


def _averaged(engine: Engine, tracked: TrackedOptimizer, parameters: NamedParameters, length: float) -> float:
    """Bytes per step of what ranks average besides: running means with exchanges of weights, or whole replicas."""
    method = tracked.method
    assert method is not None
    deltas = [sync for sync, _ in method.parts(parameters) if isinstance(sync, DeltaSync)]
    averaging = engine.replicas.averaging or method.averaging
    if averaging is not None and not deltas:
        return sum(4 * parameter.numel() for _, parameter in parameters) / averaging.every
    if tracked is not engine.registry.optimizers[0] or not any(sync.buffers == "average" for sync in deltas):
        return 0.0
    modules = {id(part): part for module in engine.registry.modules for part in module.modules()}
    buffers = [named for part in modules.values() for named in part.named_buffers(recurse=False)]
    running = sum(4 * buffer.numel() for name, buffer in buffers if name.startswith("running_"))
    return running * share_of_exchanges(method, every_late(method, length), length)
