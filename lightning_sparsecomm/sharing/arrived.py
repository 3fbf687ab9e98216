"""What ranks have shared and no step has used yet, in units of the learning rates that it was computed at."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, SparseVector
from lightning_sparsecomm.channel.error_feedback import scaled_by_segment
from lightning_sparsecomm.channel.saved import Saved
from lightning_sparsecomm.exchange import Exchanged

# A step takes what was shared at another learning rate if its own is at least this part of that one.
_LEAST_RATE = 1e-3


class Leftovers:
    """Changes of weights, by parameter name, that steps with too small a learning rate have left to later ones."""

    def __init__(self) -> None:
        # Each change, and the largest rate that it came with.
        self._changes: dict[str, Tensor] = {}
        self._rates: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._changes)

    def leave(self, name: str, shared: Tensor, rate: float) -> None:
        """Keeps what was shared at a rate."""
        change = shared * rate
        self._changes[name] = change + self._changes[name] if name in self._changes else change
        self._rates[name] = max(rate, self._rates.get(name, 0.0))

    def take(self, name: str, rate: float) -> Tensor | None:
        """What a step with this rate is to use in addition; None for nothing."""
        if name not in self._changes or not usable(rate, self._rates[name]):
            return None
        del self._rates[name]
        return self._changes.pop(name) / rate

    def changes(self) -> dict[str, Tensor]:
        """All that is left, in units of weights; nothing is left then."""
        changes, self._changes, self._rates = self._changes, {}, {}
        return changes

    def keep(self, names: Collection[str]) -> None:
        """Forgets what belongs to other names."""
        for held in (self._changes, self._rates):
            for name in [name for name in held if name not in names]:
                del held[name]

    def state_dict(self) -> Saved:
        """What is left, and the rates, by kind and name."""
        return {
            "left": self._changes,
            "rate of what is left": {name: number(each) for name, each in self._rates.items()},
        }

    def load_state_dict(self, changes: Mapping[str, Tensor], rates: Mapping[str, Tensor]) -> None:
        """Takes over what `state_dict` returned."""
        self._changes = dict(changes)
        self._rates = {name: float(rate) for name, rate in rates.items()}


class ArrivedGradients(NamedTuple):
    """The result of an exchange that no step has used.

    Attributes:
        exchanged: What is shared, over the layout that it was exchanged with.
        layout: That layout.
        rates: Learning rates of its segments when it started.
    """

    exchanged: Exchanged
    layout: Layout
    rates: tuple[float, ...]

    @property
    def names(self) -> list[str]:
        """Of the layout's segments."""
        return [segment.name for segment in self.layout.segments]

    def of(self, names: Collection[str]) -> "ArrivedGradients | None":
        """The same of some segments; None of none."""
        kept = [number for number, name in enumerate(self.names) if name in names]
        if not kept:
            return None
        flats, present = self.layout.flats(dense(self.exchanged.shared)), self.exchanged.present
        segments = [self.layout.segments[number] for number in kept]
        whole = torch.cat([flats[number] for number in kept])
        exchanged = Exchanged(whole, whole, [present[number] for number in kept])
        layout = Layout([(segment.name, segment.shape) for segment in segments])
        return ArrivedGradients(exchanged, layout, tuple(self.rates[number] for number in kept))

    def at(self, now: Mapping[str, float], left: Leftovers) -> Exchanged:
        """What counts as much at other learning rates, by name, as this did at its own.

        What these rates are too small for is left for later, and what others have left is added.
        """
        pairs = [(old, now[name]) for name, old in zip(self.names, self.rates)]
        if not left and all(new == old for old, new in pairs):
            return self.exchanged
        factors = [old / new if usable(new, old) else 0.0 for old, new in pairs]
        shared = scaled_by_segment(self.exchanged.shared, factors, self.layout)
        if not left and all(factor or not old for factor, (old, _) in zip(factors, pairs)):
            return self.exchanged._replace(shared=shared)
        shared, present = dense(shared).clone(), list(self.exchanged.present)
        given, views = (self.layout.views(each) for each in (dense(self.exchanged.shared), shared))
        for index, (name, (old, new)) in enumerate(zip(self.names, pairs)):
            if old and not factors[index]:
                # What no rank has had a gradient for is left as it is: the optimizer must not meet zeros there.
                if present[index]:
                    left.leave(name, given[index], old)
            elif (more := left.take(name, new)) is not None:
                views[index].add_(more)
                present[index] = True
        return self.exchanged._replace(shared=shared, present=present)

    def changes(self) -> dict[str, Tensor]:
        """What is shared, in units of weights, by name."""
        return dict(
            zip(self.names, self.layout.views(dense(scaled_by_segment(self.exchanged.shared, self.rates, self.layout))))
        )

    def state_dict(self) -> Saved:
        """What is shared, where any rank had a gradient, and the rates, by kind and name."""
        return {
            "shared": dict(zip(self.names, self.layout.views(dense(self.exchanged.shared)))),
            "present": dict(zip(self.names, map(torch.tensor, self.exchanged.present))),
            "rate": dict(zip(self.names, map(number, self.rates))),
        }

    @classmethod
    def loaded(
        cls, shared: Mapping[str, Tensor], present: Mapping[str, Tensor], rates: Mapping[str, Tensor]
    ) -> "ArrivedGradients | None":
        """What `state_dict` returned; None of nothing."""
        if not shared:
            return None
        whole = torch.cat([part.flatten() for part in shared.values()])
        exchanged = Exchanged(whole, whole, [bool(present[name]) for name in shared])
        layout = Layout([(name, tuple(part.shape)) for name, part in shared.items()])
        return cls(exchanged, layout, tuple(float(rates[name]) for name in shared))


def usable(rate: float, computed_at: float) -> bool:
    """Whether a step with this learning rate can use what was shared at another one."""
    return rate > 0 and rate >= computed_at * _LEAST_RATE


def number(value: float) -> Tensor:
    """As it is saved."""
    return torch.tensor(value, dtype=torch.float64)


def dense(vector: SparseVector | Tensor) -> Tensor:
    """The vector with its zeros."""
    return vector.dense() if isinstance(vector, SparseVector) else vector
