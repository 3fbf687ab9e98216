"""The laws of memories, checked in a channel on several ranks."""

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from lightning_sparsecomm.basis.layout import Layout
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import Channel, ClipLocalNorm, Memory
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.exchange import Gather
from lightning_sparsecomm.testing import rounds
from lightning_sparsecomm.testing.laws import check_close, check_factory, equal_bits, law, load_kernels
from lightning_sparsecomm.testing.ranks import run_ranks
from lightning_sparsecomm.testing.rounds import Outcome, State
from lightning_sparsecomm.testing.samples import LAYOUT


def check_memory(memory_factory: Callable[[], Memory], world_size: int = 2, timeout: float = 60) -> None:
    """Checks the laws of a memory, alone in a channel and after `ClipLocalNorm`.

    `abort` restores, to round-off, what the memory held before `prepare`. A memory that is saved and loaded goes on to
    the bit. A tensor without a gradient on any rank keeps what is held for it, and so do all tensors when others join.
    Gradients are not changed. What is shared is equal on all ranks, to the bit, also where `commit` replaces it.

    >>> check_memory(ErrorFeedback)

    Args:
        memory_factory: Makes the memory; called several times on each rank.
        world_size: Number of ranks.
        timeout: Seconds until the ranks must have finished.

    Raises:
        AssertionError: A law is violated.
        TypeError: `memory_factory` makes no memory.
    """
    check_factory("memory_factory", memory_factory, Memory, "held")
    load_kernels()
    ranks: list[list[Outcome]] = run_ranks(world_size, _on_rank, memory_factory, timeout=timeout)
    for step, outcomes in enumerate(zip(*ranks)):
        for rank, outcome in enumerate(outcomes):
            law(
                equal_bits(outcome.shared, outcomes[0].shared),
                "commit must replace Exchanged.shared equally on all ranks; ranks 0 and"
                f" {rank} differ in round {step % rounds.ROUNDS}",
            )


def _on_rank(rank: int, factory: Callable[[], Memory]) -> list[Outcome]:
    wire, outcomes = Wire(), []
    for chain in (lambda: [factory()], lambda: [ClipLocalNorm(0.3), factory()]):
        outcomes += _check(chain, wire)
    return outcomes


def _channel(memories: Sequence[Memory]) -> Channel:
    return rounds.bound(Gather(SparseCodec(TopK(0.25))), memories)


def _check(chain: Callable[[], list[Memory]], wire: Wire) -> list[Outcome]:
    channel, undisturbed, outcomes = _channel(chain()), _channel(chain()), []
    for step in range(rounds.ROUNDS):
        where = f"on rank {wire.rank} in round {step} of {chain()!r}"
        before = rounds.saved(channel)
        for exchanges in (False, True):
            rounds.prepare_another(channel, step, wire)
            if exchanges:
                channel.run()
            channel.abort()
            sentence = "abort must leave what is held as it was before prepare"
            rounds.check_equal(before, rounds.saved(channel), sentence, where, rounds.ROUND_OFF)
        again = rounds.resumed(undisturbed, _channel(chain()))

        gradients = rounds.gradients_of(wire.rank, step, wire.world_size)
        settings = rounds.settings_of(gradients)
        before = rounds.saved(channel)
        outcomes.append(rounds.reduced(channel, step, wire, settings))
        expected = rounds.reduced(undisturbed, step, wire, settings)
        sentence = "after an abort, a round must give what it would have given without it"
        check_close(outcomes[-1].shared, expected.shared, 1e-3, sentence, where)
        law(
            equal_bits(rounds.reduced(again, step, wire, settings).shared, expected.shared),
            "a memory that was saved and loaded must go on as one that was not, to the bit; what is shared differs"
            f" {where}",
        )
        if step == 2:
            name = rounds.NAMES[rounds.ABSENT_ON_ALL]
            old, new = (_of(state, {name}) for state in (before, rounds.saved(channel)))
            rounds.check_equal(old, new, "a tensor without a gradient must keep what is held for it", where)
    _check_gradients(channel, wire)
    before = rounds.saved(channel)
    grown = Layout([("first", (2,)), *((segment.name, segment.shape) for segment in LAYOUT.segments), ("last", (3,))])
    channel.bind(grown, channel.dtype, channel.device)
    after = _of(rounds.saved(channel), set(rounds.NAMES))
    rounds.check_equal(
        _of(before, set(rounds.NAMES)), after, "bind must keep what is held when tensors join", f"in {chain()!r}"
    )
    return outcomes


def _of(state: State, names: Collection[str]) -> State:
    """The state of some parameters."""
    return {kind: {name: held[name] for name in held if name in names} for kind, held in state.items()}


def _check_gradients(channel: Channel, wire: Wire) -> None:
    gradients = rounds.gradients_of(wire.rank, 0, wire.world_size)
    copies: list[Tensor | None] = [None if part is None else part.clone() for part in gradients]
    channel.reduce(gradients, rounds.context_of(0, wire), wire, rounds.settings_of(gradients))
    for name, part, copy in zip(rounds.NAMES, gradients, copies):
        assert part is not None and copy is not None
        law(equal_bits(part, copy), f"a memory must not change gradients, but that of {name!r} is another one")
