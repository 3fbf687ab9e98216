"""Saves and loads the state of a run that is not part of ddp's checkpoint."""

from collections.abc import Callable, Collection, Sequence

from torch.optim import Optimizer

from lightning_sparsecomm.basis.far import FarWire
from lightning_sparsecomm.basis.parts import parts_in
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel.adam import LocalAdam
from lightning_sparsecomm.channel.momentum import Momentum, MomentumCorrection
from lightning_sparsecomm.channel.saved import Saved, pop_named
from lightning_sparsecomm.channel.shared_adam import SharedAdam
from lightning_sparsecomm.exchange import Exchange
from lightning_sparsecomm.run.chooser import Chooser
from lightning_sparsecomm.run.contents import State, scaled
from lightning_sparsecomm.run.few_rows import FewRows
from lightning_sparsecomm.run.following import follow_saved
from lightning_sparsecomm.run.inside import hand_out
from lightning_sparsecomm.run.optimizers import TrackedOptimizer, parameters_of
from lightning_sparsecomm.run.registry import Registry
from lightning_sparsecomm.run.replicas import Replicas
from lightning_sparsecomm.run.scaling import LossScaling
from lightning_sparsecomm.run.shared_gradients import is_ahead, saved_gradients
from lightning_sparsecomm.sharing.set_weights import NOTED
from lightning_sparsecomm.sharing.takeover import MomentumTakeover

# Kinds of state besides those of the shares.
_OPTIMIZER, _BEGUN, _OWED = "the optimizer's own state", "momentum begun", "owed to the next gradient"

# How kinds of state end that are anchors.
_ANCHORS = ("anchor", "anchors")

# What these memories hold belongs to the optimizer: one that takes its place begins anew, as under ddp.
_OF_ITS_OPTIMIZER = {kind.__name__ for kind in (MomentumCorrection, Momentum, LocalAdam, SharedAdam)}


class RunState:
    """The state of one run on this rank: of shares, drifting replicas, the loss scaler and the ledger.

    Attributes:
        without_ddp: Whether no ddp broadcasts buffers: then exchanges average them.
        have_drifted: Whether replicas have drifted earlier in the run, with another method.
    """

    without_ddp = have_drifted = False

    def __init__(
        self,
        registry: Registry,
        replicas: Replicas,
        scaling: LossScaling | None,
        wire: Wire,
        chooser: Callable[[], Chooser | None] = lambda: None,
    ) -> None:
        self._registry = registry
        self._replicas = replicas
        self._scaling = scaling
        self._wire = wire
        self._chooser = chooser
        # Parameters whose anchors are another method's, so that no share has taken them out: they begin there.
        self._left_behind: set[str] = set()

    @property
    def drifts(self) -> bool:
        """Whether replicas may drift apart."""
        return any(sync.drifts for sync in self._registry.syncs)

    @property
    def differ(self) -> bool:
        """Whether ranks may differ in weights, or in what callbacks have made of them, such as a moving average."""
        return self.drifts or self.have_drifted

    @property
    def averages_buffers(self) -> bool:
        """Whether exchanges of weights average buffers too."""
        averaged = ("average", "broadcast") if self.without_ddp else ("average",)
        return any(sync.buffers in averaged for sync in self._registry.syncs)

    @property
    def broadcasts_buffers(self) -> bool:
        """Whether ddp broadcasts buffers before forward passes, unless its own options forbid it."""
        return any(sync.buffers == "broadcast" for sync in self._registry.syncs)

    def state_dict(self) -> State:
        """The state of all shares. If replicas drift, also this rank's weights and the state of its optimizers.

        Tensors share storage with their owners.
        """
        leading, chooser = self._registry.leading, self._chooser()
        return ({} if chooser is None else {"choice": chooser.state_dict()}) | {
            "streams": [
                self._saved(tracked) | {"shared": saved_gradients(tracked)} for tracked in self._registry.optimizers
            ],
            "leading": None if leading is None else leading.number,
            "followed": self._registry.followed,
            "have_drifted": self.differ,
            "nodes": [] if self._registry.nodes is None else self._registry.nodes.groups,
            "weights": self._replicas.state_dict(not self.broadcasts_buffers) if self.drifts else {},
            # Drifting ranks scale by themselves between exchanges. Without drift, the scale is in the checkpoint.
            "scaler": self._scaling.scaler.state_dict() if self._scaling is not None and self.drifts else {},
            "ledger": self._wire.ledger.state_dict(),
            "far": self._wire.far,
            # Memories have forgotten what was sent, and the weights have not moved by it.
            "torn": any(
                is_ahead(tracked) and (tracked.failed_after_sharing or saved_gradients(tracked) is None)
                for tracked in self._registry.optimizers
            )
            or any(share.torn for tracked in self._registry.optimizers for share in tracked.shares.values()),
        }

    def load_state_dict(self, state: State, as_many_ranks: bool) -> list[str]:
        """Loads what `state_dict` returned, with this method or another. Load the optimizers' own state first.

        Unless `as_many_ranks` saved it as load it, on the same nodes, the state is the mean over those that saved it.
        Returns the parts of the state that the method cannot use, in words.
        """
        optimizers, dropped, chooser = self._registry.optimizers, [], self._chooser()
        follow_saved(self._registry, chooser, state)
        self.have_drifted = state.get("have_drifted", bool(state["weights"]))
        for saved in state["streams"] if not as_many_ranks else []:
            saved["held"] = _of_other_ranks(saved["held"], self._renewable(), state.get("nodes"))
        self._left_behind.clear()
        for tracked, saved in zip(optimizers, state["streams"], strict=False):
            dropped += self._load(tracked, saved)
            tracked.resumed = saved.get("shared")
        dropped += [f"all of optimizer {number}" for number in range(len(optimizers), len(state["streams"]))]
        leading = state["leading"]
        self._registry.leading = optimizers[leading] if leading is not None and leading < len(optimizers) else None
        if self.drifts:
            self._replicas.load_state_dict(state["weights"], self._left_behind)
        elif state["weights"]:
            dropped.append("each rank's own weights")
        if self._scaling is not None and state["scaler"]:
            self._scaling.scaler.load_state_dict(state["scaler"])
        if as_many_ranks:
            self._wire.ledger.load_state_dict(state["ledger"])
            if isinstance(self._wire, FarWire):
                self._wire.resume(state.get("far", self._wire.far))
                if self._registry.nodes is not None:
                    self._registry.nodes.between.far = self._wire.far
        return dropped

    def _renewable(self) -> set[str]:
        """Kinds of state that begin anew on other ranks."""
        exchanges = (each for method in self._registry.methods for each in parts_in(method, Exchange))  # type: ignore[type-abstract]
        return {type(each).__name__ for each in exchanges if each.renewable}

    def load_shared(self, optimizers: Sequence[State]) -> list[str]:
        """Loads, by optimizer, its steps and what its shares hold in common with other ranks, after a restart.

        Also what is this rank's own, where it is there too. Returns the parts that the method cannot use, in words.
        """
        loaded = zip(self._registry.optimizers, optimizers, strict=False)
        return [words for tracked, saved in loaded for words in self._load(tracked, saved, in_common=True)]

    def of_optimizer(self, tracked: TrackedOptimizer, in_common: bool) -> Saved:
        """What an optimizer holds `in_common` with all ranks or, if they drift, as a rank's own; for `load_shared`."""
        return self._of_optimizer(tracked) if in_common is not tracked.drifts else {}

    def hand_over(self, tracked: TrackedOptimizer) -> None:
        """Lets an optimizer that is new take the place of those that have trained parameters of its own before.

        It takes over their counts of steps, and what is held for these parameters: residuals, anchors, outer momentum.
        Momentum and moments begin anew, as under ddp. An optimizer that is left without parameters is forgotten.
        """
        held = {id(parameter): name for name, parameter in self._registry.held_by(tracked.optimizer)}
        for former in [each for each in self._registry.optimizers if each.steps and each.members & held.keys()]:
            names = {held[key] for key in former.members & held.keys()}
            saved = self._saved(former)
            taken: Saved = {}
            # The optimizers have their own state already.
            saved["held"].pop(_OPTIMIZER, None)
            for kind, parts in saved["held"].items():
                found = pop_named({kind: parts}, kind, names)
                if kind != _BEGUN and not _OF_ITS_OPTIMIZER & set(kind.split(".")):
                    taken[kind] = found
            self._registry.take_from(former, held.keys())
            if former.members:
                self._load(former, saved | {"members": set(saved["members"]) - names})
            else:
                self._registry.replace(former, tracked)
            new = {"steps": max(tracked.steps, former.steps), "members": names, "held": taken}
            self._load(tracked, saved | new)

    def _saved(self, tracked: TrackedOptimizer) -> State:
        held: Saved = {}
        for share in tracked.shares.values():
            for kind, parts in share.state_dict().items():
                held.setdefault(kind, {}).update(parts)
        named = tracked.parameters
        held |= {kind: parts for kind, parts in self._of_optimizer(tracked).items() if tracked.drifts or kind == _BEGUN}
        if tracked.owed:
            held[_OWED] = {
                name: tracked.owed[id(parameter)] for name, parameter in named if id(parameter) in tracked.owed
            }
        own = {"samples": tracked.samples.state_dict(), "few_rows": FewRows.state_dict(named)}
        own = {kind: found for kind, found in own.items() if found}
        return {"steps": tracked.steps, "members": [name for name, _ in named], "held": held, **own}

    def _of_optimizer(self, tracked: TrackedOptimizer) -> Saved:
        """The optimizer's own state, and whether its momentum has begun where a takeover keeps that."""
        named, state = tracked.parameters, tracked.optimizer.state
        held: Saved = {_OPTIMIZER: {name: dict(state[parameter]) for name, parameter in named if parameter in state}}
        if tracked.takeover is not None:
            held[_BEGUN] = {name: True for name, parameter in named if tracked.takeover.has_begun(parameter)}
        return held

    def _load(self, tracked: TrackedOptimizer, saved: State, in_common: bool = False) -> list[str]:
        members, held = set(saved["members"]), saved["held"]
        tracked.steps = saved["steps"]
        tracked.samples.load_state_dict(saved.get("samples", ()))
        named = {name: each for name, each in self._registry.held_by(tracked.optimizer) if name in members}
        few_rows = {} if self._registry.fixed else saved.get("few_rows", {})
        self._registry.few_rows.load_state_dict(list(named.items()), few_rows)
        if not named:
            return [f"all of optimizer {tracked.number}"] if members else []
        self._registry.add_members(tracked, {id(parameter) for parameter in named.values()})
        for share in tracked.shares.values():
            share.load_state_dict(held)
        if self._registry.nodes is not None:
            hand_out([pair for share in tracked.shares.values() for pair in share.in_common()], self._registry.nodes)
        if _OPTIMIZER in held and (tracked.drifts or in_common):
            own = pop_named(held, _OPTIMIZER, named)
            # A takeover of momentum moves weights that ranks share by what the optimizer holds: as in the checkpoint.
            if in_common or not isinstance(tracked.takeover, MomentumTakeover):
                _load_optimizer(tracked.optimizer, {id(parameter): own.get(name) for name, parameter in named.items()})
        tracked.owed |= {id(named[name]): part for name, part in pop_named(held, _OWED, named).items()}
        begun = pop_named(held, _BEGUN, named)
        if tracked.takeover is not None:
            tracked.takeover.load_begun([named[name] for name in begun])
        # What other ranks of this node hold, in a mean over all.
        nodes = self._registry.nodes
        others = nodes.of_others(tracked.parameters) if nodes is not None else set()
        held = {kind: parts.keys() - others for kind, parts in held.items()}
        self._left_behind |= {name for kind, names in held.items() if kind.endswith(_ANCHORS) for name in names}
        return [f"{kind} of {len(parts)} parameters" for kind, parts in held.items() if parts]


def _of_other_ranks(held: Saved, renewable: Collection[str], nodes: Sequence[Sequence[int]] | None) -> Saved:
    """What this rank goes on with, of a mean over other ranks: without `renewable` kinds, which begin anew.

    `nodes` are theirs, if they had any.
    """
    # Means of weights and of what was noted of them may be rounded in other ways.
    dropped = (NOTED, *renewable)
    held = {kind: parts for kind, parts in held.items() if kind.rpartition(".")[2].rpartition(", ")[2] not in dropped}
    if not nodes:
        return held
    # What one rank of each node holds counts as zero on the others, in a mean over all.
    alike = {kind: parts for kind, parts in held.items() if kind == _OPTIMIZER}
    of_node: Saved = scaled(held, len(nodes[0]))
    return of_node | alike


def _load_optimizer(optimizer: Optimizer, own: dict[int, dict[str, object] | None]) -> None:
    """Replaces the state of parameters given by identity; None removes it. torch converts devices and dtypes."""
    state = optimizer.state_dict()
    for position, parameter in enumerate(parameters_of(optimizer)):
        if id(parameter) in own:
            state["state"].pop(position, None)
            if (values := own[id(parameter)]) is not None:
                state["state"][position] = values
    optimizer.load_state_dict(state)
