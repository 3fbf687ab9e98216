"""A strategy for any installed Lightning package: the Trainer or Fabric that is given it makes its own."""

import itertools
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from lightning_sparsecomm.frontends.mixin import SynchronizingMixin
from lightning_sparsecomm.frontends.packages import FABRICS, TRAINERS
from lightning_sparsecomm.run.agreement import CHECK_REPLICAS_EVERY
from lightning_sparsecomm.sharing.method import Method
from lightning_sparsecomm.strategies.registration import bindings

_numbers = itertools.count()
_modules = ", ".join(f"lightning_sparsecomm.strategies.{name}" for name in (*TRAINERS, *FABRICS))

# A Trainer or Fabric reads these off a strategy object before it makes anything. It cannot read them off a name.
_READ_EARLY = ("accelerator", "parallel_devices", "precision", "precision_plugin")


class _Either(type):
    def __instancecheck__(cls, instance: object) -> bool:
        if not isinstance(instance, SynchronizingMixin):
            return super().__instancecheck__(instance)
        # Each is an object of the packages' `SparseCommStrategy` too.
        return cls is not ElasticSparseCommStrategy or getattr(instance, "come_and_go", False)


class _Strategy(str, metaclass=_Either):
    """A name in the registries of both packages, which makes the strategy of the one that looks it up."""

    _kind = "SparseCommStrategy"
    _arguments: dict[str, Any]
    _made: list[weakref.ref[Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls, f"sparsecomm_strategy_{next(_numbers)}")

    def _register(self, arguments: dict[str, Any]) -> None:
        for option in _READ_EARLY:
            if arguments.get(option) is not None:
                raise TypeError(
                    f"{option} can only be given to the strategy of one Lightning package, and several are installed;"
                    f" got {arguments[option]!r}. Give it to the Trainer or Fabric, or take {self._kind} from one of"
                    f" {_modules}."
                )
        self._arguments, self._made = arguments, []
        box, name, made_by = self._made, str(self), bindings(self._kind)
        # Bad arguments are refused here, not where the Trainer is made.
        made_by[0][1](**arguments)
        for registry, strategy in made_by:
            # The registry lives as long as the process: it must hold neither this object nor a model.
            def make(strategy: type = strategy) -> Any:
                made = strategy(**arguments)
                box[:] = [weakref.ref(made)]
                return made

            registry.register(name, make, description=f"an object of {self._kind}")
            weakref.finalize(self, registry.remove, name)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if cls.__module__ != __name__:
            raise TypeError(
                f"{cls._kind} cannot be subclassed where several Lightning packages are installed. Subclass that of"
                f" one of {_modules}."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self._arguments), ()

    def __getattr__(self, name: str) -> Any:
        box, arguments = self.__dict__.get("_made"), self.__dict__.get("_arguments", {})
        made = box[0]() if box else None
        if made is not None:
            return getattr(made, name)
        if name in arguments or name == "ledger":
            return arguments.get(name)
        raise AttributeError(f"{name!r}: no Trainer or Fabric has been given this {self._kind} yet.")

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._arguments.items() if value is not None)
        return f"{self._kind}({options})"


class SparseCommStrategy(_Strategy):
    """Trains by DDP, with a method that exchanges gradients or weights in fewer bytes.

    `pytorch_lightning` and `lightning` have separate class hierarchies, and here both are installed. So this is a name
    of its own in the registries of both packages, like "ddp". The Trainer or Fabric that is given it makes the strategy
    of its own package, whose attributes are then found here too.

    >>> SparseCommStrategy(methods.dgc(density=0.01), check_replicas_every=100)
    SparseCommStrategy(method=dgc(density=0.01), seed=0, check_replicas_every=100)

    Args:
        method: How gradients or weights are exchanged; None for the default.
        seed: Seed of the method's own randomness; equal on all ranks.
        check_replicas_every: Optimizer steps between two comparisons of the ranks' weights; None compares at the end.
        uneven_inputs: Whether a Trainer's ranks may have different numbers of batches in an epoch.
        nodes: Which ranks are joined by something fast: "auto" for those of a machine, or their ranks, such as
            [[0, 1], [2, 3]]. They average whole gradients, and the method works between nodes. None treats all alike.
        **kwargs: Options of DDPStrategy and of DistributedDataParallel.

    Raises:
        TypeError, ValueError: As the strategies of the packages say; or an option that only an object can carry.
    """

    def __init__(
        self,
        method: Method | None = None,
        seed: int = 0,
        check_replicas_every: int | None = CHECK_REPLICAS_EVERY,
        uneven_inputs: bool = False,
        nodes: Literal["auto"] | Sequence[Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> None:
        arguments = {"method": method, "seed": seed, "check_replicas_every": check_replicas_every, **kwargs}
        arguments |= {"uneven_inputs": uneven_inputs} if uneven_inputs is not False else {}
        self._register(arguments | ({"nodes": nodes} if nodes is not None else {}))


class ElasticSparseCommStrategy(_Strategy):
    """Trains one replica of several, which may come and go at any time.

    As `SparseCommStrategy`, this is a name that the Trainer of either package looks up.

    >>> ElasticSparseCommStrategy(lighthouse="http://10.0.0.1:29510", replica="desk")
    ElasticSparseCommStrategy(seed=0, lighthouse='http://10.0.0.1:29510', replica='desk')

    Args:
        method: How replicas share what they train; None for `methods.sparse_loco()`.
        seed: Seed of the method's own randomness; equal on all replicas.
        **kwargs: `lighthouse`, `replica`, `exchange_timeout`, `patience`, `adapt_steps`, `membership_log`,
            `log_each_replica` and `local_state_dir`, as docs/guide/elastic.md says; and options of DDPStrategy.

    Raises:
        TypeError, ValueError, ModuleNotFoundError: As these strategies say; or an option that only an object can carry.
    """

    _kind = "ElasticSparseCommStrategy"

    def __init__(self, method: Method | None = None, seed: int = 0, **kwargs: Any) -> None:
        self._register({"method": method, "seed": seed, **kwargs})
