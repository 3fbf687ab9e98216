"""The laws of exchanges, checked on several ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparsecomm.basis.ledger import GRADIENTS, Ledger
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.exchange import Exchange, NonFiniteGradientError
from lightning_sparsecomm.testing import rounds
from lightning_sparsecomm.testing.laws import check_close, check_factory, equal_bits, law, load_kernels
from lightning_sparsecomm.testing.ranks import run_ranks
from lightning_sparsecomm.testing.rounds import Outcome
from lightning_sparsecomm.testing.samples import LAYOUT


def check_exchange(
    exchange_factory: Callable[[], Exchange],
    world_size: int = 3,
    tolerance: float | None = 1e-5,
    timeout: float = 60,
) -> None:
    """Checks the laws of an exchange on several ranks.

    What is shared is equal on all ranks, to the bit, and is the mean of what ranks sent. With error feedback, what a
    rank has sent plus what it holds is the sum of its own gradients. A tensor without a gradient on a rank sends
    nothing there. A gradient that is not finite raises `NonFiniteGradientError` on all ranks. After that, and after
    any `abort`, exchange and memory are as before. An exchange that is saved and loaded goes on to the bit. The ledger
    has every collective, with its bytes.

    >>> check_exchange(DenseAllReduce, world_size=2)

    Args:
        exchange_factory: Makes the exchange; called several times on each rank, and must not communicate.
        world_size: Number of ranks.
        tolerance: How far what is shared may be from the mean of what ranks sent, relative to the largest magnitude;
            None for an exchange that estimates this mean.
        timeout: Seconds until the ranks must have finished.

    Raises:
        AssertionError: A law is violated.
        TypeError: `exchange_factory` makes no exchange.
        ValueError: The exchange cannot take the tensors that the laws are checked on.
    """
    check_factory("exchange_factory", exchange_factory, Exchange)
    objection = exchange_factory().objection(LAYOUT)
    if objection is not None:
        raise ValueError(f"exchange_factory must make an exchange for {LAYOUT}; this one objects: {objection}")
    load_kernels()
    ranks: list[list[Outcome]] = run_ranks(world_size, _on_rank, exchange_factory, timeout=timeout)
    for step, outcomes in enumerate(zip(*ranks)):
        _check_round(step, outcomes, tolerance)


def _check_round(step: int, outcomes: Sequence[Outcome], tolerance: float | None) -> None:
    where = f"in round {step} of {len(outcomes)} ranks"
    gradients = [rounds.gradients_of(rank, step, len(outcomes)) for rank in range(len(outcomes))]
    expected = [any(part is not None for part in parts) for parts in zip(*gradients)]
    shared = outcomes[0].shared
    for rank, outcome in enumerate(outcomes):
        law(
            outcome.present == expected,
            f"Exchanged.present must say which tensors have a gradient on any rank, {expected}; rank {rank} has"
            f" {outcome.present} {where}",
        )
        law(
            equal_bits(outcome.shared, shared),
            f"Exchanged.shared must be equal on all ranks, to the bit; ranks 0 and {rank} differ {where}",
        )
    if tolerance is not None:
        mean = torch.stack([outcome.sent for outcome in outcomes]).mean(0)
        check_close(
            shared,
            mean,
            tolerance,
            "Exchanged.shared must be the mean of what ranks sent, which all_reduce_ overwrites",
            where,
        )
    for here, part, name in zip(expected, LAYOUT.views(shared), rounds.NAMES):
        law(here or not part.any(), f"{name!r} has no gradient on any rank, but its part of shared is not 0 {where}")


def _on_rank(rank: int, factory: Callable[[], Exchange]) -> list[Outcome]:
    wire = Wire()
    with _Collectives(wire.rank) as collectives:
        outcomes = _check_sums(factory, wire, torch.float32)
        _check_sums(factory, wire, torch.float64)
        for memories in ([], [ErrorFeedback()]):
            _check_failures(factory, memories, wire)
            _check_resume(factory, memories, wire)
    collectives.check(wire.ledger)
    return outcomes


def _check_sums(factory: Callable[[], Exchange], wire: Wire, dtype: torch.dtype) -> list[Outcome]:
    """Sent plus held is what was taken in."""
    channel, outcomes = rounds.bound(factory(), [ErrorFeedback()], dtype), []
    taken = torch.zeros(LAYOUT.size, dtype=dtype)
    sent = torch.zeros_like(taken)
    for step in range(rounds.ROUNDS):
        where = f"on rank {wire.rank} in round {step}, {dtype}"
        gradients = rounds.gradients_of(wire.rank, step, wire.world_size, dtype)
        for view, gradient in zip(LAYOUT.views(taken), gradients):
            if gradient is not None:
                view.add_(gradient)
        outcomes.append(rounds.reduced(channel, step, wire))
        for what, vector in (("shared", outcomes[-1].shared), ("sent", outcomes[-1].sent)):
            law(
                vector.dtype == dtype and vector.shape == (LAYOUT.size,),
                f"Exchanged.{what} must be [{LAYOUT.size}] {dtype}, as x.values is; got {list(vector.shape)}"
                f" {vector.dtype} {where}",
            )
        for part, gradient, name in zip(LAYOUT.views(outcomes[-1].sent), gradients, rounds.NAMES):
            law(
                gradient is not None or channel.exchange.sums_pieces or not part.any(),
                f"{name!r} has no gradient and must send nothing, but Exchanged.sent is not 0 there {where}",
            )
        sent += outcomes[-1].sent
        held = channel.memories[0].held["residual"].flat
        sentence = "what was sent plus what is held must be what was taken in"
        check_close(sent + held, taken, rounds.ROUND_OFF, sentence, where)
    return outcomes


def _check_failures(factory: Callable[[], Exchange], memories: list[ErrorFeedback], wire: Wire) -> None:
    """Rounds that fail leave all as before, and the rounds after them give what they would have given."""
    undisturbed, channel = rounds.bound(factory(), memories), rounds.bound(factory(), memories)
    for step in range(rounds.ROUNDS):
        before = rounds.saved(channel)
        for failure, what in (
            (_abort_prepared, "a round that was aborted before the exchange"),
            (_abort_exchanged, "a round that was aborted after the exchange"),
            (_meet_nonfinite, "a round with a gradient that is not finite"),
        ):
            failure(channel, step, wire)
            sentence, where = f"{what} must leave all as before", f"on rank {wire.rank} before round {step}"
            rounds.check_equal(before, rounds.saved(channel), sentence, where, rounds.ROUND_OFF if memories else 0.0)
        outcome, expected = rounds.reduced(channel, step, wire), rounds.reduced(undisturbed, step, wire)
        sentence = "after rounds that failed, a round must give what it would have given without them"
        where = f"on rank {wire.rank} in round {step}"
        if memories:
            check_close(outcome.shared, expected.shared, 1e-3, sentence, where)
        else:
            law(equal_bits(outcome.shared, expected.shared), f"{sentence}, to the bit, {where}")


def _abort_prepared(channel: Channel, step: int, wire: Wire) -> None:
    rounds.prepare_another(channel, step, wire)
    channel.abort()


def _abort_exchanged(channel: Channel, step: int, wire: Wire) -> None:
    rounds.prepare_another(channel, step, wire)
    channel.run()
    channel.abort()


def _meet_nonfinite(channel: Channel, step: int, wire: Wire) -> None:
    gradients: list[Tensor | None] = rounds.gradients_of(wire.rank, 0, wire.world_size)
    if wire.rank == wire.world_size - 1:
        gradients[1] = torch.full(LAYOUT.segments[1].shape, (float("nan"), float("inf"))[step % 2])
    try:
        channel.reduce(gradients, rounds.context_of(step, wire, dtype=channel.dtype), wire)
    except NonFiniteGradientError:
        return
    raise AssertionError(
        f"a gradient of rank {wire.world_size - 1} is not finite, and all ranks must raise NonFiniteGradientError;"
        f" rank {wire.rank} did not, in round {step}."
    )


def _check_resume(factory: Callable[[], Exchange], memories: list[ErrorFeedback], wire: Wire) -> None:
    channel = rounds.bound(factory(), memories)
    for step in range(rounds.ROUNDS):
        again = rounds.resumed(channel, rounds.bound(factory(), memories))
        expected = rounds.reduced(channel, step, wire)
        law(
            equal_bits(rounds.reduced(again, step, wire).shared, expected.shared),
            f"an exchange that was saved and loaded before round {step} must go on as one that was not, to the bit;"
            f" what is shared differs on rank {wire.rank}",
        )


class _Collectives(TorchDispatchMode):
    """Counts the calls of collectives, by whomever, and the bytes in the tensors that are handed to them."""

    # Which argument is handed over.
    _HANDED = {"allreduce_": 0, "broadcast_": 0, "_allgather_base_": 1, "allgather_": 1, "alltoall_base_": 1}  # noqa: RUF012

    def __init__(self, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rank = rank
        self.names: list[str] = []
        self.handed_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            self.names.append(name)
            handed = args[self._HANDED[name]] if name in self._HANDED else []
            for tensor in handed if isinstance(handed, (list, tuple)) else [handed]:
                self.handed_bytes += tensor.numel() * tensor.element_size()
            if name == "alltoall_base_" and args[4]:
                # Of parts of any length, a rank hands none to itself.
                self.handed_bytes -= args[4][self._rank] * args[1].element_size()
        return func(*args, **(kwargs or {}))

    def check(self, ledger: Ledger) -> None:
        calls = sum(traffic.calls for row in ledger.rows.values() for traffic in row.values())
        handed_bytes = sum(ledger.handed_bytes(row) for row in ledger.rows)
        law(
            (calls, handed_bytes) == (len(self.names), self.handed_bytes),
            f"the ledger must have every collective: it has {calls} calls with {handed_bytes} bytes, but"
            f" {len(self.names)} calls with {self.handed_bytes} bytes were made ({', '.join(sorted(set(self.names)))})."
            " Communicate by the methods of the wire only",
        )
        others = sorted(set(ledger.rows) - {GRADIENTS})
        law(not others, f"an exchange must enter its calls in the wire's own row; it entered some in {others}")
