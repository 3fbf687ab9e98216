"""The strategy of a Trainer that is one of several replicas, which come and go."""

import hashlib
import os
import socket
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_sparsecomm.basis.arguments import check_booleans, check_durations, check_texts, plain_for_command_lines
from lightning_sparsecomm.basis.digests import digest_of
from lightning_sparsecomm.basis.groups import join_alone
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.elastic.joining import Joining
from lightning_sparsecomm.elastic.membership import Change
from lightning_sparsecomm.elastic.quorum import Quorum, load_torchft
from lightning_sparsecomm.elastic.readers import Readers
from lightning_sparsecomm.elastic.record import Record
from lightning_sparsecomm.elastic.replay import Recorded, ReplayedTurns, local_state_of, replaying
from lightning_sparsecomm.elastic.suitable import check_files, check_method
from lightning_sparsecomm.elastic.turns import ElasticTurns
from lightning_sparsecomm.elastic.units import steps_until_exchange
from lightning_sparsecomm.elastic.wire import ElasticWire
from lightning_sparsecomm.frontends.expected import expected
from lightning_sparsecomm.frontends.leading import LeadingMixin
from lightning_sparsecomm.frontends.options import check_is_method
from lightning_sparsecomm.frontends.progress import LeastLimits, follow, steps_of
from lightning_sparsecomm.frontends.reporting import get_ready, say
from lightning_sparsecomm.methods import sparse_loco
from lightning_sparsecomm.run.agreement import CHECK_REPLICAS_EVERY, facts_of_run
from lightning_sparsecomm.run.contents import State
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing.method import Method

if TYPE_CHECKING:
    import pytorch_lightning as pl

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""The variable of the environment that has the lighthouse's address where no argument gives it; torchft's own."""

_AVERAGING = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")


class ElasticTrainerMixin(LeadingMixin):
    """Trains one replica of several, which may come and go at any time.

    Each replica is a Trainer of its own with `devices=1`, started by itself, on any machine that reaches the
    lighthouse (`sparsecomm lighthouse`) and the other replicas. Before each exchange, the replicas that are there form
    a quorum. If one is lost in an exchange, the others repeat it without it. A replica that is new, or was started
    again, gets weights, optimizers' common state, counts and schedules from another.

    It takes methods that exchange weights every some steps (sbc, federated_averaging, diloco, sparse_loco), also in
    fragments and in flight, and those that exchange gradients in each step and keep replicas equal (dgc,
    gradient_dropping, `methods.default()`).

    Attributes:
        turns: The exchanges of the current fit, with `turns.membership`; None before the first.
    """

    come_and_go = True
    _beginning = False

    def __init__(
        self,
        method: Method | None = None,
        seed: int = 0,
        check_replicas_every: int | None = CHECK_REPLICAS_EVERY,
        lighthouse: str | None = None,
        replica: str | None = None,
        exchange_timeout: timedelta = timedelta(minutes=5),
        patience: timedelta = timedelta(hours=1),
        adapt_steps: bool = False,
        membership_log: str | None = None,
        log_each_replica: bool = False,
        local_state_dir: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes the method, and how to find the other replicas.

        Args:
            method: How replicas share what they train; `methods.sparse_loco()` by default.
            seed: Seed of the method's randomness; equal on all replicas.
            check_replicas_every: Rounds between two comparisons of weights, where gradients are exchanged; None for
                none. A replica that differs from most gets the weights of the others.
            lighthouse: Address of the lighthouse, such as "http://host:29510"; by default that in TORCHFT_LIGHTHOUSE.
            replica: A name of this replica for messages; by default the machine's name and the process's number.
            exchange_timeout: How long replicas wait in an exchange for one that does not answer. Then they repeat it
                without it.
            patience: How long a replica waits for others to come to an exchange.
            adapt_steps: Whether a replica that is slower than the fastest one makes fewer steps between exchanges, so
                that none waits for it. Changes count by the samples behind them in any case.
            membership_log: A file of this replica's own, to which it appends a line of JSON with each change of members
                that it sees (time, round, who is there, who has joined or gone, and why) and with each meeting, from
                which `sparsecomm replay` makes the run again. None for no file.
            log_each_replica: Whether the loggers of each replica write. By default, those of the one that leads do.
            local_state_dir: A folder on this machine where the replica keeps what is its own, its residuals and the
                state of its optimizers; it writes them after each exchange of weights. If it is killed and started
                again with the same `replica`, it goes on with them. None for no file.
            **kwargs: Options of DDPStrategy and of DistributedDataParallel.

        Raises:
            ModuleNotFoundError: torchft is not installed.
            ImportError: torch is older than 2.8.
            ValueError: The method exchanges gradients in flight (`delay`), lets gradients differ between replicas, or
                averages in DDP's buckets (`dense`, `auto`); `adapt_steps` is given with `delay` or `fragments`;
                `local_state_dir` is no folder, or is given without `replica` or with a method that exchanges gradients;
                or `uneven_inputs` or `nodes` is given, which replicas that come and go have no use for. At set-up: no
                lighthouse is known.
            TypeError: `method` is not a Method; or `lighthouse` or `replica` is no text.
        """
        with plain_for_command_lines():
            load_torchft()
            method = method if method is not None else sparse_loco()
            check_booleans(adapt_steps=adapt_steps, log_each_replica=log_each_replica)
            check_is_method(method)
            check_texts(lighthouse=lighthouse, replica=replica)
            check_method(method, adapt_steps)
            if kwargs.pop("uneven_inputs", False):
                raise ValueError(
                    "uneven_inputs must be False with replicas that come and go: each has its own number of batches."
                    " Leave it out."
                )
            if kwargs.get("nodes") is not None:
                raise ValueError(
                    f"nodes must be left out with replicas that come and go, each of one rank; got {kwargs['nodes']!r}."
                )
            check_files(membership_log, local_state_dir, replica, method)
            check_durations(exchange_timeout=exchange_timeout, patience=patience)
        super().__init__(method, seed, check_replicas_every, **kwargs)
        self.lighthouse = lighthouse
        self.replica = replica if replica is not None else f"{socket.gethostname()}-{os.getpid()}"
        self.exchange_timeout = exchange_timeout
        self.patience = patience
        self.adapt_steps = adapt_steps
        self.membership_log = membership_log
        self._limits = LeastLimits()
        self.log_each_replica = log_each_replica
        self.local_state_dir = local_state_dir

    def _make_wire(self) -> Wire:
        return ElasticWire()

    def _warn_if_alone(self, engine: Engine) -> None:
        """Does nothing: others may come at any time."""

    @property
    def taking_part(self) -> int:
        changes = [] if self.turns is None else self.turns.membership.changes
        return len(changes[-1].members) if changes else 1

    def setup_environment(self) -> None:
        # The default group has this process alone. Lightning would open a port for it, which another replica on this
        # machine may have been told to use too.
        join_alone()
        super().setup_environment()

    def setup(self, trainer: "pl.Trainer") -> None:
        if trainer.state.fn == "fit" and not replaying():
            self._lighthouse()
        super().setup(trainer)

    def on_train_start(self) -> None:
        if not self._is_trial():
            # Others would wait for this one while it compiles.
            get_ready(self, self._trainer)
            self._join()
        super().on_train_start()

    def teardown(self) -> None:
        self._limits.restore()
        super().teardown()

    def on_train_end(self) -> None:
        super().on_train_end()
        if self.turns is not None and self.lightning_module is not None and not self._is_trial():
            tensors = self.lightning_module.state_dict().values()
            digests = "".join(digest_of(each) for each in tensors if isinstance(each, Tensor))
            self.turns.end(hashlib.sha256(digests.encode()).hexdigest()[:16])

    def _join(self) -> None:
        engine, trainer = self.engine, self._trainer
        _tell_of_averages(trainer)
        wire = engine.wire
        assert isinstance(wire, ElasticWire)
        times, tell = (self.exchange_timeout, self.patience), partial(say, told=trainer)
        quorum = Recorded(*times, tell) if replaying() else Quorum(self.replica, self._lighthouse(), *times, tell)
        wire.closing.append(quorum.close)
        readers = self._read_as(quorum.name)
        samples = Readers(
            readers, lambda: steps_until_exchange(engine) * trainer.accumulate_grad_batches, self._note_length
        )
        records = self._leading_checkpoints
        assert records is not None
        own = local_state_of(self.local_state_dir, quorum.name, engine, self.patience, tell)
        joining = Joining(engine, self._progress, self._follow, samples, records.to_json, records.follow, own)
        facts = _facts(engine, self.seed)
        facts["the number of training samples"] = str([reader.loading.size for reader in readers])
        engine.registry.fixed = True
        self.turns = engine.turns = (ReplayedTurns if replaying() else ElasticTurns)(
            *(engine, wire, quorum, joining, facts, self._tell, self._stop),
            self.adapt_steps,
            self.check_replicas_every,
            Record(None if replaying() else self.membership_log),
        )
        records.look()
        self._beginning = True
        self.turns.begin()
        self._beginning = False
        self._begin_reading()
        self._settle_lead()

    def _follow(self, state: State) -> None:
        assert self.turns is not None and self._leading_checkpoints is not None
        self._leading_checkpoints.follow(state["checkpoints"])
        behind = 0
        # A Trainer that is amid its training goes on by its own count.
        if not self._beginning:
            behind = max(0, max(state["steps"]) - steps_of(self._trainer))
        elif max(state["steps"]):
            follow(self._trainer, state)
        self.turns.lead.behind = state["behind"] + behind

    def _tell(self, change: Change) -> None:
        say(str(change), self._trainer)

    def _stop(self) -> None:
        # The current step is not counted yet.
        done = self.engine.registry.steps
        if (self.engine.length - done if self.readers else expected(self._trainer).left) > 1:
            self._trainer.should_stop = True
            self._limits.lift(self._trainer)

    def _lighthouse(self) -> str:
        address = self.lighthouse if self.lighthouse is not None else os.environ.get(LIGHTHOUSE)
        if not address:
            raise ValueError(
                f"lighthouse must be the address that `sparsecomm lighthouse` has printed; got {address!r}. Pass"
                f" lighthouse='http://host:29510', or set {LIGHTHOUSE} in the environment."
            )
        return address


def _facts(engine: Engine, seed: int) -> dict[str, str]:
    """By topic, a digest of what must be equal on all replicas."""
    topics, scales = dict[str, str](), engine.scaling is not None
    for fact in facts_of_run(engine.registry.methods[0], engine.registry.named, seed, None, scales):
        topic = "the model" if fact.topic.startswith("parameter ") else fact.topic
        topics[topic] = topics.get(topic, "") + f"{fact.topic} {fact.value};"
    return {topic: hashlib.sha256(text.encode()).hexdigest()[:8] for topic, text in topics.items()}


def _tell_of_averages(trainer: "pl.Trainer") -> None:
    callbacks: list[object] = getattr(trainer, "callbacks", [])
    averaging = [name for each in callbacks if (name := type(each).__name__) in _AVERAGING]
    if averaging:
        say(
            f"sparsecomm: {averaging[0]} keeps averages of its own, which a replica that joins amid the run lacks:"
            " in the end, its model differs from that of others",
            trainer,
        )
