"""Gives the optimizer what a method holds for it, as ddp would have it there, when another method goes on."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.channel import Channel, LocalAdam, MomentumCorrection, SharedAdam
from lightning_sparsecomm.channel.momentum import Velocity
from lightning_sparsecomm.sharing.adam import adam_rules
from lightning_sparsecomm.sharing.averaging import average_, averaged
from lightning_sparsecomm.sharing.gradients import NamedParameters


def hand_back(optimizer: Optimizer, parameters: NamedParameters, channel: Channel, wire: Wire) -> None:
    """Moves the momentum and the moments of a channel's memories into the optimizer's state. A collective.

    - Velocities, averaged over ranks where each rank has its own, are added to `momentum_buffer`: the mean of local
      velocities is the velocity of the mean gradient. Where SGD maximizes, its buffer holds the negative.
    - First moments are averaged. Second moments become those of the mean gradient, by the estimate that `LocalAdam`
      describes: v ← (v̄ − μ²)/W + μ², where μ² is what the averaged first moment says. Those of `SharedAdam` are equal
      on all ranks already; what waits of the first moment is added to it.
    """
    for memory in channel.memories:
        if isinstance(memory, Velocity):
            _velocity(optimizer, parameters, memory, wire)
        elif isinstance(memory, LocalAdam):
            _moments(optimizer, parameters, memory, wire)
        elif isinstance(memory, SharedAdam):
            _shared_moments(optimizer, parameters, memory, averaged_residuals(parameters, channel, wire))


def _velocity(optimizer: Optimizer, parameters: NamedParameters, memory: Velocity, wire: Wire) -> None:
    held = memory.state_dict()["velocity"]
    named = [(parameter, held[name]) for name, parameter in parameters if name in held]
    local = isinstance(memory, MomentumCorrection)
    velocities = averaged([velocity for _, velocity in named], wire) if local else [velocity for _, velocity in named]
    rising = {id(each) for group in optimizer.param_groups if group.get("maximize") for each in group["params"]}
    for (parameter, _), velocity in zip(named, velocities):
        velocity = -velocity if id(parameter) in rising else velocity
        state = optimizer.state[parameter]
        buffer = state.get("momentum_buffer")
        if buffer is None:
            state["momentum_buffer"] = velocity.to(parameter.dtype, copy=True).view(parameter.shape)
        else:
            buffer.add_(velocity.view(buffer.shape))


def _moments(optimizer: Optimizer, parameters: NamedParameters, memory: LocalAdam, wire: Wire) -> None:
    moments = memory.moments()
    named = [(name, parameter) for name, parameter in parameters if name in moments]
    firsts = averaged([moments[name][1] for name, _ in named], wire)
    seconds = averaged([moments[name][2] for name, _ in named], wire)
    for (name, parameter), rule, first, second in zip(named, adam_rules(optimizer, named), firsts, seconds):
        steps = moments[name][0]
        if rule.beta1:
            _of_mean_(first, second, steps, (rule.beta1, rule.beta2), wire.world_size)
        state: dict[str, Any] = optimizer.state[parameter]
        # The optimizer's state so far is a view of what the memory holds.
        state["exp_avg"] = first.to(parameter.dtype).view(parameter.shape)
        state["exp_avg_sq"] = second.to(parameter.dtype).view(parameter.shape)


def _shared_moments(
    optimizer: Optimizer, parameters: NamedParameters, memory: SharedAdam, waiting: dict[int, Tensor]
) -> None:
    moments = memory.moments()
    named = [(name, parameter) for name, parameter in parameters if name in moments]
    for (name, parameter), rule in zip(named, adam_rules(optimizer, named)):
        _, first, second = moments[name]
        if rule.beta1 and id(parameter) in waiting:
            # As if it had entered the moment before that faded for the next step.
            first = first.add(waiting[id(parameter)].view(first.shape), alpha=1 / rule.beta1)
        state: dict[str, Any] = optimizer.state[parameter]
        state["exp_avg"] = first.to(parameter.dtype, copy=True).view(parameter.shape)
        state["exp_avg_sq"] = second.to(parameter.dtype, copy=True).view(parameter.shape)


def _of_mean_(first: Tensor, second: Tensor, steps: int, betas: tuple[float, float], ranks: int) -> None:
    """The second moment of the mean gradient, in place, from the means of both local moments."""
    unbiased, unbiased_square = 1 - betas[0] ** steps, 1 - betas[1] ** steps
    # Variance of the averaged first moment, for noise of variance 1 on each rank.
    noise = (1 - betas[0]) / (1 + betas[0]) / ranks
    whole = second / unbiased_square
    mean = ((first / unbiased).square_().sub_(whole, alpha=noise) / (1 - noise)).clamp_(min=0)
    mean = torch.minimum(mean, whole)
    second.copy_(whole.sub_(mean).div_(ranks).add_(mean).mul_(unbiased_square))


def averaged_residuals(parameters: NamedParameters, channel: Channel, wire: Wire) -> dict[int, Tensor]:
    """The mean over ranks of what residuals hold, in units of gradients, by the parameter's identity. A collective.

    The residuals are empty then.
    """
    owed: dict[int, Tensor] = {}
    for residual in channel.residuals:
        parts = [part.clone() for part in residual.held["residual"].parts]
        average_(parts, wire)
        for (_, parameter), part in zip(parameters, parts):
            owed[id(parameter)] = owed[id(parameter)] + part if id(parameter) in owed else part
        residual.forget()
    return owed
