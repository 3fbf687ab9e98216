"""The ledger explains what the network interface counted.

Ranks run in a network namespace of their own, whose loopback device carries nothing else. Where the machine does not
permit that, a warning says so and why. The ledger is always checked against the sizes of tensors too.
"""

import ctypes
import fcntl
import os
import socket
import struct
import threading
import warnings
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import network
from benchmarks.network import Counters
from lightning_sparsecomm.basis.far import FarWire
from lightning_sparsecomm.basis.layout import Layout, Vector
from lightning_sparsecomm.basis.ledger import (
    COMPARISON,
    DDP_BUFFERS,
    DDP_SETUP,
    DDP_UNUSED,
    GRADIENTS,
    LIGHTNING,
    PARAMETERS,
    SETUP,
    Ledger,
)
from lightning_sparsecomm.basis.rounds import Round
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.exchange import BlockReduce, DenseAllReduce, Exchange, Gather, PowerSGD, SketchedTopK
from lightning_sparsecomm.methods import dense
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.distributed.launch import FORK, run_ranks

pytestmark = pytest.mark.filterwarnings("default:the interface's counters")

# The loopback device has no Ethernet headers.
HEADER_BYTES = network.HEADER_BYTES - 14

TOLERANCE = 0.02

# TCP retransmits what it takes for lost, even on loopback. No ledger explains such bytes, so we measure again.
ATTEMPTS = 6


# A separate network namespace ---------------------------------------------------------------------------------------

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1


def _enter_namespace() -> None:
    """Moves this process, and those it forks, into a new network namespace, and starts its loopback device.

    Raises:
        OSError: The machine does not permit it.
    """
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    if unshare is None:
        raise OSError("this system has no network namespaces")
    # Root needs no user namespace. Others may make a network namespace only inside one.
    if unshare(_NEW_NETWORK) and unshare(_NEW_USER | _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        _, flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _GET_FLAGS, request))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def _namespace_main(results: Any, separate: bool, function: Callable[..., Any], args: Any) -> None:
    try:
        if separate:
            _enter_namespace()
        results.put((function(*args), None))
    except BaseException as error:
        results.put((None, f"{type(error).__name__}: {error}"))
    results.close()
    results.join_thread()
    os._exit(0)


def _in_process(separate: bool, function: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    """Runs `function(*args)` in a forked process, with `separate` in a new namespace. Returns its result or failure."""
    results = FORK.Queue()
    process = FORK.Process(target=_namespace_main, args=(results, separate, function, args))
    process.start()
    try:
        return results.get(timeout=60)  # type: ignore[no-any-return]
    finally:
        process.join(1)
        if process.is_alive():
            process.kill()


@pytest.fixture(scope="module")
def namespaces() -> bool:
    """Whether the machine permits network namespaces; warns where it does not."""
    _, failure = _in_process(True, int)
    if failure is not None:
        warnings.warn(
            f"the interface's counters were not read, since a network namespace is not permitted here ({failure}):"
            " the ledger is held against the sizes of tensors only.",
            stacklevel=1,
        )
    return failure is None


# What is compared ---------------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """What one rank's ledger says: link bytes by row, and calls by collective."""

    link_bytes: dict[str, float]
    calls: dict[str, int]

    @classmethod
    def of(cls, ledger: Ledger | None) -> "Sent":
        rows = ledger.rows if ledger is not None else {}
        calls: dict[str, int] = {}
        for row in rows.values():
            for collective, traffic in row.items():
                calls[collective] = calls.get(collective, 0) + traffic.calls
        return cls({row: ledger.link_bytes(row) for row in rows} if ledger is not None else {}, calls)

    def since(self, earlier: "Sent") -> "Sent":
        return Sent(
            {row: count - earlier.link_bytes.get(row, 0) for row, count in self.link_bytes.items()},
            {name: count - earlier.calls.get(name, 0) for name, count in self.calls.items()},
        )


class Span(NamedTuple):
    """What a rank sent, and what the interface counted meanwhile for all ranks."""

    sent: Sent
    counted: Counters


def _payload_bytes(counted: Counters) -> int:
    return counted.sent_bytes - HEADER_BYTES * counted.packets


def _unexplained(spans: list[Span]) -> float:
    """Bytes that the interface counted and no ledger explains, as a fraction of the bytes in all ledgers."""
    world_size = len(spans)
    message_count = sum(
        count * network.messages_of(name, world_size) for span in spans for name, count in span.sent.calls.items()
    )
    payload_bytes = max(_payload_bytes(span.counted) for span in spans) - network.MESSAGE_BYTES * message_count
    return payload_bytes / _ledger_bytes(spans) - 1


def _ledger_bytes(spans: list[Span]) -> float:
    return sum(sum(span.sent.link_bytes.values()) for span in spans)


def _measure(namespaces: bool, function: Callable[..., list[list[Span]]], *args: Any) -> list[list[Span]]:
    """The spans of all ranks, for each part of `function`. It runs again where retransmissions spoil the count.

    They can only add to it. So a run counts if it has none, or if the ledgers explain it all the same.
    """
    for _ in range(ATTEMPTS):
        parts, failure = _in_process(namespaces, function, *args)
        assert failure is None, failure
        disturbed = [
            max(span.counted.repeated for span in spans) and _unexplained(spans) > TOLERANCE for spans in parts
        ]
        if not namespaces or not any(disturbed):
            break
    return parts  # type: ignore[no-any-return]


def _is_explained(spans: list[Span]) -> None:
    error = _unexplained(spans)
    assert abs(error) < TOLERANCE, (
        f"{error:+.2%} of {_ledger_bytes(spans):,.0f} bytes in the ledgers: {[span.sent.link_bytes for span in spans]}"
    )


# The instrument itself ----------------------------------------------------------------------------------------------


def _through_a_connection(length: int) -> Counters:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            before = Counters.read("lo")
            sending = threading.Thread(target=sender.sendall, args=(bytes(length),))
            sending.start()
            arrived = 0
            while arrived < length:
                arrived += len(receiver.recv(2**16))
            sending.join()
            return Counters.read("lo").since(before)


def test_counters_less_headers_are_what_went_through_a_connection(namespaces: bool) -> None:
    for _ in range(ATTEMPTS):
        counted, failure = _in_process(namespaces, _through_a_connection, 10**6)
        assert failure is None, failure
        if not namespaces or not counted.repeated:
            break
    if namespaces:
        assert _payload_bytes(counted) == 10**6


# Collectives and exchanges ------------------------------------------------------------------------------------------

ELEMENTS, NON_ZERO, ROUNDS = 60_000, 6_000, 6
FLOAT_BYTES, ELEMENT_BYTES, PAYLOAD_HEADER_BYTES = 4, 8, 32
TENSORS = [("weight", (ELEMENTS // 100, 90)), ("bias", (ELEMENTS // 10,))]
LAYOUT = Layout(TENSORS)


def _vector(rank: int) -> Tensor:
    """`[ELEMENTS]`, mostly zeros: a payload with room for a fifth of the elements has to be padded."""
    vector = torch.zeros(ELEMENTS)
    vector[torch.arange(NON_ZERO) * 10] = torch.randn(NON_ZERO, generator=torch.Generator().manual_seed(rank))
    return vector


class Traffic(NamedTuple):
    """Something that sends, and the bytes that one rank hands over in a round, computed from the tensors' sizes."""

    sender: Callable[[Wire, Tensor], object] | Exchange
    handed_bytes: int
    gathers: bool = False
    scatters: bool = False

    def send(self, wire: Wire, vector: Tensor, step: int) -> None:
        if isinstance(self.sender, Exchange):
            context = Round(LAYOUT, step, rank=wire.rank, world_size=wire.world_size)
            x = Vector(vector, [True] * len(TENSORS))
            self.sender.prepare(x, context, wire)
            self.sender.exchange(x, context, wire)
            self.sender.commit()
        else:
            self.sender(wire, vector)

    def link_bytes(self, world_size: int) -> float:
        """The bytes that all ranks together put on the link in one round."""
        factor = world_size if self.gathers else 1 if self.scatters else 2
        return factor * (world_size - 1) * self.handed_bytes


def _reduce_in_background(wire: Wire, vector: Tensor) -> None:
    wire.all_reduce_later_(vector.clone())()


# DenseAllReduce sends one more number for each tensor. A Gather's payload is padded to its bound, a fifth of the
# elements and one bit for each tensor (1 byte).
DENSE = ELEMENTS + len(TENSORS)
PADDED_BYTES = PAYLOAD_HEADER_BYTES + ELEMENT_BYTES * ELEMENTS // 5 + 1
TRAFFIC = {
    "all_reduce_": Traffic(lambda wire, vector: wire.all_reduce_(vector.clone()), FLOAT_BYTES * ELEMENTS),
    "all_reduce_later_": Traffic(_reduce_in_background, FLOAT_BYTES * ELEMENTS),
    "all_gather": Traffic(lambda wire, vector: wire.all_gather(vector), FLOAT_BYTES * ELEMENTS, gathers=True),
    "far, all_gather": Traffic(lambda wire, vector: wire.all_gather(vector), FLOAT_BYTES * ELEMENTS, gathers=True),
    # Each rank's whole vector to all; of a longer one, pieces.
    "far, all_reduce_": Traffic(
        lambda wire, vector: wire.all_reduce_(vector.clone()), FLOAT_BYTES * ELEMENTS, gathers=True
    ),
    "far, all_reduce_later_": Traffic(
        lambda wire, vector: wire.all_reduce_later_(vector.repeat(12))(), FLOAT_BYTES * ELEMENTS * 12
    ),
    "all_to_all": Traffic(
        lambda wire, vector: wire.all_to_all(vector.view(wire.world_size, -1)), FLOAT_BYTES * ELEMENTS, scatters=True
    ),
    "dense_float32": Traffic(DenseAllReduce("float32"), 4 * DENSE),
    "dense_float16": Traffic(DenseAllReduce("float16"), 2 * DENSE),
    "dense_bfloat16": Traffic(DenseAllReduce("bfloat16"), 2 * DENSE),
    "top_k": Traffic(Gather(SparseCodec(TopK(0.2))), PADDED_BYTES, gathers=True),
    "sketched_top_k": Traffic(SketchedTopK(0.1, columns=6000, candidates=2), 4 * (5 * 6000 + 2 + 12_000)),
    "power_sgd": Traffic(PowerSGD(30), 4 * (30 * (600 + 90) + ELEMENTS // 10 + 2)),
    # No block of 90 elements is zero.
    "blocks": Traffic(BlockReduce(), 4 * ELEMENTS + (600 + 24 + 2 * 2 + 7) // 8),
}
NOT_QUICK = ("sketched_top_k", "blocks")


def _send_rounds(rank: int, name: str, barrier: Barrier) -> Span:
    traffic, wire, vector = TRAFFIC[name], FarWire(), _vector(rank)
    # So far that a sum of the longer vector takes two round trips rather than more bytes.
    wire.far = 0.4 if name.startswith("far") else 0.0
    # The first round makes the connections.
    traffic.send(wire, vector, 0)
    sent = Sent.of(wire.ledger)
    barrier.wait(30)
    counters = Counters.read("lo")
    barrier.wait(30)
    for step in range(1, ROUNDS + 1):
        traffic.send(wire, vector, step)
    barrier.wait(30)
    counted = Counters.read("lo").since(counters)
    barrier.wait(30)
    return Span(Sent.of(wire.ledger).since(sent), counted)


def _ranks(tmp_path: Path, world_size: int, name: str) -> list[list[Span]]:
    return [run_ranks(tmp_path, world_size, _send_rounds, name, FORK.Barrier(world_size))]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "world_size", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in NOT_QUICK else ()) for name in TRAFFIC]
)
def test_a_round_sends_what_the_ledger_says(tmp_path: Path, namespaces: bool, name: str, world_size: int) -> None:
    (spans,) = _measure(namespaces, _ranks, tmp_path, world_size, name)
    if namespaces:
        _is_explained(spans)
    assert _ledger_bytes(spans) == pytest.approx(ROUNDS * TRAFFIC[name].link_bytes(world_size))


# A whole training run -----------------------------------------------------------------------------------------------

FEATURES, HIDDEN, CLASSES, STEPS, LOGGED = 64, 1000, 10, 6, 10_000
BROADCAST = bytes(range(256)) * 100


class Model(pl.LightningModule):
    """A million parameters, buffers that DDP broadcasts, and collectives of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN),
            nn.BatchNorm1d(HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.BatchNorm1d(HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, CLASSES),
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.all_gather(torch.ones(LOGGED))
        self.trainer.strategy.broadcast(BROADCAST)
        return loss

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        count = 2 * STEPS * 8
        return DataLoader(TensorDataset(torch.randn(count, FEATURES), torch.arange(count) % CLASSES), batch_size=8)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Reader(pl.Callback):
    """Reads ledgers and counters while no rank sends: before fit, after set-up, and after training."""

    def __init__(self, ranks: int) -> None:
        self.barrier = FORK.Barrier(ranks)
        self.results = FORK.SimpleQueue()
        self.sent, self.counters = [Sent.of(None)], [Counters.read("lo")]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.barrier.wait(30)
        self.sent.append(Sent.of(trainer.strategy.ledger))
        self.counters.append(Counters.read("lo"))
        self.barrier.wait(30)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_train_start(trainer, pl_module)
        spans = [
            Span(self.sent[i].since(self.sent[i - 1]), self.counters[i].since(self.counters[i - 1])) for i in (1, 2)
        ]
        self.results.put(spans)


def _fit(tmp_path: Path, strategy: str | Method) -> list[list[Span]]:
    """The spans of the two ranks, for set-up and for training."""
    # Lightning gives advice on workers, devices and logging.
    warnings.simplefilter("ignore")
    reader = Reader(2)
    trainer = pl.Trainer(
        strategy=strategy
        if isinstance(strategy, str)
        else SparseCommStrategy(method=strategy, start_method="fork", find_unused_parameters=True),
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        default_root_dir=tmp_path,
        callbacks=[reader],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model())
    return [list(spans) for spans in zip(reader.results.get(), reader.results.get())]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "strategy",
    ["sparsecomm_dense_fork", "sparsecomm_gradient_dropping_fork", dense()],
    ids=["dense", "gradient_dropping", "dense_find_unused"],
)
def test_the_rows_explain_a_training_run(tmp_path: Path, namespaces: bool, strategy: str | Method) -> None:
    setup, training = _measure(namespaces, _fit, tmp_path, strategy)
    if namespaces:
        _is_explained(setup)
        _is_explained(training)

    model = Model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tensors = len(list(model.parameters()))
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    if strategy == "sparsecomm_gradient_dropping_fork":
        # 16-bit run lengths, room for an escape for every 65,535 zeros, and float32 values.
        elements = round(0.01 * parameters)
        escapes = (parameters - elements) // 65_535
        payload_bytes = PAYLOAD_HEADER_BYTES + 6 * elements + 2 * escapes + (tensors + 7) // 8
        gradient_bytes = payload_bytes
    else:
        # In an all-reduce of two ranks, each sends as many bytes as it hands over.
        gradient_bytes = FLOAT_BYTES * parameters
    expected = {GRADIENTS: gradient_bytes, DDP_BUFFERS: buffer_bytes / 2}
    # Once, before the first step, the run's length and whether it may end sooner; and once, after the last, what
    # residuals still hold.
    once = {SETUP: 16} | ({PARAMETERS: FLOAT_BYTES * parameters} if gradient_bytes < FLOAT_BYTES * parameters else {})
    if isinstance(strategy, Method):
        expected[DDP_UNUSED] = FLOAT_BYTES * tensors
    for before, during in zip(setup, training):
        assert before.sent.link_bytes[DDP_SETUP] == (FLOAT_BYTES * parameters + buffer_bytes) / 2
        rows = {row: count for row, count in during.sent.link_bytes.items() if count}
        # In each step: a gathered tensor, half a broadcast, and a few bytes of Lightning itself.
        users_bytes = FLOAT_BYTES * LOGGED + len(BROADCAST) / 2
        assert rows.pop(LIGHTNING) == pytest.approx(STEPS * users_bytes, rel=0.01)
        # Once, at the end of training: both ranks gather a digest of all weights.
        assert rows.pop(COMPARISON) == 32
        assert rows == {row: STEPS * count for row, count in expected.items()} | once
