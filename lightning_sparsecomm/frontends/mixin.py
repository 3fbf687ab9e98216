"""What the strategies for Trainer and Fabric have in common. It imports no Lightning package."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparsecomm import methods
from lightning_sparsecomm.basis.arguments import check_options, plain_for_command_lines
from lightning_sparsecomm.basis.far import FarWire
from lightning_sparsecomm.basis.ledger import Ledger
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.frontends.data_parallel import CountedDataParallel, LocalDataParallel, SwitchedDataParallel
from lightning_sparsecomm.frontends.options import (
    check_is_method,
    check_start_method,
    check_values,
    known_options,
    refuse_comm_hooks,
    refuse_misplaced,
    refuse_static_graph,
)
from lightning_sparsecomm.frontends.saving import SavingMixin
from lightning_sparsecomm.planning.chooser import AutoChooser, forget_run
from lightning_sparsecomm.run.agreement import CHECK_REPLICAS_EVERY
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.node_turns import check_nodes, divide
from lightning_sparsecomm.sharing.method import Method


class SynchronizingMixin(SavingMixin):
    """Holds a method and, while a model trains, the engine that runs it."""

    ledger: Ledger | None
    """The bytes of the current fit, or of the last one; None before the first."""

    _ddp_kwargs: dict[str, Any]

    def __init__(
        self,
        method: Method | None = None,
        seed: int = 0,
        check_replicas_every: int | None = CHECK_REPLICAS_EVERY,
        uneven_inputs: bool = False,
        nodes: Literal["auto"] | Sequence[Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes the method, and DDP's own options.

        Args:
            method: How ranks share what they train; `methods.default()` by default.
            seed: Seed of the method's randomness; equal on all ranks.
            check_replicas_every: Optimizer steps between two comparisons of the weights that ranks share; None compares
                them at the end only: of fit, or in Fabric's `settle()`. If they differ by a bit, `ReplicaError` names
                the first such parameter on all ranks. Methods that exchange weights compare the shared anchor; with
                local gradients, the next average is compared. A comparison costs 32 bytes, and hashing at 3 GB/s on
                one core: 0.03 s for 25 M float32.
            uneven_inputs: Whether ranks may have different numbers of batches in an epoch. A rank that has run out
                repeats its last batch with a loss of zero until the others have too, so it counts as gradient zero.
                Without it, training ends with a `PeerError` after the process group's timeout. In Fabric, iterate over
                `fabric.strategy.uneven(loader)` instead.
            nodes: Which ranks are joined by something fast: "auto" for those of a machine, or their ranks, such as
                [[0, 1], [2, 3]]; equally many on each. They average whole gradients in each step, and the method works
                between nodes, as if each were one rank: a node sends one rank's bytes, and each of its ranks has a part
                of the memories and of the work. None treats all ranks alike.
            **kwargs: Options of DDPStrategy and of DistributedDataParallel.

        Raises:
            TypeError: `method` is not a Method, `seed` not a whole number, `uneven_inputs` no bool, or `nodes` no list
                of ranks.
            ValueError: A communication hook is given besides a method, `start_method` is unknown, `timeout` no positive
                timedelta, or `check_replicas_every` not a whole number of at least 1. At set-up: `nodes` does not
                have each rank once, or has unequal numbers of them, or the method cannot work between nodes.
        """
        super().__init__(**kwargs)
        with plain_for_command_lines():
            refuse_misplaced(self._ddp_kwargs)
            check_options(type(self).__name__, self._ddp_kwargs, known_options(type(self), SynchronizingMixin))
            check_is_method(method)
            check_start_method(getattr(self, "_start_method", "popen"))
        refuse_comm_hooks(self)
        check_values(seed, check_replicas_every, uneven_inputs, kwargs.get("timeout"))
        check_nodes(nodes)
        self.uneven_inputs, self.nodes = uneven_inputs, nodes
        self.method = method if method is not None else methods.default()
        self.seed, self.check_replicas_every = seed, check_replicas_every
        self._engine: Engine | None = None
        self._chooser: AutoChooser | None = None
        self.ledger = None

    def setup_environment(self) -> None:
        """Called by Lightning in each process before anything else."""
        if getattr(self, "_start_method", "popen") == "fork":
            # A fork has none of the threads of its parent's pool. Torch makes a new pool when the count is set next;
            # of two threads that set it at once, one may find none ("Invalid thread pool!") or a freed one.
            torch.set_num_threads(torch.get_num_threads())
        super().setup_environment()  # type: ignore[misc]

    @property
    def engine(self) -> Engine:
        """Runs the method while a model is set up for training; a RuntimeError if none is."""
        if self._engine is None:
            raise RuntimeError("no model is set up for training yet: the method has nothing to synchronize.")
        return self._engine

    @property
    def chooser(self) -> AutoChooser | None:
        """Chooses the method of a run with `methods.auto`, and knows what it has measured; None with other methods."""
        return self._chooser

    def synchronize(self, optimizer: Optimizer) -> None:
        """Shares the optimizer's gradients now instead of at its step.

        Call it before code of your own reads or changes `.grad` between backward and step; with ddp the gradients are
        averaged by then. `clip_gradients` calls it by itself.
        """
        if self._engine is not None:
            self._engine.replicas.view_own()
            self._engine.synchronize(self._bare(optimizer))

    @contextmanager
    def shared_model(self) -> Iterator[None]:
        """A context in which the module holds the weights that all ranks share, to evaluate or save them.

        Enter it on all ranks. Afterwards each rank has its own weights again, to the bit. A Trainer does this by itself
        when it validates or saves a checkpoint.
        """
        viewing = self.engine.replicas.view_shared()
        try:
            yield
        finally:
            if viewing:
                self.engine.replicas.view_own()

    def _bare(self, optimizer: Optimizer) -> Optimizer:
        # Lightning's wrappers hold the user's optimizer as `_optimizer`.
        known = self.engine.registry.find(optimizer) is not None
        bare: Optimizer = optimizer if known else getattr(optimizer, "_optimizer", optimizer)
        return bare

    def _clip(self, optimizer: Optimizer, max_norm: float, by_value: bool) -> bool:
        """Shares the optimizer's gradients; returns whether the method has clipped them."""
        self.engine.replicas.view_own()
        return self.engine.clip(self._bare(optimizer), max_norm, by_value)

    def _make_wire(self) -> Wire:
        """The wire of a run. A collective."""
        return FarWire.apart()

    def _begin(self, device: torch.device, scaler: object) -> None:
        """Starts a run with a wire, a ledger and an engine; refuses devices, backends and scalers it cannot use."""
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"accelerator must be 'cpu' or 'cuda', where our collectives are tested; got {device.type!r}."
                " Use accelerator='cpu'."
            )
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(
                "the precision plugin's scaler must be a torch.amp.GradScaler, whose records all ranks are to agree on;"
                f" got {scaler!r}. Use precision='16-mixed', 'bf16-mixed' or '32-true'."
            )
        wire = self._make_wire()
        if device.type == "cpu" and "gloo" not in wire.backend:
            raise ValueError(
                f"process_group_backend must be 'gloo' on CPUs; got {wire.backend!r}. Leave it out for the default."
            )
        self.ledger = wire.ledger
        self._ended = None
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        engine = self._engine = Engine(self.method, wire, self.seed, self.check_replicas_every, scaler)
        engine.agreement.arguments |= {"uneven_inputs": self.uneven_inputs, "nodes": self.nodes}
        if isinstance(self.method, methods.auto):
            refuse_static_graph(self._ddp_kwargs)
            engine.chooser = self._chooser = AutoChooser(engine, self.method.choices)
        if engine.scaling is not None:
            engine.scaling.take_over(lambda optimizer: engine.unscale_(self._bare(optimizer)))
        self._warn_if_alone(engine)

    def _warn_if_alone(self, engine: Engine) -> None:
        if engine.wire.world_size == 1 and not all(sync.shares_gradients for sync in engine.registry.syncs):
            warnings.warn(
                "one process: nothing crosses a network, so the method saves nothing. It still exchanges with itself,"
                " which costs time and, with a sparse method, changes the training. Use devices=2 or more, or 'ddp'.",
                stacklevel=3,
            )

    def _wrap(self, module: nn.Module, device_ids: list[int] | None = None) -> DistributedDataParallel:
        """The module in a DDP whose reducer is idle, or calls the method's hook."""
        engine, wire, hook = self.engine, self.engine.wire, self.engine.hook
        # As Lightning does: https://pytorch.org/docs/stable/notes/cuda.html#id5
        with torch.cuda.stream(torch.cuda.Stream()) if device_ids is not None else nullcontext():
            engine.registry.add_module(module)
            # Before DDP, which waits forever on some differences between ranks, and explains few of them.
            engine.agreement.on_setup()
            if self.nodes is not None and engine.registry.nodes is None:
                divide(engine, self.nodes, self.cluster_environment.node_rank())
            options = {"device_ids": device_ids, "process_group": wire.step_group, **self._ddp_kwargs}
            if hook is None:
                local = LocalDataParallel(module, wire, engine.state.broadcasts_buffers, **options)
                engine.begin()
                return local
            model: CountedDataParallel
            if engine.chooser is None:
                model = CountedDataParallel(module, wire, **options)
            else:
                model = SwitchedDataParallel(module, wire, lambda: not engine.registry.in_buckets, **options)
            in_buckets = [
                parameter
                for name, parameter in module.named_parameters()
                if parameter.requires_grad and name not in model.parameters_to_ignore
            ]
            hook.attach(in_buckets, model.find_unused_parameters and not model.static_graph)
            model.register_comm_hook(None, hook.hook)
            return model

    def teardown(self) -> None:
        self._end()
        if self._chooser is not None:
            forget_run(self._chooser)
        super().teardown()  # type: ignore[misc]

    # Lightning prints this when a Trainer gets the other package's strategy.
    def __repr__(self) -> str:
        ddp = next(each for each in type(self).__mro__ if each.__name__ == "DDPStrategy")
        package = ddp.__module__.removesuffix(".strategies.ddp")
        return f"<SparseCommStrategy of {package}, for no other package's Trainer or Fabric; {self.method!r}>"
