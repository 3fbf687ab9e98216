"""Anchors that an exchange moves: the weights that all ranks share, where ranks exchange the changes of their own."""

from collections.abc import Collection, Mapping

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis import Layout, SparseVector
from lightning_sparsecomm.channel.saved import Saved, pop_named
from lightning_sparsecomm.sharing.gradients import NamedParameters, add_, wide_dtype
from lightning_sparsecomm.sharing.outer import OuterOptimizer, load_outer, make_outer

# Kinds of state.
_ANCHORS, _OUTER = "anchor", "outer optimizer"


class Anchored:
    """Anchors, in float32 or wider, and the outer optimizer that moves them.

    Args:
        outer: Makes the outer optimizer; None adds mean changes to the anchors.

    Attributes:
        anchors: By parameter name.
    """

    def __init__(self, outer: OuterOptimizer | None) -> None:
        self.anchors: dict[str, Parameter] = {}
        self._make = outer
        self._outer: Optimizer | None = None

    def of(self, name: str) -> Tensor:
        """The anchor of a parameter, to read or to write."""
        return self.anchors[name].detach()

    def add(self, weights: Mapping[str, Tensor], parameters: NamedParameters) -> None:
        """Adds copies of weights, by name, which are some of the parameters', as anchors."""
        dtype, devices = wide_dtype(parameters), {name: weight.device for name, weight in parameters}
        new = {name: Parameter(each.detach().to(devices[name], dtype, copy=True)) for name, each in weights.items()}
        self.anchors.update(new)
        if self._outer is not None and new:
            self._outer.add_param_group({"params": list(new.values())})
        elif self._make is not None and new:
            self._outer = make_outer(self._make, list(new.values()))

    def in_common(self, parameters: NamedParameters) -> list[tuple[Parameter, Tensor]]:
        """Each parameter with its anchor. One that has just been unfrozen has none before its first step."""
        return [(weight, self.of(name)) for name, weight in parameters if name in self.anchors]

    def pairs(self, parameters: NamedParameters) -> list[tuple[Tensor, Tensor]]:
        """Each weight with its anchor, as for `in_common`."""
        return [(weight.detach(), anchor) for weight, anchor in self.in_common(parameters)]

    def move(
        self, shared: SparseVector | Tensor, parameters: NamedParameters, layout: Layout, left_out: Collection[str]
    ) -> None:
        """Moves the parameters' anchors by mean changes over the layout; an outer optimizer leaves some out."""
        if self._outer is None:
            add_([anchor for _, anchor in self.pairs(parameters)], shared, layout)
            return
        mean = shared.dense() if isinstance(shared, SparseVector) else shared
        changes = zip((segment.name for segment in layout.segments), layout.views(mean), strict=True)
        self.move_by({name: change for name, change in changes if name not in left_out})

    def move_by(self, changes: Mapping[str, Tensor]) -> None:
        """Moves anchors by mean changes, given by name."""
        for name, change in changes.items():
            if self._outer is None:
                self.of(name).add_(change)
            else:
                self.anchors[name].grad = change.neg().to(self.anchors[name].dtype)
        if self._outer is not None:
            self._outer.step()
            self._outer.zero_grad()

    def state_dict(self) -> Saved:
        """Anchors, and what the outer optimizer holds, by kind and name; tensors share storage with it."""
        saved: Saved = {_ANCHORS: {name: anchor.detach() for name, anchor in self.anchors.items()}}
        if self._outer is not None:
            moving = {name: self._outer.state.get(anchor) for name, anchor in self.anchors.items()}
            saved[_OUTER] = {name: dict(state) for name, state in moving.items() if state}
        return saved

    def load_state_dict(self, saved: Saved, parameters: NamedParameters) -> None:
        """Takes out of `saved` what was held for some parameters."""
        names = [name for name, _ in parameters]
        self.add(pop_named(saved, _ANCHORS, names), parameters)
        if self._make is not None:
            moving = pop_named(saved, _OUTER, names)
            if self._outer is not None:
                load_outer(self._outer, {self.anchors[name]: state for name, state in moving.items()})
