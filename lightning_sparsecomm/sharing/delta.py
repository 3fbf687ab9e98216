"""Ranks train on their own, and exchange the changes of their weights every few optimizer steps."""

from collections.abc import Mapping, Sequence
from typing import get_args

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.basis.arguments import check_booleans, check_one_of
from lightning_sparsecomm.basis.scheduled import Every, check_every, most_every
from lightning_sparsecomm.basis.stream import Stream
from lightning_sparsecomm.channel import AdamMoments, Channel, ClipLocalNorm
from lightning_sparsecomm.channel.momentum import Velocity
from lightning_sparsecomm.sharing.delta_share import DeltaShare
from lightning_sparsecomm.sharing.fragments import FragmentedShare, FragmentOrder, check_fragments, layers_of
from lightning_sparsecomm.sharing.gradients import NamedParameters, wide_dtype
from lightning_sparsecomm.sharing.moments import check_moments, objection_to
from lightning_sparsecomm.sharing.others import Own, all_of
from lightning_sparsecomm.sharing.outer import OuterOptimizer, check_outer, make_outer
from lightning_sparsecomm.sharing.share import Share, Turn
from lightning_sparsecomm.sharing.streamed import Mix, StreamedShare, check_delay
from lightning_sparsecomm.sharing.sync import Buffers, Sync


class DeltaSync(Sync):
    """Exchanges weight changes instead of gradients, after every `every` steps of each rank's own optimizer.

        Δ ← w − anchor, through the channel: memories, exchange, mean over ranks
        anchor ← anchor + mean, or a step of the outer optimizer with −mean as its gradient;   w ← anchor

    Nothing is sent between two exchanges. The model that is validated and saved is the anchor, which is equal on all
    ranks; a rank's own weights come back afterwards, to the bit. When training ends, the steps since the last exchange
    are exchanged. Where weights are narrower than float32, the anchor is float32 and Δ is relative to the rounded
    anchor, so rounding errors are never sent.

    Source: McMahan et al. 2017 (Federated Averaging); Sattler et al. 2018 (Sparse Binary Compression), algorithm 1;
    Douillard et al. 2023 (DiLoCo), for the outer optimizer.

    >>> from functools import partial
    >>> DeltaSync(Channel(DenseAllReduce()), every=50, outer=partial(torch.optim.Adam, lr=1e-3)).every
    50

    Args:
        channel: Memories and exchange; they see Δ instead of gradients.
        every: Optimizer steps between two exchanges, or a schedule of it.
        outer: Makes the optimizer that moves the anchor; None adds the mean.
        mask_momentum: Whether the local optimizer's momentum (SGD's `momentum_buffer`, Adam's `exp_avg`) is set to zero
            wherever this rank sent something.
        buffers: Floating-point buffers, such as running means of batch normalization: "average" averages them with each
            exchange, "own" leaves every rank its own, "broadcast" lets ddp broadcast rank 0's before every forward
            pass.
        parameters: Patterns of the parameters that go through it.
        exclude: Patterns of those that do not.
        min_dimensions: Parameters of fewer dimensions do not go through it.
        rest: Whether all that no other sync takes goes through it, whatever the patterns.
        fragments: In how many parts to exchange them, each every `every` steps, one part after another. Every exchange
            sends one part, so the peak of bytes is lower by as much; several parts while a schedule's `every` is lower.
            Buffers are averaged with the last part.
        fragment_order: Which layers a part has: every P-th of P parts, "strided", or neighbours, "sequential".
        delay: Optimizer steps between the start of an exchange and its use; training goes on meanwhile. 0 waits for it.
            At most `every` − 1, also while a schedule's `every` is lower.
        mix: What becomes of the local weights w then: "keep" what was trained meanwhile; or a number α of
            α·w + (1 − α)·anchor. 0 drops it. It makes no difference without a delay.
        moments: Parts of the local optimizer's state to average too, such as Adam's "exp_avg", each with the number of
            exchanges after which that happens. Those that the optimizer does not keep are left out; one must be there.
        residual_in_weights: Whether a rank trains on from the anchor plus its residual, and not from the anchor alone:
            so its gradients see what it has trained and not sent yet. The channel needs an `ErrorFeedback`; only
            without a delay, and not between nodes. Then replicas differ right after an exchange too.

    Raises:
        ValueError: `every` is not a whole number of at least 1; `buffers` or `fragment_order` is unknown; `fragments`
            is below 1, or more than `every` or the layers; `delay` is negative or not below `every`; `mix` is neither
            "keep" nor in [0, 1); a number of `moments` is below 1; `residual_in_weights` with a delay, or without an
            `ErrorFeedback`.
        TypeError: `outer` is an optimizer instead of a callable that makes one, `channel` is no channel, or `moments`
            no mapping.
    """

    drifts = True
    anchored = True
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
        fragments: int = 1,
        fragment_order: FragmentOrder = "strided",
        delay: int = 0,
        mix: Mix = "keep",
        moments: Mapping[str, int] | None = None,
        residual_in_weights: bool = False,
    ) -> None:
        super().__init__(parameters, exclude, min_dimensions, rest)
        check_every("every", every)
        check_booleans(mask_momentum=mask_momentum, residual_in_weights=residual_in_weights)
        check_one_of("buffers", buffers, get_args(Buffers), "Use 'average', which sends them with each exchange.")
        check_fragments(fragments, fragment_order, most_every(every))
        check_delay(delay, mix, most_every(every))
        check_outer(outer)
        check_moments({} if moments is None else moments)
        if not isinstance(channel, Channel):
            raise TypeError(
                f"channel must be a Channel of an exchange and memories; got {channel!r}. Use"
                " Channel(DenseAllReduce()), for example."
            )
        if any(isinstance(memory, (Velocity, AdamMoments, ClipLocalNorm)) for memory in channel.memories):
            raise ValueError(
                "channel must be without MomentumCorrection, Momentum, LocalAdam and ClipLocalNorm: weight changes hold"
                f" momentum, and come from clipped gradients, already; got {channel!r}. Leave them out."
            )
        if residual_in_weights and (delay or len(channel.residuals) != 1):
            raise ValueError(
                "residual_in_weights must be False with a delay, and without an ErrorFeedback in the channel; got"
                f" delay={delay} and {channel!r}. Leave it out, or use delay=0 and Channel(..., [ErrorFeedback()])."
            )
        self.channel = channel
        self.every = every
        self.outer = outer
        self.mask_momentum = mask_momentum
        self.buffers = buffers
        self.fragments = fragments
        self.fragment_order = fragment_order
        self.delay = delay
        self.mix = mix
        self.moments: Mapping[str, int] = dict(moments or {})
        self.residual_in_weights = residual_in_weights

    def delay_at(self, turn: Turn) -> int:
        """Steps between an exchange that starts then and its use: it arrives before the next one starts."""
        return min(self.delay, turn.every(self.every) - 1)

    def objection(self, optimizer: Optimizer) -> str | None:
        return super().objection(optimizer) or objection_to(optimizer, self.moments)

    def check(self, parameters: NamedParameters) -> None:
        layers = len(set(layers_of(parameters, self.fragments)))
        if parameters and self.fragments > max(1, layers):
            raise ValueError(
                f"fragments must be at most the number of layers, {layers}; got {self.fragments}. Use"
                f" fragments={layers}."
            )
        if self.outer is not None and parameters:
            dtype = wide_dtype(parameters)
            # Of the anchor's shapes, without its memory.
            like = [torch.zeros((), dtype=dtype, device=weight.device).expand(weight.shape) for _, weight in parameters]
            make_outer(self.outer, [Parameter(each) for each in like])

    def start(self, optimizer: Optimizer, parameters: NamedParameters, wire: Wire, own: Own = all_of) -> Share:
        """As of any sync. `own` tells which of the parameters, or of a fragment's, this rank exchanges for its node."""
        stream = Stream(wire)

        def start_fragment(fragment: int, piece: NamedParameters) -> DeltaShare:
            if self.delay:
                return StreamedShare(self, optimizer, piece, wire, fragment, own, stream)
            return DeltaShare(self, optimizer, piece, wire, fragment, own)

        if self.fragments == 1:
            return start_fragment(0, parameters)

        return FragmentedShare(start_fragment, optimizer, parameters, wire, self.fragments, self.fragment_order)

    def __repr__(self) -> str:
        options = f", every={self.every!r}"
        options += f", outer={self.outer!r}" if self.outer is not None else ""
        options += ", mask_momentum=True" if self.mask_momentum else ""
        options += f", buffers={self.buffers!r}" if self.buffers != "average" else ""
        options += f", fragments={self.fragments}" if self.fragments > 1 else ""
        options += f", fragment_order={self.fragment_order!r}" if self.fragment_order != "strided" else ""
        options += f", delay={self.delay}" if self.delay else ""
        options += f", mix={self.mix!r}" if self.mix != "keep" else ""
        options += f", moments={self.moments!r}" if self.moments else ""
        options += ", residual_in_weights=True" if self.residual_in_weights else ""
        return f"DeltaSync({self.channel!r}{options}{self._patterns()})"
