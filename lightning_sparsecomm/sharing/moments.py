"""The optimizer's own state, averaged over ranks that train by themselves."""

import inspect
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis import PARAMETERS, Wire
from lightning_sparsecomm.basis.arguments import check_whole_number
from lightning_sparsecomm.channel.saved import Saved, pop_named
from lightning_sparsecomm.sharing.averaging import average_
from lightning_sparsecomm.sharing.gradients import NamedParameters

# Which of an optimizer's `betas` is the decay of a kind of state.
_BETAS = {"exp_avg": 0, "exp_avg_sq": 1}


def check_moments(moments: Mapping[str, int]) -> None:
    """Raises `ValueError` unless each kind of state has a number of exchanges, `TypeError` where it is no mapping."""
    if not isinstance(moments, Mapping):
        raise TypeError(
            f"moments must give a number of exchanges for each kind of state; got {moments!r}. Use {{'exp_avg': 3}}."
        )
    for kind, exchanges in moments.items():
        what = f"exchanges of weights between two averages of the optimizer's {kind!r}"
        check_whole_number(f"moments[{kind!r}]", exchanges, 1, what, "Use 1 for each exchange.")


def kept_by(optimizer: Optimizer, moments: Mapping[str, int]) -> dict[str, int]:
    """Those of the moments that an optimizer keeps, as far as is known; empty for SGD without momentum."""
    held = _kinds_of(optimizer) if moments else []
    return dict(moments) if held is None else {kind: every for kind, every in moments.items() if kind in held}


def objection_to(optimizer: Optimizer, moments: Mapping[str, int]) -> str | None:
    """Why an optimizer's moments cannot be averaged: it keeps other state, and none of these."""
    held = _kinds_of(optimizer) if moments else []
    if not held or set(held) & moments.keys():
        return None
    return (
        f"moments must name state that it keeps; got {', '.join(moments)}, and it keeps {', '.join(held)}. Use"
        f" torch.optim.AdamW, or name what it keeps: DeltaSync(…, moments={{{held[0]!r}: 3}})."
    )


def _kinds_of(optimizer: Optimizer) -> list[str] | None:
    """What an optimizer of torch keeps for each element, found by a step of others with the options of its groups.

    None for the user's own optimizers, and for SparseAdam, which takes no dense gradient.
    """
    if not type(optimizer).__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.SparseAdam):
        return None
    # On a CPU, where nothing can be captured; and without what only says how a step is computed.
    ways = {"params", "capturable", "foreach", "fused", "differentiable"}
    accepted = inspect.signature(type(optimizer)).parameters.keys() - ways
    kinds: dict[str, None] = {}
    for group in optimizer.param_groups:
        options = {name: value for name, value in (optimizer.defaults | group).items() if name in accepted}
        like = Parameter(torch.zeros(2, 3))
        other = type(optimizer)([like], **options)
        like.grad = torch.zeros_like(like)
        other.step(lambda: 0.0)
        for kind, state in other.state[like].items():
            if isinstance(state, Tensor) and state.shape == like.shape:
                kinds[kind] = None
    return list(kinds)


def state_on_all_ranks(optimizer: Optimizer, parameters: NamedParameters, wire: Wire) -> list[Tensor]:
    """The floating-point state of those parameters for which all ranks hold state of the same kinds and shapes.

    A rank that never had a gradient for a parameter mostly holds none. Step counts have no dimension, are equal on all
    ranks and are left out. A collective: 8 bytes for each parameter.
    """
    if not parameters:
        return []
    held = [_state_of(optimizer, weight) for _, weight in parameters]
    described = [zlib.crc32(repr([(kind, *state.shape) for kind, state in each.items()]).encode()) for each in held]
    mine = torch.tensor(described, dtype=torch.int64, device=parameters[0][1].device)
    of_ranks = wire.all_gather(mine, PARAMETERS)
    alike = (of_ranks == of_ranks[0]).all(0).tolist()
    return [state for each, here in zip(held, alike) if here for state in each.values()]


def _state_of(optimizer: Optimizer, weight: Tensor) -> dict[str, Tensor]:
    state = optimizer.state.get(weight, {})
    tensors = {kind: state[kind] for kind in sorted(state) if isinstance(state[kind], Tensor)}
    return {kind: each for kind, each in tensors.items() if each.dim() and each.is_floating_point()}


States = Mapping[str, Mapping[str, Tensor]]
"""Parts of an optimizer's state, by the name under which the optimizer keeps them, and by parameter name."""

# Saved of an average in flight, by kind of state.
_BEGAN, _MEANS, _LEFT = "in flight, {} at its start", "in flight, mean of {}", "in flight, what is left of {}"


class Moments:
    """Averages parts of an optimizer's state, each after a number of exchanges of its own.

    A rank that has no state of a parameter, as it never had a gradient for it, neither counts nor gets any.

    What steps have added to the state between the start of an average and its use is kept: with the product B of the
    state's decays in these steps, such as Adam's `betas`, s ← B · mean + (s − B · s at the start), as if the mean had
    been there from the start. State whose decay the optimizer's options do not tell becomes the mean.

    Args:
        every: After how many exchanges, by the name under which the optimizer keeps that state.

    Attributes:
        exchanges: Exchanges that have ended.
    """

    def __init__(self, every: Mapping[str, int]) -> None:
        self.exchanges = 0
        self._every = every
        # What is due in the exchange that goes on, as it was when that started, and the means.
        self._began: States = {}
        self._means: States = {}
        # By kind and name: what steps have left of it since, as a factor; 1 without a step, NaN where it is not known.
        self._left: dict[str, dict[str, float]] = {}

    def start(self, optimizer: Optimizer, parameters: NamedParameters, later: bool) -> None:
        """Notes what is due with an exchange that starts now: a copy of it, if steps go on meanwhile."""
        due = [kind for kind, every in self._every.items() if (self.exchanges + 1) % every == 0]
        self._began = {
            kind: {
                name: _wide(state, copy=True) if later else state.detach()
                for name, weight in parameters
                if (state := optimizer.state.get(weight, {}).get(kind)) is not None
            }
            for kind in due
        }
        self._left = {kind: dict.fromkeys(parts, 1.0) for kind, parts in self._began.items()}

    def stepped(self, optimizer: Optimizer, parameters: NamedParameters) -> None:
        """Notes how a step has let what is due decay; right after it, as a scheduler may change the decay."""
        if not self._left:
            return
        groups = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
        for kind, left in self._left.items():
            for name, weight in parameters:
                # Without a gradient, the step has left it alone.
                if name in left and weight.grad is not None:
                    left[name] *= _decay_of(kind, groups.get(id(weight), {}))

    def average(self, weights: Sequence[tuple[str, Tensor]], wire: Wire) -> None:
        """Averages what is due of these parameters. A collective, if anything is.

        Bytes: 4 for each element (8 in float64), and 4 for each parameter and kind.
        """
        places = [(kind, name) for kind in self._began for name, _ in weights]
        if not places:
            return
        like = [weight.detach() for _ in self._began for _, weight in weights]
        held = [self._began[kind].get(name) for kind, name in places]
        # In the weights' dtype, if that is wider than float32, so that it is the same on all ranks.
        own = [
            (torch.zeros_like(each) if state is None else state).to(_wide_dtype(each), copy=True)
            for state, each in zip(held, like)
        ]
        holders = torch.tensor([float(state is not None) for state in held], device=like[0].device)
        average_([*own, holders], wire)
        counts = holders.mul(wire.world_size).round().tolist()
        means: dict[str, dict[str, Tensor]] = {kind: {} for kind in self._began}
        for (kind, name), state, mean, count in zip(places, held, own, counts):
            if state is not None:
                means[kind][name] = mean if count == wire.world_size else mean.mul_(wire.world_size / count)
        self._means = means

    def exchange(self, optimizer: Optimizer, parameters: NamedParameters, wire: Wire) -> None:
        """Both, without steps in between."""
        self.start(optimizer, parameters, later=False)
        self.average(parameters, wire)

    @property
    def just_averaged(self) -> list[str]:
        """The kinds that were averaged with the last exchange."""
        return [kind for kind, every in self._every.items() if self.exchanges and self.exchanges % every == 0]

    def commit(self, optimizer: Optimizer, parameters: NamedParameters) -> None:
        """Uses the means, and counts the exchange."""
        for kind, means in self._means.items():
            for name, weight in parameters:
                state = optimizer.state.get(weight, {}).get(kind)
                if state is None or name not in means:
                    continue
                left = self._left[kind][name]
                if left == 1 or math.isnan(left):
                    state.copy_(means[name])
                else:
                    # Their difference first: it is what steps have added, and must not round below zero.
                    added = _wide(state).sub(self._began[kind][name], alpha=left)
                    state.copy_(added.add_(means[name], alpha=left))
        self.abort()
        self.exchanges += 1

    def abort(self) -> None:
        """Forgets what is due, and the means: the optimizer's state stays as it was."""
        self._began, self._means, self._left = {}, {}, {}

    def state_dict(self) -> Saved:
        """Of an average in flight that has ended, what it needs, by kind and name."""
        saved: Saved = {}
        for kind, parts in self._means.items():
            if parts:
                left = {name: torch.tensor(each, dtype=torch.float64) for name, each in self._left[kind].items()}
                saved |= {_MEANS.format(kind): dict(parts), _BEGAN.format(kind): dict(self._began[kind])}
                saved[_LEFT.format(kind)] = left
        return saved

    def load_state_dict(self, saved: Saved, parameters: NamedParameters) -> None:
        """Takes out of `saved` what `state_dict` returned for some parameters, to their devices."""
        devices = {name: weight.device for name, weight in parameters}

        def taken(form: str) -> States:
            held = {kind: pop_named(saved, form.format(kind), list(devices)) for kind in self._every}
            return {
                kind: {name: each.to(devices[name], copy=True) for name, each in parts.items()}
                for kind, parts in held.items()
                if parts
            }

        self._began, self._means = taken(_BEGAN), taken(_MEANS)
        self._left = {kind: {name: float(each) for name, each in parts.items()} for kind, parts in taken(_LEFT).items()}


def _wide_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _wide(state: Tensor, copy: bool = False) -> Tensor:
    return state.detach().to(_wide_dtype(state), copy=copy)


def _decay_of(kind: str, group: Mapping[str, Any]) -> float:
    """The factor on a kind of state in each step, by a group of its optimizer; NaN where that does not tell."""
    if kind == "momentum_buffer":
        return float(group.get("momentum", math.nan))
    betas = group.get("betas", ())
    return float(betas[_BETAS[kind]]) if kind in _BETAS and len(betas) > _BETAS[kind] else math.nan
