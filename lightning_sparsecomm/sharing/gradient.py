"""Gradients exchanged once per optimizer step, and written back to `.grad`."""

import copy
from collections.abc import Sequence

from torch.optim import LBFGS, SGD, Optimizer

from lightning_sparsecomm.basis import Layout, Wire
from lightning_sparsecomm.basis.arguments import check_booleans, check_one_of, is_whole_number
from lightning_sparsecomm.basis.schedules import Every, check_every
from lightning_sparsecomm.channel import (
    EF21,
    AdamMoments,
    Channel,
    ClipLocalNorm,
    LocalAdam,
    Momentum,
    MomentumCorrection,
    SharedSign,
)
from lightning_sparsecomm.exchange import SparseExchange
from lightning_sparsecomm.sharing.gradient_share import GradientShare
from lightning_sparsecomm.sharing.gradients import NamedParameters
from lightning_sparsecomm.sharing.late import LateShare
from lightning_sparsecomm.sharing.local_mode import LOCAL_MODES, SharedName
from lightning_sparsecomm.sharing.local_steps import LocalStepsShare
from lightning_sparsecomm.sharing.sync import Sync

# Memories after which what is shared is not the mean of what ranks have sent.
_SHARING_OTHERS = (AdamMoments, EF21, SharedSign)


class GradientSync(Sync):
    """Exchanges gradients through a channel once per optimizer step, when the shared gradient is first needed.

    Until then, every rank's gradients stay its own: several backward passes, accumulation and unused parameters need no
    special care, and a memory takes in exactly what the optimizer consumes.

    >>> GradientSync(Channel(DenseAllReduce("bfloat16")), exclude=["*.bias"]).shares_gradients
    True

    Args:
        channel: Memories and exchange.
        parameters: Patterns of the parameters that go through it.
        exclude: Patterns of those that do not.
        min_dimensions: Parameters of fewer dimensions do not go through it.
        rest: Whether all that no other sync takes goes through it, whatever the patterns.
        local: What the optimizer sees of a rank's own gradient; see `LocalMode`. All but "none" let replicas drift.
        mask_momentum: Whether the optimizer's own momentum (SGD's `momentum_buffer`, Adam's `exp_avg`) is set to zero
            wherever the shared gradient holds something that was sent; with local gradients, what this rank sent.
        sparse: Whether it takes exactly the matching parameters whose gradients are sparse tensors (layers with
            `sparse=True`), which stay sparse for the optimizer. Otherwise it takes exactly the others.
        few_rows: Whether it takes exactly the tables of embeddings whose gradients have few rows that are not zero, as
            ranks find together in the first step; False leaves these to another sync, None takes both kinds.
        finish: Whether what residuals still hold after the last step is exchanged whole, once, and moves the weights as
            SGD would. Without effect where the residual does not follow the learning rate, or where replicas drift.
        delay: 1 exchanges during the next forward and backward pass, for which this rank's own gradient stands in for
            the mean; the next step uses the result. 0 waits for it.
        every: Optimizer steps between two exchanges, or a schedule of it. In between, a rank steps along its own
            gradients, which the next exchange puts together; with `LocalAdam` and more than 4 ranks, by a part of these
            steps where gradients are mostly noise.
        residual_in_weights: Whether a rank computes its gradients at the shared weights plus all that it has not sent
            yet, and not only its steps since the last exchange. In the mean over ranks, these are the weights that
            sending everything would give; with `LocalAdam` and more than 4 ranks, only a part of the residual may
            count. Takes the memory of two more models with every=1.

    Raises:
        ValueError: Unknown `local`; `sparse` with memories, a local mode, or an exchange of dense vectors only;
            `delay` other than 0 and 1; `every` below 1; `delay=1` together with `every` or `residual_in_weights`; any
            of these three with sparse gradients, a local mode, masked momentum, momentum after the exchange, or no
            residual; `residual_in_weights` with a residual that does not follow the learning rate.
    """

    def __init__(
        self,
        channel: Channel,
        parameters: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        min_dimensions: int = 0,
        rest: bool = False,
        local: SharedName = "none",
        mask_momentum: bool = False,
        sparse: bool = False,
        finish: bool = True,
        delay: int = 0,
        every: Every = 1,
        residual_in_weights: bool = False,
        few_rows: bool | None = None,
    ) -> None:
        super().__init__(parameters, exclude, min_dimensions, rest)
        check_booleans(mask_momentum=mask_momentum, sparse=sparse, finish=finish)
        if few_rows is not None:
            check_booleans(few_rows=few_rows)
        if not isinstance(channel, Channel):
            raise TypeError(f"channel must be a Channel; got {channel!r}. Use Channel(DenseAllReduce()), for example.")
        check_one_of(
            "local", local, LOCAL_MODES, "The paper's 'error' is 'partial' in a channel without ErrorFeedback."
        )
        if sparse and (channel.memories or not isinstance(channel.exchange, SparseExchange) or local != "none"):
            raise ValueError(
                "sparse=True needs a channel without memories, which are dense, an exchange that takes sparse vectors,"
                f" such as BlockReduce(), and local='none'; got {channel!r} and local={local!r}."
            )
        if (local != "none" or mask_momentum) and any(isinstance(each, _SHARING_OTHERS) for each in channel.memories):
            raise ValueError(
                "local must be 'none' and mask_momentum False with LocalAdam, EF21 and SharedSign, after which ranks"
                " share directions, estimates and signs, not what they have sent; got"
                f" local={local!r} and mask_momentum={mask_momentum!r}. Use a channel without them."
            )
        self.takes_sparse: bool | None = sparse
        self.takes_few_rows = few_rows
        self.channel = channel
        self.local = local
        self.mask_momentum = mask_momentum
        self.finish = finish
        self._when(delay, every, residual_in_weights)

    def at(self, delay: int, every: Every = 1, residual_in_weights: bool = False) -> "GradientSync":
        """The same sync with other steps along a rank's own gradients; errors as for the constructor."""
        sync = copy.copy(self)
        sync._when(delay, every, residual_in_weights)
        return sync

    def _when(self, delay: int, every: Every, residual_in_weights: bool) -> None:
        check_booleans(residual_in_weights=residual_in_weights)
        if not is_whole_number(delay) or delay not in (0, 1):
            raise ValueError(
                f"delay must be 0 or 1, in optimizer steps; got {delay!r}. Use 1 for an exchange in flight."
            )
        check_every("every", every)
        if delay and every != 1:
            raise ValueError(f"every must be 1 with delay=1, whose exchange takes a step; got {every!r}. Use delay=0.")
        if residual_in_weights and (delay or not all(each.follow_rate for each in self.channel.residuals)):
            raise ValueError(
                "residual_in_weights must be False with delay=1, and where a residual does not follow the learning rate"
                f", and so is no change of weights; got delay={delay!r} and {self.channel!r}. Use delay=0 and"
                " follow_rate=True."
            )
        self.delay, self.every, self.residual_in_weights = delay, every, residual_in_weights
        if option := self._steps_alone:
            if self.takes_sparse or self.local != "none" or self.mask_momentum:
                raise ValueError(
                    f"{option.split('=')[0]} must be left out with sparse gradients, a local mode, or masked momentum,"
                    f" which belong to the step that computed the gradient; got {option}."
                )
            after = any(isinstance(each, (Momentum, SharedSign)) for each in self.channel.memories)
            if after or not self.channel.residuals:
                raise ValueError(
                    f"{option} needs a channel with ErrorFeedback, without SharedSign, and momentum before the"
                    " exchange, which tell what a rank's own gradient would do; got"
                    f" {self.channel!r}. Use [MomentumCorrection(), ErrorFeedback()]."
                )
        self.anchored = bool(self._steps_alone)
        self.drifts = LOCAL_MODES[self.local].drifts or self.anchored

    @property
    def _steps_alone(self) -> str:
        """The option by which a rank steps along its own gradients; empty for none."""
        if self.delay:
            return f"delay={self.delay}"
        return f"every={self.every}" if self.every != 1 else "residual_in_weights=True" * self.residual_in_weights

    def objection(self, optimizer: Optimizer) -> str | None:
        if isinstance(optimizer, LBFGS):
            return (
                "it evaluates the gradient several times per step, so a residual would count it more than once. Use"
                " methods.dense() or methods.federated_averaging(), or a first-order optimizer."
            )
        objection = self.channel.objection(optimizer)
        if objection is None and (option := self._steps_alone) and not self._can_step_alone(optimizer):
            return (
                f"with {option}, a step must be the learning rate times what is shared, and that of"
                f" {type(optimizer).__name__} depends on its own momentum or moments. Use methods.dgc({option}) for"
                f" SGD, methods.local_adam({option}) for Adam and AdamW, or leave {option.split('=')[0]} out."
            )
        return objection

    def _can_step_alone(self, optimizer: Optimizer) -> bool:
        """Whether a step is the learning rate times what is shared, and nothing else."""
        if any(isinstance(memory, (MomentumCorrection, LocalAdam)) for memory in self.channel.memories):
            return True
        return isinstance(optimizer, SGD) and not any(group["momentum"] for group in optimizer.param_groups)

    def follows_rate(self, optimizer: Optimizer) -> bool:
        """Whether residuals are in units of the learning rate, by which an optimizer multiplies what is shared."""
        multiplies = isinstance(optimizer, SGD) or any(isinstance(each, LocalAdam) for each in self.channel.memories)
        return multiplies and any(each.follow_rate for each in self.channel.residuals)

    def finishes(self, optimizer: Optimizer) -> bool:
        """Whether what waits after an optimizer's last step is exchanged, once, and moves the weights."""
        return self.finish and self.follows_rate(optimizer) and (self.anchored or not self.drifts)

    def check(self, parameters: NamedParameters) -> None:
        objection = self.channel.exchange.objection(Layout.of(parameters))
        if objection is not None:
            raise ValueError(objection)

    def joining(self, clip: ClipLocalNorm | None, momentum: Momentum | None) -> Sync:
        if self.takes_sparse or self.local != "none" or self.mask_momentum:
            raise ValueError(
                "a sync of sparse gradients, with a local mode, or that masks the optimizer's momentum leaves both to"
                " the optimizer. Give these parameters an optimizer of their own."
            )
        if (option := self._steps_alone) and momentum is not None:
            raise ValueError(
                f"with {option}, momentum comes before the exchange. Add MomentumCorrection() to its channel."
            )
        sync = copy.copy(self)
        # What is shared reaches momentum last: memories commit in reverse.
        memories = [memory for memory in (clip, momentum, *self.channel.memories) if memory is not None]
        sync.channel = Channel(self.channel.exchange, memories)
        return sync

    def start(self, optimizer: Optimizer, parameters: NamedParameters, wire: Wire) -> GradientShare:
        if self.every != 1 or self.residual_in_weights:
            return LocalStepsShare(self, optimizer, parameters, wire)
        return (LateShare if self.delay else GradientShare)(self, optimizer, parameters, wire)

    def __repr__(self) -> str:
        options = f", local={self.local!r}" if self.local != "none" else ""
        options += ", mask_momentum=True" if self.mask_momentum else ""
        options += ", sparse=True" if self.takes_sparse else ""
        options += "" if self.takes_few_rows is None else f", few_rows={self.takes_few_rows}"
        options += "" if self.finish else ", finish=False"
        options += f", delay={self.delay}" if self.delay else ""
        options += f", every={self.every!r}" if self.every != 1 else ""
        options += ", residual_in_weights=True" if self.residual_in_weights else ""
        return f"GradientSync({self.channel!r}{self._patterns()}{options})"
