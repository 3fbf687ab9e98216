"""`sparsecomm warm`: compiles the kernels of all methods, so that no training waits for it."""

import argparse
import math
import time
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparsecomm import methods
from lightning_sparsecomm.basis.arguments import did_you_mean
from lightning_sparsecomm.kernels.numba_jit import announcing
from lightning_sparsecomm.run.rehearsal import rehearse_method
from lightning_sparsecomm.sharing import Method

# Runs in which the density that follows from the length, and so the coding, differ.
_LENGTHS = 300, 1000, math.inf

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_to(subparsers: Any) -> None:
    """Adds the command to a parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "warm", help="compile the kernels, so that no training waits for it", description=__doc__
    )
    parser.add_argument("--methods", nargs="+", type=_recipe, metavar="NAME", help="the default and these alone")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["float32"], help="of the parameters")
    parser.set_defaults(run=run)


def _recipe(name: str) -> str:
    if name not in methods.RECIPES:
        known = ", ".join(sorted(methods.RECIPES))
        hint = did_you_mean(name, methods.RECIPES)
        raise argparse.ArgumentTypeError(f"{name!r} is no method.{hint} Methods: {known}.")
    return name


def run(options: argparse.Namespace) -> None:
    """Rehearses each method with the optimizers that it is defined for, and says how much that compiled."""
    begin = time.perf_counter()
    names = options.methods or sorted(methods.RECIPES)
    with announcing(lambda: print("compiling ...", flush=True)) as compiled:
        for method in (methods.default(), *(methods.RECIPES[name]() for name in names)):
            for dtype in options.dtypes:
                for optimizer, parameters in _kinds(DTYPES[dtype]):
                    if _defined(method, optimizer):
                        rehearse_method(method, [(optimizer, parameters)], _LENGTHS)
    seconds = time.perf_counter() - begin
    done = f"compiled {compiled()} kernels" if compiled() else "all kernels were compiled already"
    print(f"{done}: {seconds:.1f} s")


def _defined(method: Method, optimizer: Optimizer) -> bool:
    return method.fallback is not None or all(sync.objection(optimizer) is None for sync in method.syncs)


def _kinds(dtype: torch.dtype) -> list[tuple[Optimizer, list[tuple[str, Parameter]]]]:
    """Optimizers whose settings choose other kernels, each with a matrix and a vector."""

    def parameters() -> list[tuple[str, Parameter]]:
        shapes = {"weight": (200, 200), "bias": (200,)}
        return [(name, Parameter(torch.zeros(shape, dtype=dtype))) for name, shape in shapes.items()]

    def weights(named: list[tuple[str, Parameter]]) -> list[Parameter]:
        return [parameter for _, parameter in named]

    several = [parameters() for _ in range(6)]
    optimizers: list[Optimizer] = [
        torch.optim.SGD(weights(several[0]), lr=0.1),
        torch.optim.SGD(weights(several[1]), lr=0.1, momentum=0.9),
        torch.optim.SGD(weights(several[2]), lr=0.1, momentum=0.9, nesterov=True),
        torch.optim.Adam(weights(several[3])),
        torch.optim.AdamW(weights(several[4])),
        torch.optim.RMSprop(weights(several[5])),
    ]
    return list(zip(optimizers, several))
