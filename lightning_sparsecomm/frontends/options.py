"""Checks of a strategy's options when it is constructed. Each error names the option, its value, and the remedy."""

import difflib
import inspect
import multiprocessing
from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_sparsecomm import methods
from lightning_sparsecomm.basis.arguments import check_durations, check_one_of, options_of
from lightning_sparsecomm.sharing.method import Method

_COMM_HOOK_OPTIONS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


def check_is_method(method: object) -> None:
    """Users may pass a recipe's name, or the recipe without calling it: raises a `TypeError` that says so."""
    if method is None or isinstance(method, Method):
        return
    name = method if isinstance(method, str) else getattr(method, "__name__", "")
    name = name.removeprefix("sparsecomm_")
    recipe = next(iter(difflib.get_close_matches(name, methods.__all__, n=1)), None)
    hint = f" Did you mean lightning_sparsecomm.methods.{recipe}()?" if recipe is not None else ""
    raise TypeError(
        f"method must be a Method, such as lightning_sparsecomm.methods.dgc(density=0.001); got {method!r}.{hint}"
    )


def check_start_method(name: object) -> None:
    """Raises `ValueError` for one that multiprocessing does not know, before it asks the operating system."""
    known = "popen", *multiprocessing.get_all_start_methods()
    check_one_of("start_method", name, known, "Leave it out for popen, which starts the script again.")


def check_values(seed: object, check_replicas_every: object, uneven_inputs: object, timeout: Any) -> None:
    """Raises `TypeError` or `ValueError` for the first value that is none; `timeout` may be None."""
    if type(seed) is not int:
        raise TypeError(f"seed must be a whole number, equal on all ranks; got {seed!r}. Leave it out for 0.")
    if check_replicas_every is not None and (type(check_replicas_every) is not int or check_replicas_every < 1):
        raise ValueError(
            "check_replicas_every must be a whole number of optimizer steps, at least 1; got"
            f" {check_replicas_every!r}. Use None to compare replicas at the end of training only."
        )
    if type(uneven_inputs) is not bool:
        raise TypeError(f"uneven_inputs must be True or False, equal on all ranks; got {uneven_inputs!r}.")
    if timeout is not None:
        check_durations(timeout=timeout)


def refuse_comm_hooks(strategy: object) -> None:
    """Raises `ValueError` for options of DDP's communication hooks, as a DDPStrategy has stored them."""
    for option in _COMM_HOOK_OPTIONS:
        if getattr(strategy, f"_{option}", None) is not None:
            raise ValueError(
                f"{option} cannot be combined with a method, which takes the place of DDP's communication hook."
                " Leave it out, or use strategy='ddp'. methods.dense(wire_dtype='bfloat16') rounds on the wire."
            )


def refuse_static_graph(given: Mapping[str, object]) -> None:
    """Raises `ValueError` for a static graph beside a chooser."""
    if given.get("static_graph"):
        raise ValueError(
            "static_graph must be False with methods.auto, which switches DDP's reducer on and off; got True. Leave it"
            " out, or choose a method by hand."
        )


def refuse_misplaced(given: Mapping[str, object]) -> None:
    """Raises `TypeError` for an option that belongs to another class, and says to which."""
    if "length" in given:
        raise TypeError(
            "length is an option of Fabric's strategy: from lightning_sparsecomm.strategies.lightning_fabric (or"
            " .lightning.fabric) import SparseCommStrategy. A Trainer knows its length: leave it out."
        )
    for name, recipe in methods.RECIPES.items():
        options = options_of(recipe) or []
        for option in given:
            if option in options:
                raise TypeError(
                    f"{option} is an option of a method, not of the strategy. Use"
                    f" SparseCommStrategy(methods.{name}({option}={given[option]!r})), for example."
                )


def known_options(strategy: type, base: type) -> list[str]:
    """The names of the options of a strategy: those of `base` and its subclasses, of its DDPStrategy, and of DDP."""
    ddp = next(each for each in strategy.__mro__ if each.__name__ == "DDPStrategy")
    ours = [each for each in strategy.__mro__ if issubclass(each, base) and "__init__" in vars(each)]
    kinds = (*ours, ddp, DistributedDataParallel)
    names = [name for kind in kinds for name in inspect.signature(kind.__init__).parameters]  # type: ignore[misc]
    return [name for name in dict.fromkeys(names) if name not in ("self", "kwargs", "module")]
