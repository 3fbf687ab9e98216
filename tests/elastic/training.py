"""A small training on one replica, which can be stopped, or killed, at any place."""

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparsecomm.channel import Channel
from lightning_sparsecomm.elastic import streams
from lightning_sparsecomm.elastic.quorum import Quorum, load_torchft
from lightning_sparsecomm.elastic.rounds import Rounds
from lightning_sparsecomm.elastic.streams import Sending
from lightning_sparsecomm.elastic.turns import ElasticTurns
from lightning_sparsecomm.elastic.wire import ElasticWire, LostPeerError
from lightning_sparsecomm.exchange import gather
from lightning_sparsecomm.sharing.delta_share import DeltaShare
from lightning_sparsecomm.sharing.gradient_share import GradientShare
from lightning_sparsecomm.strategies.pytorch_lightning import ElasticSparseCommStrategy
from tests.distributed.launch import QUIET
from tests.elastic.flying import BOOKS
from tests.elastic.replicas import TIMEOUTS
from tests.elastic.weighing import SCALE

EXCHANGES = ("weight updates", "gradients")


class Model(pl.LightningModule):
    """It has buffers and a schedule. At each of its `stops`, counted in steps, it says so, and waits for a word.

    Args:
        pipe: To the test.
        seed: Of its own first weights, which differ from those of other replicas.
        stops: Steps after which it waits.
        width: Of its hidden layer.
    """

    def __init__(self, pipe: Connection, seed: int, stops: tuple[int, ...] = (), width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.network = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 3))
        self.pipe, self.stops = pipe, stops
        self.began_with: float | None = None
        self.moments = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.network(batch) - batch[:, :3].sin()).square().mean()

    def on_train_epoch_start(self) -> None:
        # The strategy has met others by now.
        if self.began_with is None:
            state = self.trainer.strategy.engine.state.state_dict()  # type: ignore[attr-defined]
            held = [stream["held"].get("DeltaSync.ErrorFeedback", {}) for stream in state["streams"]]
            self.began_with = sum(float(tensor.abs().sum()) for parts in held for tensor in parts.values())
            moments = [each.get("exp_avg") for each in self.trainer.optimizers[0].state.values()]
            self.moments = sum(float(each.abs().sum()) for each in moments if each is not None)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step in (*self.stops, *STOPS):
            self.pipe.send(("told", self.trainer.global_step))
            self.pipe.recv()
            PASSED.append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TwoOptimizers(Model):
    """It steps two optimizers by itself."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first, *others = self.network
        rest = [parameter for module in others for parameter in module.parameters()]
        return torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.Adam(rest, lr=0.01)


class Recorder(ModelCheckpoint):
    """Notes which files this replica has written."""

    def __init__(self, written: list[str], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._written = written

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        before = os.path.exists(filepath)
        super()._save_checkpoint(trainer, filepath)
        if trainer.strategy.turns.leads and not before:  # type: ignore[attr-defined]
            assert os.path.exists(filepath)
            self._written.append(os.path.basename(filepath))


def train(
    pipe: Connection,
    address: str,
    name: str,
    seed: int,
    method: Any,
    stops: tuple[int, ...] = (),
    before: Callable[[], None] = lambda: None,
    width: int = 16,
    save: str | None = None,
    ckpt_path: str | None = None,
    two: bool = False,
    kind: type[Model] = Model,
    adapt_steps: bool = False,
    check_replicas_every: int | None = 1000,
    membership_log: str | None = None,
    save_every: int | None = None,
    batch_size: int = 8,
    log_each_replica: bool = False,
    local_state_dir: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains, and returns what the replica ends with. `before` is called first, to alter what is to be altered."""
    PIPE.append(pipe)
    said = _Said()
    logging.getLogger("pytorch_lightning").addHandler(said)
    before()
    torch.manual_seed(seed)
    batches = DataLoader(torch.randn(10 * batch_size, 6), batch_size=batch_size)
    model = (TwoOptimizers if two else kind)(pipe, seed, stops, width)
    written: list[str] = []
    strategy = ElasticSparseCommStrategy(
        method,
        lighthouse=address,
        replica=name,
        adapt_steps=adapt_steps,
        check_replicas_every=check_replicas_every,
        membership_log=membership_log,
        log_each_replica=log_each_replica,
        local_state_dir=local_state_dir,
        **TIMEOUTS,
    )
    if save is not None:
        folder, _, filename = save.rpartition("/")
        when: dict[str, int] = {"every_n_train_steps": save_every} if save_every else {"every_n_epochs": 1}
        options["callbacks"] = [Recorder(written, folder, filename=filename, save_top_k=-1, **when)]
    # By default, an epoch of each replica has all samples: so tests know how many steps it makes.
    alone = {"max_epochs": 6, "use_distributed_sampler": False}
    options = {**alone, "devices": 1, "enable_checkpointing": save is not None, **QUIET, **options}
    trainer = pl.Trainer(strategy=strategy, **options)
    trainer.fit(model, batches, ckpt_path=ckpt_path)
    assert strategy.turns is not None and strategy.ledger is not None
    return {
        "weights": {name: tensor.numpy() for name, tensor in model.state_dict().items()},
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "changes": [change._asdict() for change in strategy.turns.membership.changes],
        "round": strategy.turns.round,
        "handed": {row: strategy.ledger.handed_bytes(row) for row in strategy.ledger.rows},
        "written": written,
        "began_with": model.began_with,
        "moments": model.moments,
        "law": LAW.error() if LAW.taken is not None else None,
        "flights": BOOKS.report(),
        "scale": SCALE.said,
        "said": said.lines,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


class _Said(logging.Handler):
    """Notes what users are told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def equal(results: list[dict[str, Any]]) -> bool:
    """Whether replicas have ended with the same bits, at the same step."""
    first = results[0]
    return all(
        each["steps"] == first["steps"]
        and all(np.array_equal(each["weights"][name], value) for name, value in first["weights"].items())
        for each in results
    )


def equal_but_for_steps(results: list[dict[str, Any]]) -> bool:
    """Whether all end with the same bits, though some have made fewer steps of their own."""
    for result in results:
        # Batch normalization counts each replica's own batches.
        del result["weights"]["network.1.num_batches_tracked"]
    return equal([result | {"steps": 0} for result in results])


def check_resumed(results: list[dict[str, Any]], steps: int) -> None:
    """Replicas that have resumed end alike, and only the one that leads began with the residual that was saved."""
    assert equal(results)
    assert results[0]["steps"] == steps
    first, *others = [each["began_with"] for each in results]
    assert first > 0
    assert not any(others)


class _Law:
    """What one replica has taken in by its weight in the mean, has sent, and holds: sent + held = taken in."""

    def __init__(self) -> None:
        self.taken: Tensor | None = None
        self.sent: Tensor | None = None
        self.channel: Channel | None = None

    def watch(self) -> None:
        """Adds up all that is committed from now on, in this process."""
        commit, commit_channel, commit_gradients = DeltaShare.commit, Channel.commit, GradientShare.commit
        self.taken = self.sent = torch.zeros(())

        def committed(share: DeltaShare) -> None:
            # Kernels are compiled by taking steps on small stand-ins.
            if isinstance(share.wire, ElasticWire):
                # In a turn, the weights hold their changes.
                changes = torch.cat([change.flatten().double() for change, _ in share._starts.changed])
                self.taken = self.taken + changes * share.weight
                self.channel = share.channel
            commit(share)

        def committed_gradients(share: GradientShare) -> None:
            if isinstance(share.wire, ElasticWire) and share._waiting is None:
                taken = [
                    torch.zeros_like(w) if g is None else g for g, (_, w) in zip(share._gradients, share.parameters)
                ]
                self.taken = self.taken + torch.cat([each.flatten().double() for each in taken]) * share.weight
                self.channel = share.channel
            commit_gradients(share)

        def committed_channel(channel: Channel) -> Any:
            exchanged = commit_channel(channel)
            sent = exchanged.sent
            if channel is self.channel:
                self.sent = self.sent + (sent if isinstance(sent, Tensor) else sent.dense()).double()
            return exchanged

        DeltaShare.commit, Channel.commit = committed, committed_channel  # type: ignore[method-assign]
        GradientShare.commit = committed_gradients  # type: ignore[method-assign]

    def error(self) -> float:
        """The largest difference between the two sides, by the largest element taken in."""
        assert self.channel is not None and self.taken is not None and self.sent is not None
        held = self.channel.residuals[0].held["residual"].flat.double()
        return float((self.taken - self.sent - held).abs().max() / self.taken.abs().max())


LAW = _Law()


def slowed(seconds: float) -> Callable[[], None]:
    """Makes each step so much longer."""

    def slow() -> None:
        step = Model.training_step

        def slowly(self: Model, batch: Tensor, batch_idx: int) -> Tensor:
            time.sleep(seconds)
            return step(self, batch, batch_idx)

        Model.training_step = slowly  # type: ignore[method-assign]

    return slow


def die_in_round(number: int, place: str) -> Callable[[], None]:
    """Alters this process: it is killed in a round, counted from 1.

    Args:
        number: Of the round.
        place: "exchange": once it has sent a part; "vote": when it has all that others have sent.
    """
    done = {"vote": 0, "exchange": 0}

    def before() -> None:
        vote, calling = Quorum.vote, ElasticWire.calling

        def voting(quorum: Quorum) -> bool:
            done["vote"] += 1
            if place == "vote" and done["vote"] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return vote(quorum)

        def called(wire: ElasticWire, collective: Any, handed_bytes: int, row: str | None = None) -> Any:
            waiting = calling(wire, collective, handed_bytes, row)
            if place == "exchange" and done["vote"] == number - 1 and (row or wire.row) in EXCHANGES:
                os.kill(os.getpid(), signal.SIGKILL)
            return waiting

        Quorum.vote, ElasticWire.calling = voting, called  # type: ignore[method-assign]

    return before


def die_while_receiving() -> None:
    """Alters this process: it is killed when it has received a part of the state of another."""
    fill, filled = streams._fill, list[int]()

    def some(connection: Any, buffer: memoryview) -> bool:
        whole = fill(connection, buffer)
        filled.append(len(buffer))
        if sum(filled) > 2**21:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole

    streams._fill = some


def die_while_sending() -> None:
    """Alters this process: it is killed when it has sent a part of the state to another that joins."""
    send, begins, done = Quorum.send, Sending._next, {"late": False}
    streams._PIECE_BYTES = 100

    def sending(quorum: Quorum, content: Tensor, rank: int) -> int:
        # At the beginning, others get the state of the first one.
        done["late"] = quorum.number > 1
        return send(quorum, content, rank)

    def some(self: Sending) -> Iterator[int]:
        for number, begin in enumerate(begins(self)):
            if done["late"] and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield begin

    Quorum.send, Sending._next = sending, some  # type: ignore[method-assign]


def doubt_in_round(number: int) -> Callable[[], None]:
    """Alters this process: in a round, it cannot know whether others have committed, though they have."""
    done = {"vote": 0}

    def before() -> None:
        vote, all_gather = Quorum.vote, ElasticWire.all_gather

        def voting(quorum: Quorum) -> bool:
            done["vote"] += 1
            return vote(quorum)

        def gathered(wire: ElasticWire, tensor: Tensor, row: str | None = None) -> Tensor:
            everything = all_gather(wire, tensor, row)
            if done["vote"] == number and tensor.dtype == torch.uint8 and tensor.numel() == 1:
                done["vote"] += 1000
                raise LostPeerError("as if the last message had been lost")
            return everything

        Quorum.vote, ElasticWire.all_gather = voting, gathered  # type: ignore[method-assign]

    return before


def refuse_round(number: int) -> Callable[[], None]:
    """Alters this process: after the exchange of a round it votes against it. Then nobody may commit that round."""
    votes: list[bool] = []

    def before() -> None:
        vote, commit, take_back = Quorum.vote, Rounds.commit, Rounds.take_back

        def voting(quorum: Quorum) -> bool:
            votes.append(vote(quorum) and len(votes) + 1 != number)
            return votes[-1]

        def committed(rounds: Rounds) -> Any:
            assert votes[-1] or rounds.made is None, "a round that was voted against is committed"
            return commit(rounds)

        def taken_back(rounds: Rounds) -> None:
            if rounds.made is not None:
                PIPE[0].send(("told", "taken back"))
            take_back(rounds)

        Quorum.vote, Rounds.commit = voting, committed  # type: ignore[method-assign]
        Rounds.take_back = taken_back  # type: ignore[method-assign]

    return before


def may_repeat() -> None:
    """Alters this process: that an exchange is repeated is no error here."""
    warnings.filterwarnings("ignore", "an exchange between replicas is repeated", UserWarning)


def damage_payloads(round_number: int, times: int = 1) -> Callable[[], None]:
    """Alters this process: one bit of what it sends in a round is another, so often."""

    def before() -> None:
        may_repeat()
        make, seal, sent = Rounds.make, gather.seal, list[int]()
        due: list[int] = []

        def making(rounds: Rounds, plan: Any, *arguments: Any, **options: Any) -> Any:
            due[:] = [1] if plan.round == round_number and len(sent) < times else []
            return make(rounds, plan, *arguments, **options)

        def altered(*arguments: Any) -> torch.Tensor:
            payload = seal(*arguments)
            if due:
                sent.append(due.pop())
                payload[len(payload) // 2] ^= 4
            return payload

        Rounds.make = making  # type: ignore[method-assign]
        gather.seal = altered

    return before


def nan_in(step: int) -> Callable[[], None]:
    """Alters this process: the loss of a step, counted from 1, is not a number."""

    def before() -> None:
        training_step = Model.training_step

        def stepping(self: Model, batch: Tensor, batch_idx: int) -> Tensor:
            loss = training_step(self, batch, batch_idx)
            return loss * (torch.nan if self.trainer.global_step == step - 1 else 1)

        Model.training_step = stepping  # type: ignore[method-assign]

    return before


def fail_in_step(step: int) -> Callable[[], None]:
    """Alters this process: its training raises in a step, counted from 1."""

    def before() -> None:
        training_step = Model.training_step

        def stepping(self: Model, batch: Tensor, batch_idx: int) -> Tensor:
            if self.trainer.global_step == step - 1:
                raise ArithmeticError("as the user's own code may")
            return training_step(self, batch, batch_idx)

        Model.training_step = stepping  # type: ignore[method-assign]

    return before


def without_the_branch() -> None:
    """Alters this process: the bias of the last layer gets no gradient."""
    backward = Model.on_after_backward

    def after_backward(self: Model) -> None:
        backward(self)
        self.network[3].bias.grad = None  # type: ignore[union-attr]

    Model.on_after_backward = after_backward  # type: ignore[method-assign]


def spoil(step: int) -> Callable[[], None]:
    """Alters this process: after a step, other code changes a weight here."""

    def before() -> None:
        ended = Model.on_train_batch_end

        def ending(self: Model, *args: Any) -> None:
            if self.trainer.global_step == step:
                with torch.no_grad():
                    self.network[0].weight[0, 0] += 0.1  # type: ignore[index, operator]
            ended(self, *args)

        Model.on_train_batch_end = ending  # type: ignore[method-assign]

    return before


def watch_the_law() -> None:
    LAW.watch()


def weigh_it() -> None:
    """Alters this process: it notes how much it counts in each exchange."""
    SCALE.watch(Model)


def wait_for_the_start() -> None:
    """Alters this process: before it meets others for the first time, it says so, and waits for a word.

    The lighthouse knows it by then, and lets no others meet without it.
    """
    begin = ElasticTurns.begin

    def beginning(turns: ElasticTurns) -> None:
        quorum = turns._quorum
        assert isinstance(quorum, Quorum)
        # torchft's own thread may be late on a machine that is busy.
        client = load_torchft().coordination.LighthouseClient(quorum._lighthouse, timedelta(seconds=60))
        client.heartbeat(quorum.name, timedelta(seconds=60))
        PIPE[0].send(("told", "ready"))
        PIPE[0].recv()
        begin(turns)

    ElasticTurns.begin = beginning  # type: ignore[method-assign]


def stop_at(step: int) -> Callable[[], None]:
    """Alters this process: after a step it says so, and waits for a word."""

    def before() -> None:
        STOPS.append(step)

    return before


def stop_at_and_tell_what_follows(step: int) -> Callable[[], None]:
    """As `stop_at`; after the word it says so, too, when it comes to its next meeting."""

    def before() -> None:
        STOPS.append(step)
        form, told = Quorum.form, list[int]()

        def forming(quorum: Quorum) -> None:
            if step in PASSED and not told:
                told.append(step)
                PIPE[0].send(("told", "meets"))
            form(quorum)

        Quorum.form = forming  # type: ignore[method-assign]

    return before


PIPE: list[Connection] = []
STOPS: list[int] = []
PASSED: list[int] = []
