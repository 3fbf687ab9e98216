"""The modules, parameters and optimizers of a run, and how each optimizer's parameters are exchanged."""

from collections.abc import Collection

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.run.choice import directed, method_for, parts_of, takeover_for
from lightning_sparsecomm.run.few_rows import FewRows
from lightning_sparsecomm.run.nodes import Nodes
from lightning_sparsecomm.run.optimizers import TrackedOptimizer, parameters_of
from lightning_sparsecomm.run.refusals import (
    refuse_complex,
    refuse_ignored,
    refuse_lbfgs,
    refuse_misplaced,
    refuse_moved_by_others,
    refuse_renormalizing,
    refuse_sparse,
    refuse_strangers,
    refuse_unannounced,
    refuse_unmatched,
)
from lightning_sparsecomm.sharing.adam import AdamTakeover
from lightning_sparsecomm.sharing.bucket import BucketHook, BucketSync
from lightning_sparsecomm.sharing.delta import DeltaSync
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.method import Method, RunSize
from lightning_sparsecomm.sharing.share import Share
from lightning_sparsecomm.sharing.sync import Sync


class Registry:
    """The modules and optimizers of one run.

    Attributes:
        methods: The method and its fallbacks, in order of preference.
        known: By identity, their parameters with names; names of a second module have a prefix.
        ignored: Identities of the parameters that DDP is told to ignore.
        leading: The optimizer whose exchanges of weights also average buffers; None before the first.
        nodes: Who is on a node with this rank, where methods work between nodes; None where all ranks are alike.
        clips_by_value: Whether the Trainer clips the mean gradient's elements.
        fixed: Whether the method stays as it was given, whatever the run's length.
        followed: The run for which the method was taken, see `follow`; None for none.
        few_rows: Finds tables whose gradients have few rows.
    """

    def __init__(self, method: Method, wire: Wire, hook: BucketHook | None) -> None:
        self.methods = method.chain
        self.modules: list[nn.Module] = []
        self.known: dict[int, tuple[str, Parameter]] = {}
        self.ignored: set[int] = set()
        self.optimizers: list[TrackedOptimizer] = []
        self.leading: TrackedOptimizer | None = None
        self.nodes: Nodes | None = None
        self.clips_by_value = False
        self.fixed = False
        self.followed: RunSize | None = None
        self.few_rows = FewRows(wire)
        self._wire = wire
        self._hook = hook

    @property
    def syncs(self) -> list[Sync]:
        return [sync for method in self.methods for sync in method.syncs]

    @property
    def named(self) -> list[tuple[str, Parameter]]:
        return list(self.known.values())

    @property
    def steps(self) -> int:
        """Finished optimizer steps, of the optimizer that has made most."""
        return max((tracked.steps for tracked in self.optimizers), default=0)

    @property
    def in_buckets(self) -> bool:
        """Whether DDP's buckets average gradients now."""
        return isinstance(self.methods[0].syncs[0], BucketSync)

    def work_between(self, nodes: Nodes) -> None:
        """Lets methods work between nodes; before the first parameter is exchanged."""
        self.nodes, self._wire, self.fixed = nodes, nodes.between, True

    def add_module(self, module: nn.Module) -> None:
        """Adds a module that trains; refuses complex parameters, and sparse gradients that the method cannot take."""
        self.modules.append(module)
        self._scan()
        # Frozen parameters have no gradient; they are checked when they get one.
        refuse_sparse(self.methods, [known for known in self.known.values() if known[1].requires_grad])

    def check(self) -> None:
        """Refuses patterns that match nothing, and parameters that belong to no sync or to several."""
        refuse_unmatched(self.syncs, [name for name, _ in self.named])
        for method in self.methods:
            refuse_misplaced(method, self.named)

    def find(self, optimizer: Optimizer) -> TrackedOptimizer | None:
        """The record of this very object, if it is registered."""
        return next((tracked for tracked in self.optimizers if tracked.optimizer is optimizer), None)

    def register(self, optimizer: Optimizer) -> TrackedOptimizer:
        """Adds an optimizer and chooses its method. All ranks must add optimizers in the same order."""
        tracked = TrackedOptimizer(optimizer, len(self.optimizers), self.nodes is not None)
        self.optimizers.append(tracked)
        self.choose(tracked)
        return tracked

    def held_by(self, optimizer: Optimizer) -> NamedParameters:
        """The known parameters of an optimizer, in named-parameter order."""
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        return [known for key, known in self.known.items() if key in held]

    def choose(self, tracked: TrackedOptimizer) -> None:
        """Chooses the optimizer's method once its module is known; see `method_for` and `takeover_for`."""
        if tracked.method is not None or not (held := self.held_by(tracked.optimizer)):
            return
        optimizer = tracked.optimizer
        refuse_lbfgs(optimizer, self.nodes is not None)
        method = method_for(optimizer, self.methods, held, self.clips_by_value)
        if any(sync.drifts or not sync.shares_gradients for sync in method.syncs):
            # Before a takeover, which may move weights itself.
            tracked.watch_updates()
        takeover = takeover_for(optimizer, method, held, tracked.members)
        refuse_ignored(takeover, any(id(parameter) in self.ignored for parameter in parameters_of(optimizer)))
        # Only now: whoever catches a refusal and steps is refused again.
        tracked.method, tracked.takeover = method, takeover

    def admit(self, tracked: TrackedOptimizer) -> None:
        """Takes the optimizer's parameters as they are now: adds those that have begun to require a gradient.

        What counts is what is equal on all ranks: whether a parameter required a gradient in a backward pass, or does
        now, and not whether it got one. State of parameters that the optimizer no longer has is kept, in case they come
        back.

        Raises:
            ValueError: A parameter belongs to no known module, or has a gradient that no backward pass announced.
        """
        parameters = parameters_of(tracked.optimizer)
        tracked.note_trained()
        held = {id(parameter) for parameter in parameters}
        new = (tracked.noted & held) - tracked.members - self.ignored
        if not all(p.grad is None or id(p) in tracked.noted for p in parameters):
            refuse_unannounced(self.held_by(tracked.optimizer), tracked.noted)
        if tracked.members <= held:
            if not new:
                return
        else:
            # A takeover holds this very set.
            tracked.members &= held
        if not new <= self.known.keys():
            self._scan()
            refuse_strangers([p for p in parameters if id(p) in new - self.known.keys() - self.ignored])
        if not self.fixed and self.few_rows.judge([p for p in parameters if id(p) in new], self.syncs):
            self.check()
        self.add_members(tracked, new)

    def take_from(self, tracked: TrackedOptimizer, members: Collection[int]) -> None:
        """Takes members, given by their identities, away from an optimizer; its other shares start anew."""
        # A takeover holds this very set.
        tracked.members -= set(members)
        tracked.shares = {}
        self.add_members(tracked, set())

    def replace(self, former: TrackedOptimizer, tracked: TrackedOptimizer) -> None:
        """Forgets an optimizer; the last one takes its place in the order of registration."""
        former.end_takeover()
        self.optimizers.remove(tracked)
        self.optimizers[self.optimizers.index(former)] = tracked
        tracked.number = former.number
        if self.leading is former:
            self.leading = tracked

    def add_members(self, tracked: TrackedOptimizer, new: set[int]) -> None:
        """Adds parameters, given by their identities, to those that an optimizer exchanges."""
        self.choose(tracked)
        assert tracked.method is not None
        members = tracked.members | new
        named = [known for key, known in self.known.items() if key in members]
        refuse_sparse(self.methods, named)
        if self.nodes is not None:
            self.nodes.divide(self.named, named)
        parts = parts_of(tracked.method, tracked.parts, named)
        others = set().union(*(other.members for other in self.optimizers if other is not tracked))
        refuse_moved_by_others([each for sync, piece in parts if sync.anchored for each in piece], others)
        # Only now: whoever catches a refusal and steps again is refused again. A takeover holds this very set.
        tracked.members |= new
        tracked.parts = parts
        if isinstance(tracked.takeover, AdamTakeover):
            tracked.takeover.direct(directed(parts))
        shares: dict[Sync, Share] = {}
        for sync, piece in parts:
            piece = self._given(sync, piece)
            if sync in tracked.shares:
                tracked.shares[sync].extend(piece)
                shares[sync] = tracked.shares[sync]
            elif piece:
                shares[sync] = _start(sync, tracked.optimizer, piece, self._wire, self.nodes)
        tracked.shares = shares

    def restart(self) -> None:
        """Discards all shares' state and starts over at step 0, with the weights as they are."""
        for tracked in self.optimizers:
            if tracked.members:
                tracked.shares = {}
                self.add_members(tracked, set())
            tracked.steps = 0
            tracked.unshare()
            tracked.resumed = None
            if tracked.takeover is not None:
                tracked.takeover.restart()

    def _given(self, sync: Sync, piece: NamedParameters) -> NamedParameters:
        """What a sync's share is given of its parameters."""
        if self._hook is not None and isinstance(sync, BucketSync):
            piece = self._hook.not_in_buckets(piece)
        # Of a `DeltaSync`, all: ranks of a node must know when others exchange.
        return piece if self.nodes is None or isinstance(sync, DeltaSync) else self.nodes.own(piece)

    def _scan(self) -> None:
        for index, module in enumerate(self.modules):
            prefix = f"module_{index}." if index else ""
            left_out = ignored_by_ddp(module)
            for name, part in module.named_modules():
                self.few_rows.scan(part)
                refuse_renormalizing(self.methods if self._wire.world_size > 1 else [], prefix + name, part)
            for name, parameter in module.named_parameters():
                if name in left_out:
                    self.ignored.add(id(parameter))
                    continue
                refuse_complex(prefix + name, parameter)
                self.known.setdefault(id(parameter), (prefix + name, parameter))


def _start(sync: Sync, optimizer: Optimizer, parameters: NamedParameters, wire: Wire, nodes: Nodes | None) -> Share:
    if nodes is not None and isinstance(sync, DeltaSync):
        return sync.start(optimizer, parameters, wire, nodes.own)
    return sync.start(optimizer, parameters, wire)


def ignored_by_ddp(module: nn.Module) -> set[str]:
    """Names of parameters and buffers that DDP is told to leave alone."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
