"""`sparsecomm doctor`: versions, threads, memory and network of this machine, and what to change."""

import argparse
import importlib.metadata
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_sparsecomm import kernels as kernels_package

PACKAGES = "lightning-sparsecomm", "torch", "pytorch-lightning", "lightning", "torchmetrics", "numpy", "numba", "triton"


class Finding(NamedTuple):
    """Something about the machine: a line, and what to change; nothing where it is fine."""

    line: str
    remedy: str = ""


def add_to(subparsers: Any) -> None:
    """Adds the command to a parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="look for what makes training slow on this machine", description=__doc__
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Prints all findings, then what to change."""
    findings = [*versions(), *threads(os.environ), *memory(os.environ), *network(os.environ), *kernels()]
    for finding in findings:
        print(f"{'!' if finding.remedy else ' '} {finding.line}")
    remedies = [finding.remedy for finding in findings if finding.remedy]
    print()
    for remedy in remedies:
        print(f"! {remedy}")
    if not remedies:
        print("Nothing to change.")


def versions() -> Iterator[Finding]:
    """Python, and the packages that matter."""
    yield Finding(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in PACKAGES:
        try:
            yield Finding(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            if name != "triton":
                yield Finding(f"{name}: not installed")


def threads(environment: Mapping[str, str]) -> Iterator[Finding]:
    """torch's threads by the cores and the ranks that share them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each, text = torch.get_num_threads(), environment.get("LOCAL_WORLD_SIZE", "1") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            "LOCAL_WORLD_SIZE must be the number of ranks on this machine, as torchrun sets it; got"
            f" {text!r}. Unset it."
        )
    ranks = int(text)
    here = f"{ranks} rank{'s' if ranks != 1 else ''} on this machine by LOCAL_WORLD_SIZE"
    line = f"{cores} cores; torch uses {each} threads in each rank; {here}"
    if ranks * each > cores:
        best = max(1, cores // ranks)
        yield Finding(
            line, f"{ranks} ranks with {each} threads share {cores} cores: set OMP_NUM_THREADS={best} for each rank."
        )
    else:
        yield Finding(line)


def memory(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the allocator returns gradients to the system in each step."""
    preloaded = environment.get("LD_PRELOAD", "")
    if any(name in preloaded for name in ("jemalloc", "tcmalloc", "mimalloc")):
        yield Finding(f"allocator: {preloaded}")
    elif platform.libc_ver()[0] != "glibc":
        yield Finding("allocator: the system's")
    elif {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} <= environment.keys():
        yield Finding("allocator: glibc, keeps freed memory")
    else:
        yield Finding(
            "allocator: glibc, returns large freed tensors to the system",
            "gradients are freed and paged in again in each step: set MALLOC_TRIM_THRESHOLD_=4294967296"
            " MALLOC_MMAP_THRESHOLD_=33554432 in the environment of each rank, if memory allows.",
        )


def network(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The network card that Gloo and NCCL would use."""
    devices = [name for _, name in socket.if_nameindex()]
    chosen = environment.get("GLOO_SOCKET_IFNAME")
    # As for torch, an empty one counts for none.
    if chosen:
        missing = [name for name in chosen.split(",") if name not in devices]
        yield Finding(
            f"Gloo uses GLOO_SOCKET_IFNAME={chosen}; devices: {', '.join(devices)}",
            f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, which this machine does not have." if missing else "",
        )
        return
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = ""
    line = f"Gloo uses the address of {host}: {address or 'unknown'}; devices: {', '.join(devices)}"
    cards = [name for name in devices if name.startswith(("eth", "en", "ib", "wl"))]
    if address.startswith("127.") or not address:
        remedy = f"set GLOO_SOCKET_IFNAME={cards[0] if cards else 'DEVICE'} to train on several machines:"
        yield Finding(line, f"{remedy} other machines cannot reach {address or 'a host name without an address'}.")
    else:
        yield Finding(line)


def kernels() -> Iterator[Finding]:
    """The compiler, whether compiled kernels can be kept, and GPUs."""
    # Where numba looks for a place, in this order.
    places = [os.environ.get("NUMBA_CACHE_DIR"), str(Path(kernels_package.__file__).parent), str(Path.home())]
    kept = any(os.access(place, os.W_OK) for place in places if place)
    yield Finding(
        "kernels are compiled by numba, and " + ("kept" if kept else "cannot be kept"),
        "" if kept else "each process compiles kernels for seconds: set NUMBA_CACHE_DIR to a writable folder.",
    )
    if torch.cuda.is_available():
        yield Finding(f"{torch.cuda.device_count()} GPUs, CUDA {torch.version.cuda}")
    else:
        yield Finding("no GPU")
