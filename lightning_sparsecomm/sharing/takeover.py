"""What is taken over from the user's own optimizer while it steps: the momentum of torch.optim.SGD is off then."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_sparsecomm.basis import Layout, SparseVector
from lightning_sparsecomm.channel import MomentumRule
from lightning_sparsecomm.sharing.gradients import NamedParameters

MOMENTA = "momentum_buffer", "exp_avg"
"""Under what names torch's optimizers keep momentum: SGD and Muon, and Adam."""

_OFF: dict[str, object] = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}


def momentum_rules(optimizer: Optimizer, parameters: NamedParameters) -> list[MomentumRule]:
    """The momentum of each parameter, from the optimizer's groups as they are now.

    Raises:
        ValueError: A momentum outside [0, 1].
    """
    rules: dict[int, MomentumRule] = {}
    for group in optimizer.param_groups:
        momentum = float(group["momentum"])
        if not 0 <= momentum <= 1:
            raise ValueError(
                f"the momentum of SGD must be in [0, 1], or the velocity grows without bound; got {momentum!r}."
                " Use 0.9, for example."
            )
        for parameter in group["params"]:
            begun = optimizer.state.get(parameter, {}).get("momentum_buffer") is not None
            rules[id(parameter)] = MomentumRule(momentum, float(group["dampening"]), bool(group["nesterov"]), begun)
    return [rules[id(parameter)] for _, parameter in parameters]


def has_momentum(optimizer: Optimizer) -> bool:
    """Whether an optimizer of SGD's kind keeps what it gets for later steps."""
    return any(group.get("momentum", 0) for group in optimizer.param_groups)


def learning_rates(optimizer: Optimizer, parameters: NamedParameters) -> list[float]:
    """The learning rate of each parameter, from the optimizer's groups as they are now.

    Raises:
        ValueError: A learning rate is negative or not finite.
    """
    rates: dict[int, float] = {}
    for group in optimizer.param_groups:
        rate = float(group["lr"])
        if not 0 <= rate < math.inf:
            raise ValueError(
                "the learning rate must be 0 or more, and finite;"
                f" got {rate!r}. Correct the optimizer or its scheduler."
            )
        rates.update((id(parameter), rate) for parameter in group["params"])
    return [rates[id(parameter)] for _, parameter in parameters]


def evaluated_again(optimizer: Optimizer) -> RuntimeError:
    """The error for an optimizer that evaluates its closure twice in a step, where memories take gradients in."""
    return RuntimeError(
        f"{type(optimizer).__name__}.step() evaluates its closure more than once, and momentum and residual would take"
        " in each gradient. Use methods.dense(), or an optimizer that evaluates it once."
    )


class Takeover(ABC):
    """Changes what an optimizer does, from the end of its closure to the end of its step.

    Args:
        optimizer: Whose step it is. A hook is registered on it.

    Attributes:
        armed: Whether the next step is to be changed.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.armed = False
        self._engaged = False
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """torch calls this before step(), whose closure still has to run backward: so switch off after the closure."""
        if not self.armed:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._engage()
            return None

        evaluated = False

        def closure_then_engage() -> Any:
            nonlocal evaluated
            if evaluated:
                raise evaluated_again(optimizer)
            evaluated = True
            result = closure()
            self._engage()
            return result

        return (args[0], *args[2:]), {**kwargs, "closure": closure_then_engage}

    def _engage(self) -> None:
        # Called twice for a subclass whose step() calls that of torch's optimizer.
        if self._engaged:
            return
        self._engaged = True
        with torch.no_grad():
            self.engage()

    @abstractmethod
    def engage(self) -> None:
        """Does the taken-over part of the step, and hides it from the optimizer; `.grad` holds the shared gradient."""

    @abstractmethod
    def restore(self) -> None:
        """Undoes what `engage` has hidden, if anything."""

    def release(self) -> None:
        """Restores the optimizer's groups and gradients."""
        self.restore()
        self._engaged = False

    def restart(self) -> None:  # noqa: B027
        """Starts over from the optimizer's own state."""

    def has_begun(self, parameter: Tensor) -> bool:
        """Whether it keeps for the parameter that a first step was made; only such are saved."""
        return False

    def load_begun(self, parameters: Iterable[Tensor]) -> None:  # noqa: B027
        """Takes over those for which `has_begun` was true."""

    def close(self) -> None:
        """Restores the groups and gradients, and removes the hook."""
        self.release()
        self._hook.remove()


class MomentumTakeover(Takeover):
    """Switches off an SGD's momentum and weight decay from the end of its closure to the end of its step.

    The gradient that it steps with already carries momentum, through the exchange. Weight decay is the same on all
    ranks and is not sent. It has a momentum of its own, in the optimizer's `momentum_buffer`: z ← m·z +
    (1 − dampening)·wd·w, and w ← w − lr·z (Nesterov: w ← w − lr·(wd·w + m·z)). So a buffer from a checkpoint of ddp
    keeps its effect. Together that is torch's SGD.

    What bfloat16 and float16 weights lose to rounding in this is kept beside the buffer, as `decay_remainder`, and
    added in the next step: without a dense gradient, which spreads round-off at random, decay would be rounded away.

    Args:
        optimizer: Whose step it is. Hooks are registered on it.
        parameters: Identities of the parameters that the method trains; the caller adds to it.
    """

    def __init__(self, optimizer: SGD, parameters: set[int]) -> None:
        super().__init__(optimizer)
        self._parameters = parameters
        self._begun: set[int] = set()
        self._saved: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def engage(self) -> None:
        for group in self.optimizer.param_groups:
            # Without momentum, SGD itself applies the decay.
            if group["momentum"] != 0:
                self._decay(group)
                self._saved.append((group, {name: group[name] for name in _OFF}))
                group.update(_OFF)

    def _decay(self, group: dict[str, Any]) -> None:
        momentum, decay, gain = group["momentum"], group["weight_decay"], 1 - group["dampening"]
        weights: list[Tensor] = []
        states: list[dict[str, Any]] = []
        buffers: list[Tensor] = []
        for weight in group["params"]:
            if weight.grad is None or id(weight) not in self._parameters:
                continue
            state = self.optimizer.state[weight]
            buffer = state.get("momentum_buffer")
            if buffer is None and decay:
                # As in torch, the first step has no dampening, where the velocity begins now too.
                first = id(weight) not in self._begun
                buffer = state["momentum_buffer"] = weight.detach() * (decay if first else gain * decay)
            elif buffer is not None:
                buffer.mul_(momentum)
                if decay:
                    buffer.add_(weight.detach(), alpha=gain * decay)
            self._begun.add(id(weight))
            if buffer is not None:
                weights.append(weight.detach())
                states.append(state)
                buffers.append(buffer)
        if not weights:
            return
        moves: list[Tensor] | tuple[Tensor, ...] = buffers
        if group["nesterov"]:
            moves = torch._foreach_mul(buffers, momentum)
            if decay:
                torch._foreach_add_(moves, weights, alpha=decay)
        if isinstance(group["lr"], Tensor):
            moves = torch._foreach_mul(moves, group["lr"])
        rate = 1.0 if isinstance(group["lr"], Tensor) else group["lr"]
        wide = [(weight, move) for weight, move in zip(weights, moves) if weight.dtype.itemsize >= 4]
        if wide:
            torch._foreach_add_([weight for weight, _ in wide], [move for _, move in wide], alpha=-rate)
        for weight, move, state in zip(weights, moves, states):
            if weight.dtype.itemsize < 4:
                _move_narrow_(weight, move, rate, state)

    def restore(self) -> None:
        for group, saved in self._saved:
            group.update(saved)
        self._saved = []

    def restart(self) -> None:
        """Starts over from the optimizer's own state."""
        self._begun.clear()

    def has_begun(self, parameter: Tensor) -> bool:
        """Whether the parameter's momentum has taken in a gradient, so that dampening applies."""
        return id(parameter) in self._begun

    def load_begun(self, parameters: Iterable[Tensor]) -> None:
        """Notes that the momentum of these parameters had begun."""
        self._begun.update(id(parameter) for parameter in parameters)


def _move_narrow_(weight: Tensor, move: Tensor, rate: float, state: dict[str, Any]) -> None:
    """w ← w − rate·move, with the remainder that rounding left before, and leaves now, in `state`."""
    wide = weight.float().sub_(move.float(), alpha=rate)
    if "decay_remainder" in state:
        wide.add_(state["decay_remainder"].float())
    weight.copy_(wide)
    # In the weight's own dtype, to which torch converts an optimizer's state when it is loaded.
    state["decay_remainder"] = wide.sub_(weight.float()).to(weight.dtype)


def mask_momentum_(
    optimizer: Optimizer, parameters: NamedParameters, sent: SparseVector | Tensor, layout: Layout
) -> None:
    """Sets a torch optimizer's own momentum (`MOMENTA`) to zero where something was sent.

    `layout` describes the parameters and the vector `sent`, of which only the positions of its non-zeros count.
    """
    indices = sent.indices if isinstance(sent, SparseVector) else sent.nonzero().view(-1)
    parts = zip(parameters, layout.segments, indices.split(layout.counts(indices)))
    for (_, parameter), segment, part in parts:
        if not part.numel():
            continue
        chosen = part - segment.offset
        state = optimizer.state.get(parameter, {})
        for name in MOMENTA:
            buffer = state.get(name)
            if buffer is None:
                continue
            if buffer.is_contiguous():
                buffer.view(-1).index_fill_(0, chosen, 0.0)
            else:
                keep = torch.ones(buffer.numel(), dtype=buffer.dtype, device=buffer.device)
                buffer.mul_(keep.index_fill_(0, chosen, 0.0).view(buffer.shape))
