"""What the strategies for Trainer and Fabric have in common. Knows neither package: the bindings name the classes."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparsecomm import methods
from lightning_sparsecomm.method import Method
from lightning_sparsecomm.strategies.data_parallel import CountedDataParallel, LocalDataParallel
from lightning_sparsecomm.strategies.saving import SavingMixin
from lightning_sparsecomm.synchronizer import Synchronizer
from lightning_sparsecomm.wire import Ledger, Wire

T = TypeVar("T")

START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork"}
"""Suffixes of strategy names, and how each starts its processes; as Lightning's own `ddp`, `ddp_spawn`, `ddp_fork`."""

COMM_HOOK_OPTIONS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class Registry(Protocol):
    """What is needed of Lightning's strategy registries."""

    def register(
        self, name: str, strategy: type, description: str, override: bool = ..., **init_params: object
    ) -> Callable[..., object]: ...


class SynchronizingMixin(SavingMixin):
    """Holds a method and, while a model trains, the synchronizer that carries it out."""

    lightning_package: str
    """The package whose Trainer or Fabric this strategy is for, as users import it."""

    def _prepare(self, method: Method | None, seed: int, check_replicas_every: int | None) -> None:
        if method is not None and not isinstance(method, Method):
            # Its name, or the function itself instead of what it returns.
            name = method if isinstance(method, str) else getattr(method, "__name__", None)
            recipe = getattr(methods, name, None) if isinstance(name, str) else None
            meant = isinstance(recipe, type) and issubclass(recipe, Method)
            hint = f" Did you mean lightning_sparsecomm.methods.{name}()?" if meant else ""
            raise TypeError(
                f"method must be a Method, such as lightning_sparsecomm.methods.dgc(density=0.001);"
                f" got {method!r}.{hint}"
            )
        for option in COMM_HOOK_OPTIONS:
            if getattr(self, f"_{option}", None) is not None:
                raise ValueError(
                    f"{option} cannot be combined with a method, which takes the place of DDP's communication hook."
                    " Leave it out, or use strategy='ddp'. methods.dense(wire_dtype='bfloat16') rounds on the wire."
                )
        if type(seed) is not int:
            raise TypeError(f"seed must be a whole number, equal on all ranks; got {seed!r}. Leave it out for 0.")
        if check_replicas_every is not None and (type(check_replicas_every) is not int or check_replicas_every < 1):
            raise ValueError(
                "check_replicas_every must be a whole number of optimizer steps, at least 1; got"
                f" {check_replicas_every!r}. Leave it out to compare replicas at the end of training only."
            )
        self._prepare_saving()
        self.method = method if method is not None else methods.default()
        self.seed = seed
        self.check_replicas_every = check_replicas_every
        self._synchronizer: Synchronizer | None = None
        self._ledger: Ledger | None = None

    @property
    def synchronizer(self) -> Synchronizer:
        """The method at work.

        Raises:
            RuntimeError: No model is set up for training.
        """
        if self._synchronizer is None:
            raise RuntimeError("no model is set up for training yet: the method has nothing to synchronize.")
        return self._synchronizer

    @property
    def ledger(self) -> Ledger | None:
        """What crossed the wire in the current fit, or in the last; None before the first."""
        return self._ledger

    def synchronize(self, optimizer: Optimizer) -> None:
        """Shares the optimizer's gradients now, rather than at its step. For code that reads or changes `.grad` by
        itself between backward and step, where ddp has averaged them already (clip_gradients does it by itself)."""
        if self._synchronizer is not None:
            self._synchronizer.synchronize(self._bare(optimizer))

    @contextmanager
    def shared_model(self) -> Iterator[None]:
        """Within it the module holds the weights that all ranks share, for measuring or saving it; this rank's own come
        back afterwards, to the bit. Enter it on all ranks. A Trainer validates and saves checkpoints so by itself."""
        viewing = self.synchronizer.replicas.view_shared()
        try:
            yield
        finally:
            if viewing:
                self.synchronizer.replicas.view_own()

    def _bare(self, optimizer: Optimizer) -> Optimizer:
        if self.synchronizer.knows(optimizer):
            return optimizer
        # Lightning's wrappers keep the optimizer that is stepped as `_optimizer`.
        bare: Optimizer = getattr(optimizer, "_optimizer", optimizer)
        return bare

    def _clip(self, optimizer: Optimizer, max_norm: float, by_value: bool) -> bool:
        """Shares the optimizer's gradients; whether they are clipped by now, in the method's way."""
        return self.synchronizer.clip(self._bare(optimizer), max_norm, by_value)

    def _begin(self, device: torch.device, scaler: object) -> Synchronizer:
        """A new run: its wire, its ledger, its synchronizer.

        Raises:
            ValueError: A device or backend that cannot work.
            TypeError: A loss scaler of a kind that is not known.
        """
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"accelerator must be 'cpu' or 'cuda'; got {device.type!r}, on which DDP does not run."
                " Use accelerator='cpu'."
            )
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(
                "the precision plugin's scaler must be a torch.amp.GradScaler, whose records all ranks are to agree on;"
                f" got {scaler!r}. Use precision='16-mixed', 'bf16-mixed' or '32-true'."
            )
        wire = Wire()
        if device.type == "cpu" and "gloo" not in wire.backend:
            raise ValueError(
                f"process_group_backend must be 'gloo' on CPUs; got {wire.backend!r}. Leave it out for the default."
            )
        self._ledger = wire.ledger
        self._ended = None
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        synchronizer = self._synchronizer = Synchronizer(
            self.method, wire, self.seed, self.check_replicas_every, scaler
        )
        if synchronizer.scaling is not None:
            synchronizer.scaling.take_over(lambda optimizer: synchronizer.unscale_(self._bare(optimizer)))
        if wire.world_size == 1 and not self._synchronizer.shares_gradients:
            warnings.warn(
                "one process: nothing crosses a network, so the method saves nothing. It still exchanges with itself,"
                " which costs time, and where it is sparse changes the training. Use devices=2 or more, or 'ddp'.",
                stacklevel=2,
            )
        return self._synchronizer

    def _wrap(self, module: nn.Module, **options: object) -> DistributedDataParallel:
        """The module as DDP, with its reducer idle, or with our hook in it."""
        synchronizer = self.synchronizer
        synchronizer.add_module(module)
        # Before DDP, which waits for ever for some differences, and says little of others.
        synchronizer.agree()
        wire, buckets = synchronizer.wire, synchronizer.buckets
        if buckets is None:
            local = LocalDataParallel(module, wire, synchronizer.broadcasts_buffers, **options)
            synchronizer.begin()
            return local
        model = CountedDataParallel(module, wire, **options)
        in_buckets = [
            parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        ]
        buckets.attach(in_buckets, model.find_unused_parameters and not model.static_graph, wire)
        model.register_comm_hook(None, buckets.hook)
        return model

    def _end(self) -> None:
        if self._synchronizer is not None:
            self._keep_state()
            self._synchronizer.close()
            self._synchronizer = None

    # Lightning prints this where a strategy of one package meets the Trainer of the other.
    def __repr__(self) -> str:
        package = self.lightning_package
        return f"<SparseCommStrategy of {package}, for no other package's Trainer or Fabric; {self.method!r}>"


def register(registry: Registry, strategy: type) -> None:
    """Enters `sparsecomm`, and a name for each method, with Lightning's three ways to start processes."""
    names: dict[str, Method | None] = {"sparsecomm": None}
    names.update({f"sparsecomm_{name}": recipe() for name, recipe in methods.RECIPES.items()})
    for name, method in names.items():
        for suffix, start_method in START_METHODS.items():
            registry.register(
                name + suffix,
                strategy,
                description=f"{name} with start_method {start_method!r}",
                override=True,
                method=method,
                start_method=start_method,
            )
