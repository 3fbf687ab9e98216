"""Ranks that train by themselves, and exchange what their weights have changed every so many optimizer steps."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.checks import check_switches
from lightning_sparsecomm.exchange.base import Exchanged
from lightning_sparsecomm.gradients import NamedParameters, add_
from lightning_sparsecomm.held import Held, prefixed, take, within
from lightning_sparsecomm.layout import Layout, SparseVector
from lightning_sparsecomm.rounds import Round
from lightning_sparsecomm.schedules import Every, check_every, every_at
from lightning_sparsecomm.sync import Sync, nothing_to_wait_for, wide_dtype
from lightning_sparsecomm.takeover import mask_momentum_
from lightning_sparsecomm.wire import UPDATES, Wire

Buffers = Literal["average", "own", "broadcast"]

# What is held, besides what the channel holds.
_ANCHORS, _STEPS, _OUTER = "anchor", "steps", "outer optimizer"

OuterOptimizer = Callable[[list[Parameter]], Optimizer]
"""Makes an optimizer for the anchor: a class with its options bound, such as `partial(torch.optim.SGD, lr=0.7)`."""


@dataclass
class _Local:
    """One stream's part in the exchange.

    Attributes:
        channel: Its memories and exchange.
        layout: Layout of its parameters.
        anchors: By parameter name, the weights that all ranks share, in float32 or wider.
        outer: What moves them; None where the mean of the changes is added to them.
        steps: Optimizer steps since the last exchange.
    """

    channel: Channel
    layout: Layout | None = None
    anchors: dict[str, Parameter] = field(default_factory=dict)
    outer: Optimizer | None = None
    steps: int = 0


class DeltaSync(Sync):
    """Exchanges weight changes instead of gradients, after every so many of an optimizer's own steps.

        Δ ← w − anchor, through the channel: memories, exchange, mean over ranks
        anchor ← anchor + mean, or a step of the outer optimizer with −mean as its gradient;   w ← anchor

    Between two exchanges nothing is sent. What is measured and saved as the model is the anchor, which is equal on all
    ranks; a rank's own weights come back afterwards to the bit. Steps since the last exchange are exchanged when
    training ends. With narrower weights than float32, the anchor is float32 and Δ is taken from its rounding, so that
    what rounding leaves out is never sent.

    Source: McMahan et al. 2017 (Federated Averaging); Sattler et al. 2018 (Sparse Binary Compression), algorithm 1;
    Douillard et al. 2023 (DiLoCo), for the outer optimizer.

    Args:
        channel: Memories and exchange; they see Δ in the place of gradients.
        every: Optimizer steps between two exchanges, or a schedule of it.
        outer: Makes the optimizer that moves the anchor; None adds the mean.
        mask_momentum: Whether the momentum that the local optimizer keeps (SGD's `momentum_buffer`, Adam's `exp_avg`)
            is set to zero wherever this rank sent something.
        buffers: What becomes of floating-point buffers, such as means of batch normalization: "average" averages
            them with each exchange, "own" leaves every rank its own, "broadcast" lets ddp broadcast the first rank's
            before every forward pass.
        parameters: Patterns of the parameters that go through it.
        exclude: Patterns of those that do not.
        min_dimensions: Parameters of fewer dimensions do not go through it.
        rest: Whether all that no other sync takes goes through it, whatever the patterns.

    Raises:
        ValueError: `every` is not a whole number of at least 1, or `buffers` is unknown.
        TypeError: `outer` is an optimizer instead of what makes one, or `channel` is no channel.
    """

    drifts = True
    shares_gradients = False

    takes_sparse = None

    def __init__(
        self,
        channel: Channel,
        every: Every = 1,
        outer: OuterOptimizer | None = None,
        mask_momentum: bool = False,
        buffers: Buffers = "average",
        parameters: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        min_dimensions: int = 0,
        rest: bool = False,
    ) -> None:
        super().__init__(parameters, exclude, min_dimensions, rest)
        check_every("every", every)
        check_switches(mask_momentum=mask_momentum)
        if buffers not in get_args(Buffers):
            raise ValueError(
                f"buffers must be one of {', '.join(get_args(Buffers))}; got {buffers!r}. Use 'average', which costs"
                " their bytes at each exchange only."
            )
        if isinstance(outer, Optimizer) or not (outer is None or callable(outer)):
            raise TypeError(
                "outer must make an optimizer of a list of parameters, since those it moves (the anchor) do not exist"
                f" yet; got {outer!r}. Give functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)."
            )
        if not isinstance(channel, Channel):
            raise TypeError(
                f"channel must be a Channel, of an exchange and memories; got {channel!r}. Give"
                " Channel(DenseAllReduce()), for example."
            )
        if channel.corrects_momentum or channel.clips:
            raise ValueError(
                f"a DeltaSync exchanges weight changes, which hold momentum and are made of clipped gradients already;"
                f" got {channel!r}. Leave MomentumCorrection, Momentum and ClipLocalNorm out of its channel."
            )
        self.channel = channel
        self.every = every
        self.outer = outer
        self.mask_momentum = mask_momentum
        self.buffers = buffers
        self.averages_buffers = buffers == "average"
        self.broadcasts_buffers = buffers == "broadcast"
        self._locals: dict[int, _Local] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> "DeltaSync":
        copied = copy.copy(self)
        # What makes the outer optimizer may refer to what cannot be copied, as what LightningCLI gives does.
        memo[id(self)], memo[id(self.outer)] = copied, self.outer
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def check(self, parameters: NamedParameters) -> None:
        if self.outer is not None and parameters:
            dtype = wide_dtype(parameters)
            # Of the anchor's shapes, without its memory.
            like = [torch.zeros((), dtype=dtype, device=weight.device).expand(weight.shape) for _, weight in parameters]
            _outer_optimizer(self.outer, [Parameter(each) for each in like])

    def synchronize(
        self, stream: int, optimizer: Optimizer, parameters: NamedParameters, round: Round, wire: Wire
    ) -> AbstractContextManager[Callable[[], None]]:
        """Notes the weights before the first step; gradients stay this rank's own."""
        local = self._locals.get(stream)
        if local is None:
            local = self._locals[stream] = _Local(copy.deepcopy(self.channel))
        if local.layout != round.layout:
            self._extend(stream, local, parameters, round.layout)
        wire.ledger.ddp_bytes += sum(p.numel() * p.element_size() for _, p in parameters if p.requires_grad)
        wire.ledger.elements += round.layout.size
        return nullcontext(nothing_to_wait_for)

    def skip(self, stream: int, optimizer: Optimizer, parameters: NamedParameters, round: Round, wire: Wire) -> None:
        """As any step, for its count decides when ranks meet, and a first one makes the anchor."""
        self.synchronize(stream, optimizer, parameters, round, wire)

    def after_step(
        self, stream: int, optimizer: Optimizer, parameters: NamedParameters, round: Round, wire: Wire
    ) -> AbstractContextManager[bool]:
        local = self._locals[stream]
        local.steps += 1
        if local.steps < every_at(self.every, round.step, round.epoch):
            return nullcontext(False)
        return self._exchange(local, optimizer, parameters, round, wire)

    def settle(
        self, stream: int, optimizer: Optimizer, parameters: NamedParameters, round: Round, wire: Wire
    ) -> AbstractContextManager[bool]:
        local = self._locals.get(stream)
        if local is None or not local.steps:
            return nullcontext(False)
        if local.layout != round.layout:
            # Loaded from a checkpoint, and no step since.
            self._extend(stream, local, parameters, round.layout)
        return self._exchange(local, optimizer, parameters, round, wire)

    def shared_model(self, stream: int, parameters: NamedParameters) -> list[tuple[Tensor, Tensor]]:
        local = self._locals.get(stream)
        if local is None or not local.steps:
            return []
        return [(weight.detach(), local.anchors[name].detach()) for name, weight in parameters]

    def restore(self, stream: int, parameters: NamedParameters) -> None:
        local = self._locals.get(stream)
        if local is not None:
            with torch.no_grad():
                torch._foreach_copy_(
                    [weight.detach() for _, weight in parameters],
                    [local.anchors[name].detach() for name, _ in parameters],
                )
            local.steps = 0

    def waiting(self, stream: int) -> int:
        """Optimizer steps since the last exchange, or since the first step."""
        local = self._locals.get(stream)
        return 0 if local is None else local.steps

    def forget(self) -> None:
        self._locals.clear()

    def residual_norm(self) -> float:
        return math.hypot(*(local.channel.residual_norm() for local in self._locals.values()))

    def _extend(self, stream: int, local: _Local, parameters: NamedParameters, layout: Layout) -> None:
        """Anchors for parameters that are new, at the weights that they have."""
        dtype = wide_dtype(parameters)
        local.channel.bind(layout, dtype, parameters[0][1].device)
        local.layout = layout
        taken = {name for other in self._locals.values() if other is not local for name in other.anchors}
        new = {
            name: Parameter(weight.detach().to(dtype, copy=True))
            for name, weight in parameters
            if name not in local.anchors
        }
        shared = sorted(taken & new.keys())
        if shared:
            raise ValueError(
                f"parameter {shared[0]!r} belongs to two optimizers, and each would set it to an anchor of its own,"
                " undoing the other's steps. Give it to one optimizer, or use methods.gradient_dropping()."
            )
        self._add_anchors(local, new)

    def _add_anchors(self, local: _Local, new: dict[str, Parameter]) -> None:
        local.anchors.update(new)
        if self.outer is None or not new:
            return
        if local.outer is None:
            local.outer = _outer_optimizer(self.outer, list(new.values()))
        else:
            local.outer.add_param_group({"params": list(new.values())})

    @contextmanager
    def _exchange(
        self, local: _Local, optimizer: Optimizer, parameters: NamedParameters, round: Round, wire: Wire
    ) -> Iterator[bool]:
        weights = [weight.detach() for _, weight in parameters]
        anchors = [local.anchors[name].detach() for name, _ in parameters]
        wire = wire.under(UPDATES)
        ledger, round_of_changes = wire.ledger, replace(round, quantity="weight update")
        with ExitStack() as turn:
            with ledger.exchanging():
                changes = _changes_in(weights, anchors)
                reduction = turn.enter_context(local.channel.reducing(changes, round_of_changes, wire))
                reduction.exchange()
            yield True
        with ledger.exchanging():
            exchanged = reduction.finish()
            self._move(local, anchors, exchanged, round.layout)
            torch._foreach_copy_(weights, anchors)
            local.steps = 0
            if self.mask_momentum:
                mask_momentum_(optimizer, parameters, exchanged.sent, round.layout)
        sent = exchanged.sent
        ledger.sent_elements += sent.indices.numel() if isinstance(sent, SparseVector) else sent.numel()

    def _move(self, local: _Local, anchors: list[Tensor], exchanged: Exchanged, layout: Layout) -> None:
        if local.outer is None:
            add_(anchors, exchanged.shared, layout)
            return
        shared = exchanged.shared
        mean = shared.dense() if isinstance(shared, SparseVector) else shared
        for segment, change in zip(layout.segments, layout.views(mean)):
            local.anchors[segment.name].grad = change.neg().to(local.anchors[segment.name].dtype)
        local.outer.step()
        local.outer.zero_grad()

    def __repr__(self) -> str:
        options = f", every={self.every!r}"
        options += f", outer={self.outer!r}" if self.outer is not None else ""
        options += ", mask_momentum=True" if self.mask_momentum else ""
        options += f", buffers={self.buffers!r}" if self.buffers != "average" else ""
        return f"DeltaSync({self.channel!r}{options}{self._patterns()})"

    def state_dict(self, stream: int) -> Held:
        local = self._locals.get(stream)
        if local is None:
            return {}
        held = local.channel.state_dict()
        held[_ANCHORS] = {name: anchor.detach() for name, anchor in local.anchors.items()}
        held[_STEPS] = dict.fromkeys(local.anchors, local.steps)
        if local.outer is not None:
            moving = {name: local.outer.state.get(anchor) for name, anchor in local.anchors.items()}
            held[_OUTER] = {name: dict(state) for name, state in moving.items() if state}
        return prefixed(type(self).__name__, held)

    def load_state_dict(self, stream: int, state: Held, parameters: NamedParameters) -> None:
        names = [name for name, _ in parameters]
        held = within(type(self).__name__, state)
        anchors, steps = take(held, _ANCHORS, names), take(held, _STEPS, names)
        local = self._locals[stream] = _Local(copy.deepcopy(self.channel), steps=max(steps.values(), default=0))
        local.channel.load_state_dict(held, names)
        dtype = wide_dtype(parameters)
        self._add_anchors(
            local,
            {
                name: Parameter(anchors[name].to(weight.device, dtype, copy=True))
                for name, weight in parameters
                if name in anchors
            },
        )
        if local.outer is not None:
            for name, moving in take(held, _OUTER, names).items():
                local.outer.state[local.anchors[name]] = {
                    key: value.to(local.anchors[name].device, copy=True) if isinstance(value, Tensor) else value
                    for key, value in moving.items()
                }


def _changes_in(weights: list[Tensor], anchors: list[Tensor]) -> list[Tensor]:
    """What the weights have changed since they were set to the anchors. Takes their place where dtypes are equal:
    they are about to be set anew (by `restore` where the exchange fails), and memory for another model is spared."""
    changes: list[Tensor] = []
    for weight, anchor in zip(weights, anchors):
        if weight.dtype == anchor.dtype:
            changes.append(weight.sub_(anchor))
        else:
            changes.append(weight.to(anchor.dtype) - anchor.to(weight.dtype).to(anchor.dtype))
    return changes


def _outer_optimizer(make: OuterOptimizer, anchors: list[Parameter]) -> Optimizer:
    try:
        outer = make(anchors)
    except Exception as error:
        raise ValueError(
            f"outer must make an optimizer of the {len(anchors)} parameters that it is given; {make!r} raised"
            f" {type(error).__name__}: {error}. Give functools.partial(torch.optim.SGD, lr=0.7), for example."
        ) from error
    if not isinstance(outer, Optimizer):
        raise TypeError(
            f"outer must make a torch optimizer; got {outer!r} from {make!r}. Give functools.partial(torch.optim.SGD,"
            " lr=0.7), for example."
        )
    if isinstance(outer, LBFGS):
        raise TypeError("outer must step by one gradient; got LBFGS, which evaluates several. Use torch.optim.SGD.")
    held = {id(parameter) for group in outer.param_groups for parameter in group["params"]}
    missing = sum(id(anchor) not in held for anchor in anchors)
    if missing or len(held) != len(anchors):
        raise ValueError(
            f"outer must make an optimizer of the parameters that it is given; {type(outer).__name__} lacks"
            f" {missing} of {len(anchors)} and holds {len(held) + missing - len(anchors)} others. Pass its first"
            " argument on, as functools.partial(torch.optim.SGD, lr=0.7) does."
        )
    return outer
