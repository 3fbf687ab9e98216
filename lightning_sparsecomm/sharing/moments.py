"""The optimizer's own state, averaged over ranks that train by themselves."""

import inspect
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis import PARAMETERS, Wire
from lightning_sparsecomm.basis.arguments import check_whole_number
from lightning_sparsecomm.sharing.averaging import average_
from lightning_sparsecomm.sharing.gradients import NamedParameters


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
    """What an optimizer of torch keeps for each element, found by a step of another one with the same options.

    None for the user's own optimizers, and for SparseAdam, which takes no dense gradient.
    """
    if not type(optimizer).__module__.startswith("torch.optim") or isinstance(optimizer, torch.optim.SparseAdam):
        return None
    accepted = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    like = Parameter(torch.zeros(2, 2))
    other = type(optimizer)([like], **options)
    like.grad = torch.zeros_like(like)
    other.step(lambda: 0.0)
    return [kind for kind, state in other.state[like].items() if isinstance(state, Tensor) and state.dim()]


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


class Moments:
    """Averages parts of an optimizer's state, each after a number of exchanges of its own.

    A rank that has no state of a parameter, as it never had a gradient for it, neither counts nor gets any.

    Args:
        every: After how many exchanges, by the name under which the optimizer keeps that state.

    Attributes:
        exchanges: Exchanges that have ended.
    """

    def __init__(self, every: Mapping[str, int]) -> None:
        self.exchanges = 0
        self._every = every
        self._means: list[tuple[Tensor, Tensor]] = []

    def exchange(self, optimizer: Optimizer, parameters: NamedParameters, wire: Wire) -> None:
        """Averages what is due with this exchange, and notes the means. A collective, if anything is.

        Bytes: 4 for each element (8 in float64), and 4 for each parameter and kind.
        """
        due = [kind for kind, every in self._every.items() if (self.exchanges + 1) % every == 0]
        held = [optimizer.state.get(weight, {}).get(kind) for kind in due for _, weight in parameters]
        if not held:
            return
        weights = [weight for _ in due for _, weight in parameters]
        own = [torch.zeros_like(weight) if state is None else state for weight, state in zip(weights, held)]
        means = [each.detach().to(torch.promote_types(each.dtype, torch.float32), copy=True) for each in own]
        holders = torch.tensor([float(state is not None) for state in held], device=weights[0].device)
        average_([*means, holders], wire)
        counts = holders.mul(wire.world_size).round().tolist()
        for state, mean, count in zip(held, means, counts):
            if state is not None:
                self._means.append((state, mean if count == wire.world_size else mean.mul_(wire.world_size / count)))

    @property
    def just_averaged(self) -> list[str]:
        """The kinds that were averaged with the last exchange."""
        return [kind for kind, every in self._every.items() if self.exchanges and self.exchanges % every == 0]

    def commit(self) -> None:
        """Writes the means into the optimizer's state, and counts the exchange."""
        for state, mean in self._means:
            state.copy_(mean)
        self._means = []
        self.exchanges += 1

    def abort(self) -> None:
        """Forgets the means: the optimizer's state stays as it was."""
        self._means = []
