"""The modules, parameters and optimizers of a run, and how each optimizer's parameters are exchanged."""

import itertools
from collections.abc import Sequence

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.run.choice import directed, method_for, takeover_for
from lightning_sparsecomm.run.optimizers import TrackedOptimizer, parameters_of
from lightning_sparsecomm.sharing.adam import AdamTakeover
from lightning_sparsecomm.sharing.bucket import BucketHook
from lightning_sparsecomm.sharing.gradients import NamedParameters, has_sparse_gradient, note_sparse_gradient
from lightning_sparsecomm.sharing.method import Method
from lightning_sparsecomm.sharing.share import Share
from lightning_sparsecomm.sharing.sync import Sync, matches
from lightning_sparsecomm.sharing.takeover import MomentumTakeover


class Registry:
    """The modules and optimizers of one run.

    Attributes:
        methods: The method and its fallbacks, in order of preference.
        known: By identity, their parameters with names; names of a second module have a prefix.
        ignored: Identities of the parameters that DDP is told to ignore.
        leading: The optimizer whose exchanges of weights also average buffers; None before the first.
    """

    def __init__(self, method: Method, wire: Wire, hook: BucketHook | None) -> None:
        self.methods = [method]
        while (fallback := self.methods[-1].fallback) is not None:
            self.methods.append(fallback)
        self.modules: list[nn.Module] = []
        self.known: dict[int, tuple[str, Parameter]] = {}
        self.ignored: set[int] = set()
        self.optimizers: list[TrackedOptimizer] = []
        self.leading: TrackedOptimizer | None = None
        self._wire = wire
        self._hook = hook

    @property
    def syncs(self) -> list[Sync]:
        return [sync for method in self.methods for sync in method.syncs]

    @property
    def named(self) -> list[tuple[str, Parameter]]:
        return list(self.known.values())

    def add_module(self, module: nn.Module) -> None:
        """Adds a module that trains; refuses complex parameters, and sparse gradients that the method cannot take."""
        self.modules.append(module)
        self._scan()
        # Frozen parameters have no gradient; they are checked when they get one.
        self._refuse_sparse([known for known in self.known.values() if known[1].requires_grad])

    def check(self) -> None:
        """Refuses patterns that match nothing, and parameters that belong to no sync or to several."""
        names = [name for name, _ in self.named]
        for sync in self.syncs:
            limits = (*itertools.chain(*sync.inside), *sync.outside)
            for option, patterns in (("parameters", (*sync.parameters, *limits)), ("exclude", sync.exclude)):
                for pattern in patterns:
                    if not any(matches(name, (pattern,)) for name in names):
                        raise ValueError(
                            f"{option}: the pattern {pattern!r} matches no parameter. Patterns are shell-style and"
                            f" match whole names; the names are {listed(names)}."
                        )
        for method in self.methods:
            for name, parameter in self.named:
                claiming = [sync for sync in method.syncs if sync.claims(name, parameter)]
                frozen = has_sparse_gradient(parameter) and not parameter.requires_grad
                if len(claiming) > 1 or not (frozen or method.takes(name, parameter)):
                    raise ValueError(
                        f"each parameter must belong to exactly one sync; {name!r} belongs to {len(claiming)}."
                        " Change the `parameters` and `exclude` patterns of the method's syncs."
                    )
            for sync, parameters in method.parts(self.named):
                sync.check(parameters)

    def find(self, optimizer: Optimizer) -> TrackedOptimizer | None:
        """The record of this very object, if it is registered."""
        return next((tracked for tracked in self.optimizers if tracked.optimizer is optimizer), None)

    def register(self, optimizer: Optimizer) -> TrackedOptimizer:
        """Adds an optimizer and chooses its method. All ranks must add optimizers in the same order."""
        tracked = TrackedOptimizer(optimizer, len(self.optimizers))
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
        method = method_for(optimizer, self.methods, held)
        takeover = takeover_for(optimizer, method, held, tracked.members)
        ignored = any(id(parameter) in self.ignored for parameter in parameters_of(optimizer))
        if isinstance(takeover, MomentumTakeover) and ignored:
            takeover.close()
            raise ValueError(
                "the method replaces the momentum of an optimizer that also holds parameters which DDP is told to"
                " ignore (_ddp_params_and_buffers_to_ignore), and these would have none. Give them an optimizer of"
                " their own, or use methods.dgc(momentum_correction=False)."
            )
        # Only now: whoever catches a refusal and steps is refused again.
        tracked.method, tracked.takeover = method, takeover

    def admit(self, tracked: TrackedOptimizer) -> None:
        """Adds the optimizer's parameters that have begun to require a gradient; refuses those of no known module."""
        parameters = parameters_of(tracked.optimizer)
        trained = {id(p) for p in parameters if p.requires_grad or p.grad is not None}
        new = trained - tracked.members - self.ignored
        if not new:
            return
        if not new <= self.known.keys():
            self._scan()
            unknown = [tuple(p.shape) for p in parameters if id(p) in new - self.known.keys() - self.ignored]
            if unknown:
                raise ValueError(
                    f"the optimizer holds {len(unknown)} parameter(s) that the model lacks, of shapes"
                    f" {listed(unknown)}: their gradients would stay local, and the replicas drift apart. Make them"
                    " part of the model."
                )
        self.add_members(tracked, new)

    def add_members(self, tracked: TrackedOptimizer, new: set[int]) -> None:
        """Adds parameters, given by their identities, to those that an optimizer exchanges."""
        self.choose(tracked)
        assert tracked.method is not None
        members = tracked.members | new
        named = [known for key, known in self.known.items() if key in members]
        self._refuse_sparse(named)
        parts = tracked.method.parts(named)
        for sync, piece in parts:
            if not sync.shares_gradients:
                self._refuse_two_owners(tracked, piece)
        # Only now: whoever catches a refusal and steps again is refused again. A takeover holds this very set.
        tracked.members |= new
        tracked.parts = parts
        if isinstance(tracked.takeover, AdamTakeover):
            tracked.takeover.direct(directed(parts))
        shares: dict[Sync, Share] = {}
        for sync, piece in parts:
            if self._hook is not None:
                piece = self._hook.not_in_buckets(piece)
            if sync in tracked.shares:
                tracked.shares[sync].extend(piece)
                shares[sync] = tracked.shares[sync]
            elif piece:
                shares[sync] = sync.start(tracked.optimizer, piece, self._wire)
        tracked.shares = shares

    def restart(self) -> None:
        """Discards all shares' state and starts over at step 0, with the weights as they are."""
        for tracked in self.optimizers:
            tracked.shares = {
                sync: sync.start(tracked.optimizer, share.parameters, self._wire)
                for sync, share in tracked.shares.items()
            }
            tracked.steps = 0
            tracked.shared = False
            if tracked.takeover is not None:
                tracked.takeover.restart()

    def _scan(self) -> None:
        for index, module in enumerate(self.modules):
            prefix = f"module_{index}." if index else ""
            left_out = ignored_by_ddp(module)
            for part in module.modules():
                if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
                    note_sparse_gradient(part.weight)
            for name, parameter in module.named_parameters():
                if name in left_out:
                    self.ignored.add(id(parameter))
                    continue
                if parameter.is_complex():
                    raise TypeError(
                        f"parameter {prefix + name!r} is complex, which no method can take. Store it as a real tensor"
                        " (torch.view_as_real), or use strategy='ddp'."
                    )
                self.known.setdefault(id(parameter), (prefix + name, parameter))

    def _refuse_sparse(self, named: NamedParameters) -> None:
        for name, parameter in named:
            if has_sparse_gradient(parameter) and not all(method.takes(name, parameter) for method in self.methods):
                raise TypeError(
                    f"the gradient of {name!r} is sparse (sparse=True), which this method cannot take. Use"
                    f" methods.split([{name!r}], methods.s2_reducer(), ...) with this method for the rest, a method"
                    " that exchanges weights, such as methods.sbc(), or a layer with sparse=False."
                )

    def _refuse_two_owners(self, tracked: TrackedOptimizer, piece: NamedParameters) -> None:
        """Refuses weights that another optimizer's share would also set."""
        others = set().union(*(other.members for other in self.optimizers if other is not tracked))
        for name, parameter in piece:
            if id(parameter) in others:
                raise ValueError(
                    f"parameter {name!r} belongs to two optimizers. Each would set it to its own anchor and undo the"
                    " other's steps. Give it to one optimizer, or use methods.gradient_dropping()."
                )


def ignored_by_ddp(module: nn.Module) -> set[str]:
    """Names of parameters and buffers that DDP is told to leave alone."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def listed(things: Sequence[object], most: int = 6) -> str:
    """The first few things, as text."""
    shown = ", ".join(str(thing) for thing in things[:most])
    return shown if len(things) <= most else f"{shown}, … ({len(things)} in all)"
