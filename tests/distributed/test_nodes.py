"""Two levels: what ranks of one node do is what one rank with their mean gradient would do."""

import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsecomm import methods
from lightning_sparsecomm.basis.ledger import GRADIENTS, INSIDE
from lightning_sparsecomm.basis.wire import Wire
from lightning_sparsecomm.exchange.status import NonFiniteGradientError
from lightning_sparsecomm.run import inside, node_memory
from lightning_sparsecomm.run.contents import State, mean_with
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.run.node_turns import advice, divide, groups_of
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.pytorch_lightning import ElasticSparseCommStrategy, SparseCommStrategy
from lightning_sparsecomm.testing import run_ranks
from tests import laws
from tests.distributed.launch import QUIET
from tests.distributed.scenarios import CLASSES, FEATURES, SCENARIOS, fit
from tests.distributed.summed import in_regions

SHAPES = [(30, 7), (30,), (5, 3, 2), (1,), (40, 6), (64,)]
STEPS = 8

Groups = list[list[int]]
Optimizing = Callable[[nn.ParameterList], torch.optim.Optimizer]


class Trained(NamedTuple):
    """What a rank ends with.

    Attributes:
        weights: After each step.
        held: Names of the parameters that it holds a residual for.
        handed: Bytes that it has handed over, by row of the ledger.
        ledger: Bytes on the link, by row.
        state: Of the run.
        optimizer: Its state.
    """

    weights: list[list[np.ndarray]]
    held: list[str]
    handed: dict[str, int]
    link: dict[str, float]
    state: State
    optimizer: dict[str, Any]


def gradients_of(rank: int, step: int) -> list[np.ndarray | None]:
    """A rank's own gradients. Sometimes a rank has none for a parameter, and in step 3 no rank has one for the last.

    They are multiples of 3/128, so that means of two and of three are exact, in any order.
    """
    random = np.random.default_rng([rank, step])
    gradients: list[np.ndarray | None] = [
        (np.round(random.standard_normal(shape) * 32) * 3 / 64).astype(np.float32) for shape in SHAPES
    ]
    if (rank + step) % 3 == 0:
        gradients[1] = None
    if step == 3:
        gradients[5] = None
    return gradients


def node_mean(ranks: list[int], step: int) -> list[np.ndarray | None]:
    """As a node's ranks average: each divides, and then they sum. A gradient that one of them lacks counts as zero."""
    means: list[np.ndarray | None] = []
    for parts in zip(*(gradients_of(rank, step) for rank in ranks)):
        here = [part / np.float32(len(ranks)) for part in parts if part is not None]
        means.append(sum(here[1:], here[0]) if here else None)
    return means


def sgd(module: nn.ParameterList) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def adamw(module: nn.ParameterList) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def make(
    method: Method, groups: Groups, nodes: bool, adam: bool | Optimizing, **options: Any
) -> tuple[Engine, nn.ParameterList, Any]:
    torch.manual_seed(3)
    module = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])
    engine = Engine(method, Wire.apart(), **options)
    engine.registry.add_module(module)
    engine.registry.check()
    engine.agreement.on_setup()
    if nodes:
        divide(engine, groups, 0)
    optimizer = adam(module) if callable(adam) else (adamw if adam else sgd)(module)
    engine.length = STEPS
    engine.register(optimizer)
    return engine, module, optimizer


def step(engine: Engine, module: nn.ParameterList, optimizer: Any, gradients: list[np.ndarray | None]) -> None:
    for parameter, gradient in zip(module, gradients):
        parameter.grad = None if gradient is None else torch.from_numpy(gradient.copy())
    with engine.stepping(optimizer):
        engine.synchronize(optimizer)
        optimizer.step()


def train(
    rank: int,
    method: Method,
    groups: Groups,
    nodes: bool,
    adam: bool | Optimizing = False,
    steps: range = range(STEPS),
    state: list[tuple[State, Any, Any]] | None = None,
) -> Trained:
    """With `nodes`, each rank has its own gradients; without, each rank is a node and has its mean."""
    engine, module, optimizer = make(method, groups, nodes, adam)
    if state is not None:
        saved, weights, of_optimizer = state[rank]
        for parameter, weight in zip(module, weights):
            parameter.data.copy_(torch.from_numpy(weight))
        optimizer.load_state_dict(of_optimizer)
        assert engine.state.load_state_dict(saved, as_many_ranks=True) == []
    after: list[list[np.ndarray]] = []
    for number in steps:
        step(engine, module, optimizer, gradients_of(rank, number) if nodes else node_mean(groups[rank], number))
        after.append([parameter.detach().numpy().copy() for parameter in module])
    engine.settle()
    after.append([parameter.detach().numpy().copy() for parameter in module])
    ledger, saved = engine.wire.ledger, engine.state.state_dict()
    (stream,) = saved["streams"]
    kinds = {kind: parts for kind, parts in stream["held"].items() if kind.startswith("GradientSync")}
    # Exchanges hold nothing of a single parameter.
    names = {name for kind, parts in kinds.items() if kind != "GradientSync.Sparse" for name in parts}
    trained = Trained(
        after,
        sorted(names),
        {row: ledger.handed_bytes(row) for row in ledger.rows},
        {row: ledger.link_bytes(row) for row in ledger.rows},
        saved,
        optimizer.state_dict(),
    )
    engine.close()
    return trained


def in_parts(method: Method, per_node: int) -> Method:
    """The method with a sync for each part that a rank of a node has: the largest parameters first, to the smallest."""
    sizes, owners = [0] * per_node, {}
    for number in sorted(range(len(SHAPES)), key=lambda each: -int(np.prod(SHAPES[each]))):
        owners[str(number)] = place = sizes.index(min(sizes))
        sizes[place] += int(np.prod(SHAPES[number]))
    named = [(str(number), nn.Parameter(torch.empty(shape))) for number, shape in enumerate(SHAPES)]
    syncs = []
    for sync, piece in method.parts(named):
        for place in range(per_node):
            names = [name for name, _ in piece if owners[name] == place]
            if names:
                syncs.append(sync.limited(names))
                syncs[-1].rest = False
    return method.with_syncs(syncs)


METHODS: dict[str, tuple[Method, bool]] = {
    "dgc": (methods.dgc(density=0.1), False),
    "dgc, clipped": (methods.dgc(density=0.1, clip=0.5, scope="tensor"), False),
    "default": (methods.default(), False),
    "default, adam": (methods.default().fallback, True),
    "gradient_dropping": (methods.gradient_dropping(density=0.1, values="float16"), False),
    "dgc, regions": (in_regions(methods.dgc(density=0.1, warmup_steps=0)), False),
    "powersgd": (methods.powersgd(rank=2), False),
    "quantized": (methods.quantized(), False),
    "random_k": (methods.random_k(0.1), False),
    "ok_topk": (methods.ok_topk(0.1), False),
    "aligned_topk": (methods.aligned_topk(0.1, block_size=8), False),
    "ef21": (methods.ef21(0.1), False),
    "ef21, adam": (methods.ef21(0.1).fallback, True),
    "demo": (methods.demo(k=4, side=8), False),
    "sketched_sgd": (methods.sketched_sgd(0.05, columns=40, candidates=4), False),
    "s2_reducer": (methods.s2_reducer(block_density=0.2, block_size=8), False),
    "qsgd": (methods.qsgd(), False),
    "terngrad": (methods.terngrad(), False),
    "natural": (methods.natural(), False),
    "onebit_sgd": (methods.onebit_sgd(), False),
    "ef_signsgd": (methods.ef_signsgd(), False),
    "signsgd": (methods.signsgd(), False),
    "strom": (methods.strom(0.1), False),
    "dryden": (methods.dryden(0.1), False),
    "adacomp": (methods.adacomp(bin_size=20), False),
    "parallax": (methods.parallax(tables=["0"]), False),
    "omnireduce": (methods.omnireduce(block_density=0.5, block_size=8), False),
    "sparcml": (methods.sparcml(density=0.2, bucket=32), False),
    "heavymix": (methods.sketched_sgd(0.1, columns=40, recovery="heavymix"), False),
    "onebit_adam": (methods.onebit_adam(warmup_steps=3), True),
}
# Two nodes, adjacent or interleaved; three nodes; three ranks on a node; ranks in any order.
NODES: list[Groups] = [
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    [[0, 1], [2, 3], [4, 5]],
    [[0, 1, 2], [3, 4, 5]],
    [[1, 0], [3, 2]],
]
QUICK = "dgc, clipped", "default", "default, adam", "powersgd"


def cases() -> Iterator[Any]:
    for name in METHODS:
        for groups in NODES:
            quick = (name in QUICK and groups == NODES[1]) or (name in ("dgc", "quantized") and groups in NODES[2:])
            yield pytest.param(name, groups, marks=() if quick else pytest.mark.slow, id=f"{name}, {groups}")


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "groups"), list(cases()))
def test_a_node_is_one_rank(name: str, groups: Groups) -> None:
    method, adam = METHODS[name]
    ours = run_ranks(sum(map(len, groups)), train, method, groups, True, adam)
    theirs = run_ranks(len(groups), train, in_parts(method, len(groups[0])), groups, False, adam)
    # Three nodes' parts may be added in another order, and so may the squares of a norm.
    tolerance = 1e-5 if len(groups) == 3 else 1e-6 if "clipped" in name else 0.0
    for one in ours:
        for mine, other in zip(one.weights, theirs[0].weights, strict=True):
            for own, expected in zip(mine, other, strict=True):
                np.testing.assert_allclose(own, expected, rtol=0, atol=tolerance)
    for mine in ours[1:]:
        for own, expected in zip(mine.weights[-1], ours[0].weights[-1], strict=True):
            np.testing.assert_array_equal(own, expected)


TWO = NODES[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_node_sends_what_one_rank_would(in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_memory:
        monkeypatch.setattr(node_memory, "FOLDER", "/nowhere")
    method = methods.dgc(density=0.1)
    ours = run_ranks(4, train, method, TWO, True)
    (theirs, _) = run_ranks(2, train, in_parts(method, 2), TWO, False)
    for group in TWO:
        assert sum(ours[rank].handed[GRADIENTS] for rank in group) == theirs.handed[GRADIENTS]
    for one in ours:
        # An all-gather between two nodes, and twice the half of whole gradients and weights inside.
        assert one.link[GRADIENTS] == one.handed[GRADIENTS]
        over_wire = 4 * sum(int(np.prod(shape)) for shape in SHAPES) * STEPS
        assert one.link[INSIDE] < over_wire / 50 if in_memory else one.link[INSIDE] > over_wire
    # Every parameter is held by one rank of each node.
    names = [str(number) for number in range(len(SHAPES))]
    for group in TWO:
        assert sorted(name for rank in group for name in ours[rank].held) == names
    assert ours[TWO[0][0]].held == ours[TWO[1][0]].held


@pytest.mark.few(1)
@pytest.mark.parametrize("padded", [1.5, 0.2])
def test_rows_over_the_wire_have_the_bits_of_those_in_memory(padded: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In stretches too, as where one tensor is most of the model: whole rows, padded, would need much memory."""
    method, nodes = methods.dgc(density=0.1), [[0, 1, 2], [3, 4, 5]]
    in_memory = run_ranks(6, train, method, nodes, True)
    monkeypatch.setattr(node_memory, "FOLDER", "/nowhere")
    monkeypatch.setattr(inside, "_PADDED", padded)
    for one, other in zip(in_memory, run_ranks(6, train, method, nodes, True), strict=True):
        for own, expected in zip(one.weights, other.weights, strict=True):
            for mine, theirs in zip(own, expected, strict=True):
                np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("sizes", [(1000, 10, 10), (1000, 0, 0), (340, 341, 339), (7, 0, 1)])
def test_rows_need_memory_of_one_and_a_half_times_what_they_hold(sizes: tuple[int, ...]) -> None:
    piece = inside.Piece([[torch.empty(size)] for size in sizes], Mock(inside=Mock(rank=0)), torch.float32)
    assert [at for each in piece._stretches for at in range(each.start, each.stop)] == list(range(max(sizes)))
    longest = max(each.stop - each.start for each in piece._stretches)
    assert longest * len(sizes) <= 1.5 * sum(sizes) + len(sizes)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "adam"), [(methods.default(), False), (methods.default(), True)], ids=["sgd", "adam"]
)
def test_a_resumed_run_is_the_run_that_never_stopped(method: Method, adam: bool) -> None:
    whole = run_ranks(4, train, method, TWO, True, adam)
    first = run_ranks(4, train_a_part, method, TWO, adam)
    second = run_ranks(4, train, method, TWO, True, adam, range(STEPS // 2, STEPS), first)
    for one, other in zip(whole, second):
        for own, expected in zip(one.weights[-1], other.weights[-1], strict=True):
            np.testing.assert_array_equal(own, expected)


def train_a_part(
    rank: int, method: Method, groups: Groups, adam: bool | Optimizing, steps: int = STEPS // 2
) -> tuple[State, Any, Any]:
    """State, weights and the optimizer's state after some of the steps."""
    engine, module, optimizer = make(method, groups, True, adam)
    for number in range(steps):
        step(engine, module, optimizer, gradients_of(rank, number))
    saved = pickle.dumps(
        (engine.state.state_dict(), [each.detach().numpy() for each in module], optimizer.state_dict())
    )
    engine.close()
    return pickle.loads(saved)


@pytest.mark.few(2)
@pytest.mark.parametrize("nodes", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1], [2, 3]]], ids=str)
def test_on_other_nodes_a_run_begins_with_the_mean_of_what_nodes_have_not_sent(nodes: Groups) -> None:
    method = methods.dgc(density=0.01, momentum_correction=False)
    saved = [state for state, _, _ in run_ranks(4, train_a_part, method, TWO, False)]
    held = [residuals(state) for state in saved]
    mean = saved[0]
    for count, state in enumerate(saved[1:], start=2):
        mean = mean_with(mean, state, count)
    loaded = run_ranks(4, load, method, nodes, mean)
    for name in set().union(*held):
        # That of a node is where one of its ranks has it.
        expected = sum(parts[name] for parts in held if name in parts) / 2
        assert float(expected.abs().sum()) > 0
        holders = [parts[name] for parts in loaded if name in parts]
        assert len(holders) == len(nodes)
        for part in holders:
            torch.testing.assert_close(part, expected)


Stages = tuple[State, list[np.ndarray]]


def train_in_stages(rank: int, method: Method, saved: Stages | None) -> Stages:
    """Two optimizers: of a run that begins, the second one steps first; one that resumes knows both at once."""
    torch.manual_seed(3)
    module = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])
    engine = Engine(method, Wire.apart())
    engine.registry.add_module(module)
    engine.registry.check()
    divide(engine, TWO, 0)
    optimizers = [sgd(nn.ParameterList(list(module)[part])) for part in (slice(3), slice(3, None))]
    for optimizer in optimizers:
        engine.register(optimizer)
    if saved is not None:
        state, weights = pickle.loads(pickle.dumps(saved))
        for parameter, weight in zip(module, weights):
            parameter.data.copy_(torch.from_numpy(weight))
        assert engine.state.load_state_dict(state, as_many_ranks=True) == []
    for number in range(2):
        for optimizer in reversed(optimizers):
            step(engine, module, optimizer, gradients_of(rank, number))
    state = pickle.loads(pickle.dumps(engine.state.state_dict()))
    engine.close()
    return state, [each.detach().numpy() for each in module]


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [methods.gradient_dropping(0.05), methods.diloco(every=2)], ids=repr)
def test_what_trains_later_does_not_change_who_has_what(method: Method) -> None:
    """A run divides alike, in whatever order optimizers have begun: what a rank has saved, it can load."""
    begun = run_ranks(4, train_in_stages, method, None)

    def resume(rank: int) -> Stages:
        return train_in_stages(rank, method, begun[rank])

    resumed = run_ranks(4, resume)
    for (before, _), (after, weights) in zip(begun, resumed):
        for old, new in zip(before["streams"], after["streams"], strict=True):
            for kind, parts in old["held"].items():
                assert parts.keys() == new["held"][kind].keys()
        for one, other in zip(weights, resumed[0][1]):
            np.testing.assert_array_equal(one, other)


def residuals(state: State) -> dict[str, torch.Tensor]:
    found = state["streams"][0]["held"].get("GradientSync.ErrorFeedback", {})
    return {name: part.clone() for name, part in found.items()}


def load(rank: int, method: Method, nodes: Groups, state: State) -> dict[str, torch.Tensor]:
    with pytest.warns(match="all ranks are on one node") if len(nodes) == 1 and not rank else nullcontext():
        engine, _, _ = make(method, nodes, True, False)
    assert engine.state.load_state_dict(pickle.loads(pickle.dumps(state)), as_many_ranks=False) == []
    found = residuals(engine.state.state_dict())
    engine.close()
    return found


def test_what_is_not_finite_on_one_rank_stops_all_before_anything_changes() -> None:
    def run(rank: int) -> tuple[str, list[np.ndarray], list[np.ndarray]]:
        engine, module, optimizer = make(methods.dgc(density=0.1), TWO, True, False)
        step(engine, module, optimizer, gradients_of(rank, 1))
        before = [each.detach().numpy().copy() for each in module]
        bad = gradients_of(rank, 2)
        if rank == 3:
            bad[4] = np.full(SHAPES[4], np.inf, np.float32)
        with pytest.raises(NonFiniteGradientError) as caught:
            step(engine, module, optimizer, bad)
        after = [each.detach().numpy().copy() for each in module]
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other)
        step(engine, module, optimizer, gradients_of(rank, 2))
        again = [each.detach().numpy().copy() for each in module]
        engine.close()
        return str(caught.value), after, again

    def without(rank: int) -> list[np.ndarray]:
        engine, module, optimizer = make(methods.dgc(density=0.1), TWO, True, False)
        for number in (1, 2):
            step(engine, module, optimizer, gradients_of(rank, number))
        engine.close()
        return [each.detach().numpy().copy() for each in module]

    for (words, _, again), expected in zip(run_ranks(4, run), run_ranks(4, without), strict=True):
        assert "parameter '4' in step 1" in words
        for one, other in zip(again, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_an_exchange_that_fails_on_one_rank_of_each_node_aborts_on_all() -> None:
    def run(rank: int) -> None:
        engine, module, optimizer = make(methods.dgc(density=0.1), TWO, True, False)
        step(engine, module, optimizer, gradients_of(rank, 1))
        (tracked,) = engine.registry.optimizers
        before = [engine.residual_norm(), *(each.detach().numpy().copy() for each in module)]
        # Ranks 0 and 1 have the same parameters: they exchange, and find the result to be damaged.
        share = next(iter(tracked.shares.values()))
        exchange = share.exchange
        if rank in (0, 1):
            share.exchange = lambda: (exchange(), int("damaged"))  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="damaged"):
            step(engine, module, optimizer, gradients_of(rank, 2))
        after = [engine.residual_norm(), *(each.detach().numpy() for each in module)]
        for one, other in zip(before, after, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
        assert not engine.state.state_dict()["torn"]
        engine.close()

    run_ranks(4, run)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ("all", 'nodes must be "auto", or the ranks of each node'),
        ([0, 1], 'nodes must be "auto", or the ranks of each node'),
        ([[0, True]], 'nodes must be "auto", or the ranks of each node'),
        ([], 'nodes must be "auto", or the ranks of each node'),
        ([[0, 1], []], 'nodes must be "auto", or the ranks of each node'),
    ],
)
def test_what_is_no_list_of_nodes_is_refused_at_once(nodes: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        SparseCommStrategy(methods.dgc(), nodes=nodes)


@pytest.mark.parametrize(
    ("method", "nodes", "words"),
    [
        (methods.dgc(), [[0], [2]], "nodes must have each of the ranks 0 to 2 once"),
        (methods.dgc(), [[0, 1], [1, 2]], "nodes must have each of the ranks 0 to 2 once"),
        (methods.dgc(), [[0, 1], [2]], "nodes must have equally many ranks; got 1 and 2 of them"),
        (methods.dense(), [[0, 1, 2]], "nodes must be left out unless"),
        (methods.dgc(delay=1), [[0, 1, 2]], "nodes must be left out unless"),
        (methods.dgc(every=2), [[0, 1, 2]], "nodes must be left out unless"),
        (methods.dgc(residual_in_weights=True), [[0, 1, 2]], "residuals in weights"),
        (methods.gradient_dropping(local="partial"), [[0, 1, 2]], "nodes must be left out unless"),
    ],
)
def test_what_nodes_cannot_do_is_refused_on_all_ranks(method: Method, nodes: Groups, words: str) -> None:
    def run(rank: int) -> str:
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=words) as caught:
            make(method, nodes, True, False)
        return str(caught.value)

    assert len(set(run_ranks(3, run))) == 1


@pytest.mark.parametrize(
    ("method", "hosts", "per_host", "told"),
    [
        (methods.default(), 2, 4, True),
        (methods.default(), 1, 4, False),
        (methods.default(), 4, 1, False),
        (methods.sbc(), 2, 4, True),
        (methods.dgc(delay=1), 2, 4, False),
    ],
)
def test_several_ranks_on_each_machine_are_told_of_nodes(method: Method, hosts: int, per_host: int, told: bool) -> None:
    lines = run_ranks(1, lambda rank: advice(Engine(method, Wire()).registry, hosts, per_host))[0]
    assert [("4 ranks on each machine" in line, "nodes='auto'" in line) for line in lines] == [(True, True)] * told


def test_ranks_that_name_other_nodes_are_refused() -> None:
    def run(rank: int) -> str:
        engine = Engine(methods.dgc(), Wire())
        engine.agreement.arguments["nodes"] = [[0, 1]] if rank else None
        with pytest.raises(ValueError, match=r"nodes must be equal on all ranks; got None on rank 0; .* on rank 1"):
            engine.agreement.on_setup()

    run_ranks(2, run)


def test_replicas_that_come_and_go_have_no_nodes() -> None:
    pytest.importorskip("torchft", reason="the extra `elastic` has wheels for Linux on x86-64 and Python below 3.14")
    with pytest.raises(ValueError, match="nodes must be left out with replicas that come and go"):
        ElasticSparseCommStrategy(lighthouse="http://localhost:1", nodes="auto")


def test_nodes_are_those_of_machines_by_default() -> None:
    def run(rank: int) -> Groups:
        return groups_of("auto", Wire(), [7, 0, 7, 0][rank], torch.device("cpu"))

    assert run_ranks(4, run) == [[[0, 2], [1, 3]]] * 4


@pytest.mark.few(1)
@pytest.mark.parametrize("nodes", [[[1, 0], [3, 2]], [[2, 3], [0, 1]], [[3, 0], [2, 1]]], ids=str)
def test_the_order_of_nodes_and_of_their_ranks_does_not_matter(nodes: Groups) -> None:
    method = methods.default()
    found = run_ranks(4, train, method, nodes, True)
    expected = run_ranks(4, train, method, sorted(sorted(group) for group in nodes), True)
    for one, other in zip(found, expected, strict=True):
        for own, theirs in zip(one.weights[-1], other.weights[-1], strict=True):
            np.testing.assert_array_equal(own, theirs)


def test_an_optimizer_of_empty_parameters_has_nothing_to_exchange() -> None:
    def run(rank: int) -> None:
        engine = Engine(methods.dgc(), Wire())
        module = nn.ParameterList([nn.Parameter(torch.empty(0, 4))])
        engine.registry.add_module(module)
        divide(engine, TWO, 0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine.register(optimizer)
        with engine.stepping(optimizer):
            engine.synchronize(optimizer)
            optimizer.step()
        engine.settle()
        engine.close()

    run_ranks(4, run)


def test_the_optimizers_state_has_local_moments_of_this_ranks_matrices_only() -> None:
    # The moments of vectors are those of the shared gradient, on all ranks.
    vectors = {str(number) for number, shape in enumerate(SHAPES) if len(shape) == 1}
    for one in run_ranks(4, train, methods.default().fallback, TWO, True, True):
        assert {str(number) for number in one.optimizer["state"]} == set(one.held) | vectors
        assert not set(one.held) >= {"0", "2", "4"}


def test_sparse_gradients_are_refused() -> None:
    def run(rank: int) -> None:
        engine = Engine(methods.s2_reducer(), Wire())
        module = nn.Embedding(4, 3, sparse=True)
        engine.registry.add_module(module)
        divide(engine, [[0, 2], [1, 3]], 0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine.register(optimizer)
        module(torch.tensor([rank])).sum().backward()
        with pytest.raises(ValueError, match="nodes needs dense gradients; those of 'weight' are sparse"):
            engine.synchronize(optimizer)

    run_ranks(4, run)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "unused_by_turns" else pytest.mark.slow) for name in SCENARIOS]
)
def test_full_density_equals_ddp(tmp_path: Path, name: str) -> None:
    scenario = SCENARIOS[name]
    ddp = fit(tmp_path / "ddp", scenario, 4)
    nodes = replace(scenario, strategy={**scenario.strategy, "nodes": [[0, 1], [2, 3]]})
    ours = fit(tmp_path / "nodes", nodes, 4, methods.gradient_dropping(density=1.0))
    for rank in range(4):
        laws.equal_to_round_off(ours[rank], ddp[rank], scenario.tolerance)
    laws.replicas_are_equal(ours)


class Kept(pl.Callback):
    """Writes what each rank ends with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.save(pl_module.state_dict(), self.folder / f"{trainer.global_rank}.pt")


def run_trainer(
    folder: Path, nodes: Groups | None, adam: bool, steps: int, resume: Path | None = None
) -> dict[str, Any]:
    """Trains on four ranks, saves in step 3, and returns rank 3's weights."""
    folder.mkdir()
    model = SCENARIOS["plain"].model()
    if adam:
        model.configure_optimizers = lambda: torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    # A batch for each rank, as Lightning does not promise to go on in the middle of an epoch.
    x = torch.randn(4 * 8, FEATURES, generator=generator)
    data = TensorDataset(x, torch.randint(CLASSES, (len(x),), generator=generator))
    save = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    strategy = SparseCommStrategy(methods.default(), nodes=nodes, start_method="fork")
    trainer = pl.Trainer(
        **QUIET, strategy=strategy, devices=4, max_steps=steps, callbacks=[save, Kept(folder)], log_every_n_steps=1
    )
    trainer.fit(model, DataLoader(data, batch_size=8), ckpt_path=None if resume is None else str(resume))
    found: dict[str, Any] = torch.load(folder / "3.pt")
    return found


@pytest.mark.filterwarnings("ignore:.*(num_workers|exists and is not empty|dirpath has changed|ended before the epoch)")
@pytest.mark.parametrize("adam", [pytest.param(False, marks=pytest.mark.slow), True], ids=["sgd", "adam"])
def test_a_trainer_resumes_to_the_bit(tmp_path: Path, adam: bool) -> None:
    whole = run_trainer(tmp_path / "whole", TWO, adam, 8)
    again = run_trainer(tmp_path / "again", TWO, adam, 8, tmp_path / "whole" / "step=3.ckpt")
    for name, weight in whole.items():
        assert torch.equal(weight, again[name]), name
    words = r"was saved by 4 processes on nodes \[\[0, 2\], \[1, 3\]\], and these are 4: each begins with the mean"
    with pytest.raises(ProcessRaisedException, match=words):
        run_trainer(tmp_path / "alike", None, adam, 8, tmp_path / "whole" / "step=3.ckpt")
