"""The recipes: each published method as a composition of parts.

A recipe is a subclass of `Method` that only creates its parts. It is used like a function, and so has a function's
name. As it is a class, LightningCLI can list it, find it by its bare name, and show its help.
"""

from collections.abc import Callable

from lightning_sparsecomm.basis.arguments import did_you_mean
from lightning_sparsecomm.methods.adam import local_adam
from lightning_sparsecomm.methods.auto import auto
from lightning_sparsecomm.methods.compared import omnireduce, parallax, sparcml
from lightning_sparsecomm.methods.defaults import default
from lightning_sparsecomm.methods.des_loc import des_loc
from lightning_sparsecomm.methods.dropping import dgc, gradient_dropping
from lightning_sparsecomm.methods.estimates import ef21
from lightning_sparsecomm.methods.low_rank import powersgd
from lightning_sparsecomm.methods.onebit_adam import onebit_adam
from lightning_sparsecomm.methods.outer import muloco, streaming_diloco
from lightning_sparsecomm.methods.periodic import diloco, federated_averaging, sbc, sbc1, sbc2, sbc3, sparse_loco
from lightning_sparsecomm.methods.post_local import post_local_sgd
from lightning_sparsecomm.methods.quantized import quantized
from lightning_sparsecomm.methods.quantizers import ef_signsgd, natural, onebit_sgd, qsgd, signsgd, terngrad
from lightning_sparsecomm.methods.regions import ok_topk
from lightning_sparsecomm.methods.selectors import adacomp, dryden, strom
from lightning_sparsecomm.methods.shared_positions import aligned_topk, random_k
from lightning_sparsecomm.methods.split import split
from lightning_sparsecomm.methods.sums import dense, s2_reducer, sketched_sgd
from lightning_sparsecomm.methods.transforms import demo
from lightning_sparsecomm.sharing import Method

__all__ = [
    "RECIPES",
    "adacomp",
    "aligned_topk",
    "auto",
    "default",
    "demo",
    "dense",
    "des_loc",
    "dgc",
    "diloco",
    "dryden",
    "ef21",
    "ef_signsgd",
    "federated_averaging",
    "gradient_dropping",
    "local_adam",
    "muloco",
    "natural",
    "ok_topk",
    "omnireduce",
    "onebit_adam",
    "onebit_sgd",
    "parallax",
    "post_local_sgd",
    "powersgd",
    "qsgd",
    "quantized",
    "random_k",
    "s2_reducer",
    "sbc",
    "sbc1",
    "sbc2",
    "sbc3",
    "signsgd",
    "sketched_sgd",
    "sparcml",
    "sparse_loco",
    "split",
    "streaming_diloco",
    "strom",
    "terngrad",
]

_NAMED = (
    *(dense, gradient_dropping, dgc, local_adam, sbc, federated_averaging, diloco, sparse_loco, sketched_sgd),
    *(s2_reducer, powersgd, quantized, ok_topk, aligned_topk, random_k, streaming_diloco, muloco, des_loc),
    *(qsgd, terngrad, natural, onebit_sgd, ef_signsgd, signsgd, strom, dryden, adacomp),
    *(ef21, demo, onebit_adam, parallax, omnireduce, sparcml, post_local_sgd),
)

RECIPES: dict[str, Callable[[], Method]] = {recipe.__name__: recipe for recipe in _NAMED}
"""The methods with a strategy name of their own: `sparsecomm_` and the key."""


def __getattr__(name: str) -> object:
    raise AttributeError(f"module {__name__!r} has no method {name!r}.{did_you_mean(name, __all__)}")
