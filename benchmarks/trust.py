"""Attacks on training, as often as asked, and what each led to.

Each attack has a short form among the tests. Outcomes are counted in a JSON file; docs/trust.md explains them. An
outcome that must not be is an error, after all attacks have run.

    python benchmarks/trust.py kills --count 200
    python benchmarks/trust.py configurations --count 2000
    python benchmarks/trust.py configurations --count 300 --names ddp
    python benchmarks/trust.py payloads --count 10000000
    python benchmarks/trust.py collectives --count 1000
    python benchmarks/trust.py uneven --count 10
    python benchmarks/trust.py files --count 8
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Ranks are forked: no thread pool may start before.
torch.set_num_threads(1)

from benchmarks.runs import COMMIT, versions  # noqa: E402
from lightning_sparsecomm.commands import warm  # noqa: E402
from tests.codecs import test_fuzz  # noqa: E402
from tests.distributed import test_altered_collectives as altered  # noqa: E402
from tests.distributed import test_crash as crash  # noqa: E402
from tests.distributed import test_random_configurations as configured  # noqa: E402
from tests.distributed import test_uneven_batches as unevenly  # noqa: E402
from tests.run import test_rank_files as rank_files  # noqa: E402

Outcomes = dict[str, Counter[str]]
"""For each method, or the like, how often it came to what."""


def kills(folder: Path, count: int, names: list[str]) -> Iterator[tuple[str, str]]:
    """All ranks are killed at `count` random moments of one training, and resumed."""
    # Ranks are forked: kernels that are loaded here are not loaded again after each kill.
    warm.run(argparse.Namespace(methods=None, dtypes=["float32"]))
    for name in names or ["ddp", *(name for name in crash.CASES if name not in crash.LEFT_OUT)]:
        place = folder / name.replace(" ", "_")
        place.mkdir(parents=True)
        crash._killed_and_not(place, crash.DDP if name == "ddp" else name, count)
        for _ in range(count):
            yield name, "ended with the bits of a run that was never killed"


def configurations(folder: Path, count: int, names: list[str]) -> Iterator[tuple[str, str]]:
    """Random trainings, with events in them, on two to four ranks; or only those of ddp, if named."""
    for world_size in (2, 3, 4):
        numbers = [number for number in range(count) if number % 3 == world_size - 2]
        if "ddp" in names:
            yield from (("ddp", configured.outcome_with_ddp(folder, world_size, number)) for number in numbers)
            continue
        for i in range(0, len(numbers), 10):
            some = numbers[i : i + 10]
            trained = configured._all_end_alike(folder, world_size, some)
            yield from [(f"{world_size} ranks", "trained alike")] * trained
            yield from [(f"{world_size} ranks", "refused alike")] * (len(some) - trained)


def payloads(folder: Path, count: int, names: list[str]) -> Iterator[tuple[str, str]]:
    """Altered bytes for the decoder; one in 20 also for the reference, with its time and memory."""
    each = 100_000
    for seed in range(-(-count // each)):
        size = min(each, count - seed * each)
        test_fuzz.loop(seed, size, thorough_every=20)
        yield from [("all codecs", "refused or sound")] * size


def collectives(folder: Path, count: int, names: list[str]) -> Iterator[tuple[str, str]]:
    """What one rank receives in one collective is altered."""
    for name in names or ["ddp", *altered.METHODS]:
        for seed in range(count):
            yield name, altered.outcome_of(folder, name, seed)


def uneven(folder: Path, count: int, names: list[str]) -> Iterator[tuple[str, str]]:
    """One rank has one batch more than the other."""
    for name in names or ["ddp", *unevenly.METHODS]:
        for number in range(count):
            for validates in (True, False):
                yield name, unevenly.outcome_of(folder, name, validates, more=number % 2)


def files(folder: Path, count: int, names: list[str]) -> Iterator[tuple[str, str]]:
    """A rank's file with each of its bytes altered, in `count` different bits."""
    for bit in range(min(count, 8)):
        for outcome, times in rank_files.altered_bytes(folder, mask=1 << bit).items():
            yield from [("a rank's file", outcome)] * times


ATTACKS: dict[str, Callable[[Path, int, list[str]], Iterator[tuple[str, str]]]] = {
    attack.__name__: attack for attack in (kills, configurations, payloads, collectives, uneven, files)
}

FAILURES = ("silent", "hung or aborted", "Error:")
"""Outcomes that must not be, with any method of ours."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("--count", type=int, default=10, help="how often, for each method or the like")
    parser.add_argument("--names", nargs="*", default=[], help="methods; all by default")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder of trust-ATTACK.json")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    outcomes: Outcomes = {}
    begin, made_with, written = time.monotonic(), versions(), 0.0

    def write() -> None:
        result = {
            "attack": options.attack,
            "count": options.count,
            "outcomes": outcomes,
            "seconds": round(time.monotonic() - begin),
            "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": COMMIT,
            "versions": made_with,
        }
        (options.output / f"trust-{options.attack}.json").write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        for name, outcome in ATTACKS[options.attack](Path(folder), options.count, options.names):
            outcomes.setdefault(name, Counter())[outcome] += 1
            # As it goes: some attacks take hours.
            if time.monotonic() - written > 10:
                write()
                written = time.monotonic()
    write()
    for name, found in outcomes.items():
        for outcome, times in found.most_common():
            print(f"| {name} | {times:,} | {outcome} |")
    wrong = [name for name, found in outcomes.items() if name != "ddp" and any(f in o for f in FAILURES for o in found)]
    if wrong:
        sys.exit(f"not as it must be: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
