"""Residuals, estimates and EControl on a noisy quadratic function: what is behind ef21's default.

Eight ranks, and a loss ½ Σ a (w − b)² on each, whose minima b are drawn for each rank, with curvatures a from 1/32 to
1. A rank's gradient has normal noise. The learning rate falls to a tenth after 60% of the steps; with a momentum of m,
it is times 1 − m, so that steps are as long. Prints how far the mean loss is from its minimum in the end: the median
over seeds and, with more than one, the least and the most.

- dense: the mean gradient.
- residual: each rank sends the largest of what waits (gradient_dropping).
- residual of velocity: the same of momentum (dgc without masking).
- ef21, literal: each rank sends the largest changes of its gradient since its estimate.
- ef21, momentum: the same of its velocity, the product's default.
- EControl: C(η·e + g − h) is sent, h is the estimate, and e what it has missed so far (Gao et al. 2024, algorithm 2).
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from runs import COMMIT, made_with, versions

Array = NDArray[np.float64]
RANKS, WEIGHTS, CONDITION, RATE, MOMENTUM = 8, 1000, 32, 0.1, 0.9


def largest(x: Array, k: int) -> Array:
    """Each rank's k largest magnitudes, `[ranks, weights]`, and zeros."""
    kept = np.zeros_like(x)
    at = np.argpartition(-np.abs(x), k - 1, axis=1)[:, :k]
    np.put_along_axis(kept, at, np.take_along_axis(x, at, axis=1), axis=1)
    return kept


def mean(x: Array) -> Array:
    """Over ranks."""
    found: Array = x.mean(0)
    return found


class Rule:
    """One method: from the ranks' gradients, `[ranks, weights]`, to the step that all share, `[weights]`."""

    def __init__(self, k: int, momentum: float = 0.0) -> None:
        self.k, self.momentum = k, momentum
        self.velocity, self.held, self.estimate = (np.zeros((RANKS, WEIGHTS)) for _ in range(3))

    def moving(self, gradients: Array) -> Array:
        """The velocities, in units of the gradient."""
        self.velocity = self.momentum * self.velocity + (1 - self.momentum) * gradients
        return self.velocity

    def step(self, gradients: Array) -> Array:
        """The mean of all."""
        return mean(self.moving(gradients))


class Residual(Rule):
    """What is not sent waits, and adds up."""

    def step(self, gradients: Array) -> Array:
        self.held += self.moving(gradients)
        sent = largest(self.held, self.k)
        self.held -= sent
        return mean(sent)


class Estimate(Rule):
    """EF21: changes are sent, and all step by the mean estimate."""

    def step(self, gradients: Array) -> Array:
        self.estimate += largest(self.moving(gradients) - self.estimate, self.k)
        return mean(self.estimate)


class EControl(Rule):
    """EF21 with a residual, of which a part η is sent."""

    def __init__(self, k: int, part: float) -> None:
        super().__init__(k)
        self.part = part

    def step(self, gradients: Array) -> Array:
        missing = gradients - self.estimate
        sent = largest(self.part * self.held + missing, self.k)
        self.held += missing - sent
        self.estimate += sent
        return mean(self.estimate)


RULES: dict[str, Callable[[int], Rule]] = {
    "dense": Rule,
    "residual": Residual,
    "residual of velocity": lambda k: Residual(k, MOMENTUM),
    "ef21, literal": Estimate,
    "ef21, momentum 0.9": lambda k: Estimate(k, MOMENTUM),
    "ef21, momentum 0.97": lambda k: Estimate(k, 0.97),
    "EControl, η = 0.01": lambda k: EControl(k, 0.01),
    "EControl, η = 0.1": lambda k: EControl(k, 0.1),
}


def distance(name: str, noise: float, density: float, steps: int, seed: int) -> float:
    """How far the mean loss is from its minimum after so many steps; infinite where they diverge."""
    draws = np.random.default_rng(seed)
    curvature = np.geomspace(1 / CONDITION, 1, WEIGHTS)
    minima = draws.standard_normal((RANKS, WEIGHTS))
    rule, weights = RULES[name](round(density * WEIGHTS)), np.zeros(WEIGHTS)
    for step in range(steps):
        gradients = curvature * (weights - minima) + noise * draws.standard_normal((RANKS, WEIGHTS))
        weights = weights - RATE * (1.0 if step < 0.6 * steps else 0.1) * rule.step(gradients)
        if not np.abs(weights).max() < 1e6:
            return float("inf")
    return float(0.5 * (curvature * (weights - minima.mean(0)) ** 2).sum())


def shown(found: list[float]) -> str:
    """The median, and the least and the most."""
    if len(found) > 1 and min(found) < 1e6:
        return f"{shown([statistics.median(found)])} ({shown([min(found)])} – {shown([max(found)])})"
    return f"{found[0]:.2g}" if found[0] < 1e6 else "diverged"


def main() -> None:
    """Runs all, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--noise", type=float, nargs="+", default=[0.0, 0.3, 3.0], help="standard deviations of a gradient's noise")
    add("--densities", type=float, nargs="+", default=[0.1, 0.01], metavar="P", help="fractions of elements to send")
    add("--steps", type=int, default=2000)
    add("--seeds", type=int, default=3)
    add("--output", type=Path, metavar="FILE", help="JSON file for all distances")
    options = parser.parse_args()
    stored = []
    print(f"| noise | density | {' | '.join(RULES)} |\n|---:|---:|{'---:|' * len(RULES)}")
    for noise in options.noise:
        for density in options.densities:
            found = {
                name: [distance(name, noise, density, options.steps, seed) for seed in range(options.seeds)]
                for name in RULES
            }
            stored.append({"noise": noise, "density": density, "distances": found})
            print(f"| {noise:g} | {density:.0%} | {' | '.join(map(shown, found.values()))} |", flush=True)
    print(f"\n{made_with([COMMIT])}")
    if options.output:
        options.output.write_text(json.dumps({**versions(), "commit": COMMIT, "rows": stored}, indent=2))


if __name__ == "__main__":
    main()
