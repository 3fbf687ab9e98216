"""What a step's parts cost on a GPU, next to copying the gradient there; what methods add to a step of GPT-2 small; and
how payloads travel best between two GPUs.

It needs one NVIDIA GPU, and a second one for the part about payloads. `--device cpu` tries it out without any, with
Gloo in the place of NCCL.

Steps are those of one rank, which sends itself what it would send to others: memories, selection, encoding, the
exchange with nobody, decoding. Of each other rank, a step decodes as much again. The model computes nothing: gradients
are random numbers.

Payloads can travel in two ways: by NCCL from GPU to GPU, which is what the strategies do, or by Gloo from memory that
both GPU and network card reach (pinned), with a copy before and after. Which is faster depends on the machines, so run
this where you train. Rows are timed in turns.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from runs import COMMIT, made_with, versions
from selection import layout_of, ours, torch_topk
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparsecomm import methods
from lightning_sparsecomm.basis import Layout, Round, Vector, Wire
from lightning_sparsecomm.basis.groups import destroy_all
from lightning_sparsecomm.codecs import (
    Auto,
    CountSketch,
    Float32,
    OneBit,
    RunLength16,
    SparseCodec,
    ThreeBit,
    TopK,
    TwoBit,
)
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method

Rows = dict[str, Callable[[int], object]]

WARM_UP = 3


def codecs(x: Tensor) -> Rows:
    """Encoding what the defaults select, and decoding it."""
    layout = Layout([("weight", tuple(x.shape))])
    context, rows = Round(layout), Rows()
    forms = {
        "0.1%, float32, fast positions": SparseCodec(TopK(0.001, "tensor"), Float32(), RunLength16()),
        "21%, three bits, short positions": SparseCodec(TopK(0.21, "tensor"), ThreeBit(), Auto()),
        "27%, two bits, short positions": SparseCodec(TopK(0.27, "tensor"), TwoBit(), Auto()),
        "40%, one bit, short positions": SparseCodec(TopK(0.4, "tensor"), OneBit(), Auto()),
    }
    for name, codec in forms.items():
        payload = codec.encode(Vector(x), context)
        rows[f"select and encode {name}"] = lambda _, codec=codec: codec.encode(Vector(x), context)  # type: ignore[misc]
        rows[f"decode {name}"] = lambda _, codec=codec, payload=payload: codec.decode(payload, layout.size)  # type: ignore[misc]
    return rows


def kernels(elements: int, device: torch.device) -> Rows:
    """All rows of one GPU."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(elements, generator=generator).to(device) for _ in range(2)]
    target = torch.zeros(elements, device=device)
    rows: Rows = {"copy_": lambda number: target.copy_(gradients[number % 2])}
    for shape, words in (("one", "one tensor"), ("many", "54 tensors")):
        layout = layout_of(shape, elements)
        views = [gradient[: layout.size] for gradient in gradients]
        rows[f"update and select 0.1%, {words}"] = ours(layout, views, 0.001, momentum=True)
        rows[f"the same with torch.topk, {words}"] = torch_topk(layout, views, 0.001, momentum=True)
    sketch = CountSketch(5, max(1, elements // 100))
    table = sketch.empty(device, torch.float32)
    rows["insert into a count sketch, 5 rows"] = lambda _: sketch.insert_(table, gradients[0], 1)
    rows["find its largest 3.6%"] = lambda _: sketch.largest(table, elements, int(0.036 * elements), 1)
    return rows | codecs(gradients[0])


def gpt2(width: int, layers: int) -> nn.Module:
    """The parameters of a GPT-2 of this size; small has a width of 768 and 12 layers, 124 million in 148 tensors."""
    model = nn.Module()
    shapes: list[tuple[int, ...]] = [(50257, width), (1024, width)]
    for _ in range(layers):
        for inputs, outputs in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
            shapes += [(outputs, inputs), (outputs,)]
        shapes += [(width,)] * 4
    for index, shape in enumerate([*shapes, (width,), (width,)]):
        model.register_parameter(f"weight_{index}", nn.Parameter(torch.randn(shape) / 50))
    return model


METHODS: dict[str, tuple[str, Callable[[], Method]]] = {
    "default, AdamW": ("adamw", lambda: methods.default()),
    "default, SGD": ("sgd", lambda: methods.default()),
    "dgc(0.001)": ("sgd", lambda: methods.dgc(0.001, warmup_steps=0)),
    "gradient_dropping(0.01)": ("adamw", lambda: methods.gradient_dropping(0.01)),
    "sketched_sgd(0.001)": ("sgd", lambda: methods.sketched_sgd(0.001)),
    "s2_reducer()": ("sgd", lambda: methods.s2_reducer()),
    "powersgd()": ("adamw", lambda: methods.powersgd()),
    "quantized()": ("adamw", lambda: methods.quantized()),
    "sparse_loco(every=1)": ("adamw", lambda: methods.sparse_loco(every=1)),
    "streaming_diloco(every=1)": ("adamw", lambda: methods.streaming_diloco(every=1, fragments=1, delay=0)),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
}


def step_of(optimizer: str, method: Method | None, model: nn.Module) -> Callable[[int], None]:
    """A whole optimizer step, with a method's exchange or with none."""
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight) / 100
    stepping = OPTIMIZERS[optimizer](model)
    if method is None:
        return lambda _: stepping.step()
    engine = Engine(method, Wire())
    engine.registry.add_module(model)
    engine.register(stepping)

    def step(_: int) -> None:
        with engine.stepping(stepping):
            engine.synchronize(stepping)
            stepping.step()

    return step


def peak_of(make: Callable[[], Callable[[int], None]], device: torch.device) -> tuple[Callable[[int], None], int]:
    """A step with its model, and the bytes of GPU memory that both take at most; 0 on a CPU."""
    if device.type != "cuda":
        return make(), 0
    # What the row before has left in cycles would be freed in between.
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    step = make()
    # A first step allocates the optimizer's state.
    step(0)
    torch.cuda.reset_peak_memory_stats(device)
    step(1)
    return step, torch.cuda.max_memory_allocated(device) - before


def steps(
    device: torch.device, rounds: int, width: int, layers: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, int]]]:
    """Milliseconds and peak bytes of optimizer steps with each method, and of the same steps with none."""
    found, peaks = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        for name, (optimizer, method) in METHODS.items():
            rows: Rows = {}
            peaks[name] = {}
            for row, used in (("alone", None), ("with it", method())):
                made = partial(step_of, optimizer, used)
                rows[row], peaks[name][row] = peak_of(lambda made=made: made(gpt2(width, layers).to(device)), device)
            found[name] = timed(rows, rounds, device)
        destroy_all()
    return found, peaks


def timed(rows: Rows, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each call of each row, until the device has done it."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(WARM_UP + rounds):
        for name, call in rows.items():
            finish(device)
            begin = time.perf_counter()
            call(number)
            finish(device)
            if number >= WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def finish(device: torch.device) -> None:
    """Waits for what was started on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ways(payload: Tensor, beside: dist.ProcessGroup) -> Rows:
    """Both ways of gathering one payload from all ranks, to where it is decoded."""
    gathered = [torch.empty_like(payload) for _ in range(dist.get_world_size())]
    pinned = payload.device.type == "cuda"
    own = torch.empty(payload.shape, dtype=torch.uint8, pin_memory=pinned)
    others = [torch.empty_like(own, pin_memory=pinned) for _ in gathered]

    def through_pinned(_: int) -> None:
        own.copy_(payload)
        dist.all_gather(others, own, group=beside)
        for mine, other in zip(gathered, others):
            mine.copy_(other, non_blocking=True)

    return {
        dist.get_backend(): lambda _: dist.all_gather(gathered, payload),
        "pinned memory and gloo": through_pinned,
    }


def transport(rank: int, world_size: int, store: str, kind: str, rounds: int, folder: str) -> None:
    """One rank: times both ways for payloads of several sizes."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    beside = dist.new_group(backend="gloo")
    found = {}
    for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24):
        payload = torch.full((size,), rank, dtype=torch.uint8, device=device)
        found[size] = timed(ways(payload, beside), rounds, device)
    if rank == 0:
        (Path(folder) / "transport.json").write_text(json.dumps(found))
    destroy_all()


def compare_ways(kind: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by size and way, between two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(transport, (2, os.path.join(folder, "store"), kind, rounds, folder), nprocs=2)
        found: dict[str, dict[str, list[float]]] = json.loads((Path(folder) / "transport.json").read_text())
        return found


def report(times: dict[str, list[float]], base: str) -> list[str]:
    """A table's lines: medians, spreads, and multiples of one row's median."""
    usual = statistics.median(times[base])
    return [
        f"| {name} | {statistics.median(each):.3f} | {min(each):.3f} – {max(each):.3f} |"
        f" {statistics.median(each) / usual:.2f} |"
        for name, each in times.items()
    ]


def report_steps(times: dict[str, dict[str, list[float]]], peaks: dict[str, dict[str, int]], model: int) -> list[str]:
    """A table's lines: medians of steps without and with each method, what it adds, and to the peak of memory.

    Memory is in sizes of the model's float32 weights, of which there are `model`.
    """
    lines = []
    for name, rows in times.items():
        alone, ours = (statistics.median(rows[row]) for row in ("alone", "with it"))
        spread = f"{min(rows['with it']):.2f} – {max(rows['with it']):.2f}"
        more = (peaks[name]["with it"] - peaks[name]["alone"]) / (4 * model)
        lines.append(f"| {name} | {alone:.2f} | {ours:.2f} | {spread} | {ours - alone:.2f} | {more:.1f} |")
    return lines


def main() -> None:
    """Runs what this machine allows, and says what it leaves out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--elements", type=int, default=25_000_000, metavar="N", help="length of the gradient, float32")
    add("--rounds", type=int, default=15, metavar="N", help=f"timed calls of each row, after {WARM_UP} that warm up")
    add("--gpt2", type=int, nargs=2, default=[768, 12], metavar=("WIDTH", "LAYERS"), help="size of the model of steps")
    add("--output", type=Path, metavar="FILE", help="JSON file for all times")
    options = parser.parse_args()
    found = torch.cuda.device_count()
    if options.device == "cuda" and not found:
        parser.error("--device cuda needs an NVIDIA GPU, and torch finds none. Try it out with --device cpu.")
    device = torch.device(options.device)
    where = torch.cuda.get_device_name(device) if options.device == "cuda" else "the CPU"

    print(f"{options.elements:,} float32 on {where}; ms, median of {options.rounds}\n")
    print("| row | median | least – most | of copy_ |\n|---|---:|---:|---:|")
    parts = timed(kernels(options.elements, device), options.rounds, device)
    print("\n".join(report(parts, "copy_")))

    model = gpt2(*options.gpt2)
    sizes = [weight.numel() for weight in model.parameters()]
    print(f"\nOptimizer steps of {sum(sizes):,} parameters in {len(sizes)} tensors\n")
    print("| method | step alone | with it | least – most | it adds | peak memory, model sizes |")
    print("|---|---:|---:|---:|---:|---:|")
    whole, peaks = steps(device, options.rounds, *options.gpt2)
    print("\n".join(report_steps(whole, peaks, sum(sizes))))

    payloads: dict[str, dict[str, list[float]]] = {}
    if options.device == "cuda" and found < 2:
        print("\nPayloads between GPUs: left out, since torch finds one GPU, and it takes two.")
    else:
        payloads = compare_ways(options.device, options.rounds)
        print("\n| payload, two ranks | median | least – most | of the first |\n|---|---:|---:|---:|")
        for size, times in payloads.items():
            rows = {f"{int(size):,} bytes, {way}": each for way, each in times.items()}
            print("\n".join(report(rows, next(iter(rows)))))
    print(f"\n{made_with([COMMIT])} torch {torch.__version__}")
    if options.output:
        times = {"ms": parts, "step_ms": whole, "peak_bytes": peaks, "parameters": sum(sizes), "payload_ms": payloads}
        stored = {"device": where, **versions(), "commit": COMMIT, **times}
        options.output.write_text(json.dumps(stored, indent=2))


if __name__ == "__main__":
    main()
