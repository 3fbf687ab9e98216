"""Weight changes exchanged in fragments; here of one rank."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_sparsecomm.basis import Exponential, Stages, Wire
from lightning_sparsecomm.basis.schedules import every_at
from lightning_sparsecomm.channel import Channel, ErrorFeedback
from lightning_sparsecomm.codecs import SparseCodec, TopK
from lightning_sparsecomm.exchange import DenseAllReduce, Gather
from lightning_sparsecomm.sharing import DeltaSync, Turn
from lightning_sparsecomm.sharing.delta_share import DeltaShare
from lightning_sparsecomm.sharing.fragments import FragmentedShare, FragmentOrder, fragments_of, is_due, layers_of

DENSE = Channel(DenseAllReduce())
WIDTHS = (8, 1, 1, 2, 4)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, 1) for width in WIDTHS))


def started(sync: DeltaSync, wire: Wire, module: nn.Module) -> FragmentedShare:
    share = sync.start(SGD(module.parameters(), lr=0.1), list(module.named_parameters()), wire)
    assert isinstance(share, FragmentedShare)
    return share


def step(module: nn.Module, share: FragmentedShare, number: int, by: float = 1.0) -> list[bool]:
    """An optimizer step that adds `by` to each weight, and a turn; by fragment, whether it took part."""
    share.before_step()
    with torch.no_grad():
        for place, parameter in enumerate(module.parameters()):
            parameter.add_(by * (1 + place))
    share.after_step()
    turn = Turn("weights", number)
    due = [fragment.due(turn) for fragment in share.fragments]
    assert share.due(turn) is any(due)
    if any(due):
        share.prepare(turn)
        share.exchange()
        share.commit()
    return due


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize(
    ("order", "expected"),
    [("strided", [["0", "2", "4"], ["1", "3"]]), ("sequential", [["0", "1"], ["2", "3", "4"]])],
)
def test_fragments_have_whole_layers(order: FragmentOrder, expected: list[list[str]]) -> None:
    named = list(layers().named_parameters())
    pieces = fragments_of(named, 2, order)
    assert [sorted({name.split(".")[0] for name, _ in piece}) for piece in pieces] == expected
    assert sorted(name for piece in pieces for name, _ in piece) == sorted(name for name, _ in named)


@pytest.mark.parametrize("order", ["strided", "sequential"])
def test_a_layer_that_holds_others_is_cut_where_it_is_too_large_for_a_fragment(order: FragmentOrder) -> None:
    inner = nn.Sequential(*(nn.Linear(16, 16) for _ in range(9)))
    network = nn.Sequential(nn.Linear(4, 16), inner, nn.Linear(16, 4))
    named = [(f"net.{name}", parameter) for name, parameter in network.named_parameters()]
    sizes = [sum(parameter.numel() for _, parameter in piece) for piece in fragments_of(named, 3, order)]
    assert max(sizes) < 0.45 * sum(sizes)
    DeltaSync(DENSE, every=10, fragments=9).check(named)
    # One that fits stays whole.
    assert len(set(layers_of(named, 1))) == 3


def test_parameters_of_a_list_are_layers() -> None:
    named = [(f"parts.{number}", nn.Parameter(torch.zeros(size))) for number, size in enumerate((5, 7, 3, 4, 6, 2))]
    DeltaSync(DENSE, every=6, fragments=6).check(named)
    assert len(set(layers_of(named, 6))) == 6


@pytest.mark.parametrize("order", ["strided", "sequential"])
@pytest.mark.parametrize("count", range(1, 6))
def test_no_fragment_is_empty_while_there_are_layers_enough(order: FragmentOrder, count: int) -> None:
    named = list(layers().named_parameters())
    assert all(fragments_of(named, count, order))
    assert [bool(piece) for piece in fragments_of(named, 7, order)] == [True] * 5 + [False] * 2
    assert fragments_of([], count, order) == [[]] * count


@pytest.mark.parametrize(("every", "count"), [(1, 1), (3, 3), (7, 3), (10, 4), (30, 8)])
def test_each_fragment_is_due_once_in_every_so_many_steps(every: int, count: int) -> None:
    times = [[step for step in range(5 * every) if is_due(step, every, number, count)] for number in range(count)]
    for each in times:
        assert len(each) == 5
        assert all(b - a == every for a, b in itertools.pairwise(each))
    assert len({step for each in times for step in each}) == 5 * count
    assert times[-1][0] == every - 1


SCHEDULES = {
    "rising": (Exponential(1, 40, steps=600), 3),
    "falling": (Exponential(40, 6, steps=600), 4),
    "in stages": (Stages([1, 12, 30], steps=[0, 100, 301]), 5),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_fragment_waits_long_where_a_schedule_changes_every(wire: Wire, name: str) -> None:
    every, count = SCHEDULES[name]
    module = layers()
    share = started(DeltaSync(DENSE, every=every, fragments=count), wire, module)
    waited, exchanges = [0] * count, [0] * count
    for number in range(900):
        for fragment, due in enumerate(step(module, share, number, by=0.0)):
            waited[fragment] += 1
            assert waited[fragment] <= 1.2 * every_at(every, number, 0.0)
            if due:
                waited[fragment], exchanges[fragment] = 0, exchanges[fragment] + 1
    expected = sum(1 / every_at(every, number, 0.0) for number in range(900))
    assert all(0.95 * expected < each < 1.15 * expected + 1 for each in exchanges)


def test_only_the_fragment_that_is_due_moves_its_anchor(wire: Wire) -> None:
    module = layers()
    share = started(DeltaSync(DENSE, every=4, fragments=2), wire, module)
    start = weights(module)
    due = [step(module, share, number) for number in range(8)]
    assert due == [[False] * 2, [True, False], [False] * 2, [False, True]] * 2
    moved = [torch.full_like(parameter, 8.0 * (1 + place)) for place, parameter in enumerate(module.parameters())]
    torch.testing.assert_close(weights(module), start + torch.cat([each.flatten() for each in moved]))
    # The first fragment has trained for two steps since its last exchange.
    shared = share.shared_weights()
    assert shared is not None
    for place, ((weight, anchor), parameter) in enumerate(zip(shared, module.parameters(), strict=True)):
        assert weight.data_ptr() == parameter.data_ptr()
        trained = 0.0 if place // 2 % 2 else 2.0 * (1 + place)
        torch.testing.assert_close(weight - anchor, torch.full_like(weight, trained))
    share.prepare(Turn("end", 8))
    share.exchange()
    share.commit()
    assert share.shared_weights() == []


def test_buffers_are_averaged_with_the_last_fragment(wire: Wire) -> None:
    module = layers()
    share = started(DeltaSync(DENSE, every=6, fragments=3), wire, module)
    closing = [any(step(module, share, number)) and share.closes_round for number in range(12)]
    assert closing == ([False] * 5 + [True]) * 2


def test_fragments_stay_staggered_after_an_abort(wire: Wire) -> None:
    module = layers()
    share = started(DeltaSync(DENSE, every=4, fragments=2), wire, module)
    start = weights(module)
    step(module, share, 0)
    share.abort()
    assert torch.equal(weights(module), start)
    assert [step(module, share, number) for number in range(1, 4)] == [[True, False], [False] * 2, [False, True]]


def test_a_schedule_changes_the_wait(wire: Wire) -> None:
    module = layers()
    share = started(DeltaSync(DENSE, every=Stages([2, 4], steps=[0, 4]), fragments=2), wire, module)
    due = [step(module, share, number) for number in range(8)]
    assert due == [[True, False], [False, True]] * 2 + [[False] * 2, [True, False], [False] * 2, [False, True]]


@pytest.mark.parametrize("outer", [None, partial(SGD, lr=0.5, momentum=0.9)])
def test_a_resumed_share_goes_on(wire: Wire, outer: Any) -> None:
    channel = Channel(Gather(SparseCodec(TopK(0.3))), [ErrorFeedback()])
    sync = DeltaSync(channel, every=4, fragments=3, outer=outer)
    module = layers()
    share = started(sync, wire, module)
    for number in range(7):
        step(module, share, number)
    other = layers()
    other.load_state_dict(module.state_dict())
    resumed = started(sync, wire, other)
    copied = {kind: dict(parts) for kind, parts in share.state_dict().items()}
    resumed.load_state_dict(copied)
    assert not any(copied.values())
    for number in range(7, 15):
        assert step(module, share, number, by=0.5) == step(other, resumed, number, by=0.5)
        assert torch.equal(weights(module), weights(other))
    assert resumed.residual_norm() == share.residual_norm() > 0


def test_state_moves_along_when_layers_are_added(wire: Wire) -> None:
    module = layers()
    named = list(module.named_parameters())
    sync = DeltaSync(Channel(Gather(SparseCodec(TopK(0.3))), [ErrorFeedback()]), every=2, fragments=2)
    share = sync.start(SGD(module.parameters(), lr=0.1), named[2:], wire)
    assert isinstance(share, FragmentedShare)
    for number in range(3):
        step(module, share, number)
    held = share.state_dict()
    share.extend(named)
    moved = share.state_dict()
    assert moved.keys() == held.keys()
    for kind, parts in held.items():
        # A fragment has trained if any of its parameters has.
        if kind != "DeltaSync.steps":
            assert moved[kind].keys() == parts.keys()
            assert all(torch.equal(moved[kind][name], parts[name]) for name in parts)
    step(module, share, 3)
    assert share.state_dict()["DeltaSync.anchor"].keys() == {name for name, _ in named}


def test_one_fragment_is_the_share_itself(wire: Wire) -> None:
    module = layers()
    share = DeltaSync(DENSE).start(SGD(module.parameters(), lr=0.1), list(module.named_parameters()), wire)
    assert type(share) is DeltaShare
    assert "fragment" not in repr(DeltaSync(DENSE))
    assert "fragments=2, fragment_order='sequential'" in repr(
        DeltaSync(DENSE, every=2, fragments=2, fragment_order="sequential")
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fragments": 0}, "fragments must be a whole number, at least 1"),
        ({"fragments": 1.5}, "fragments must be a whole number, at least 1"),
        ({"fragments": 5, "every": 4}, "fragments must be at most every, 4 steps.*got 5. Use fragments=4"),
        ({"fragment_order": "random"}, "fragment_order must be one of strided, sequential; got 'random'"),
    ],
)
def test_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DeltaSync(DENSE, **options)


def test_refuses_moments_without_numbers_of_exchanges() -> None:
    with pytest.raises(TypeError, match=r"moments must give a number .*; got \['exp_avg'\]\. Use {'exp_avg'"):
        DeltaSync(DENSE, every=3, moments=["exp_avg"])  # type: ignore[arg-type]


def test_refuses_more_fragments_than_layers() -> None:
    sync = DeltaSync(DENSE, every=10, fragments=6)
    with pytest.raises(ValueError, match=r"fragments must be at most the number of layers, 5; got 6\. Use fragments=5"):
        sync.check(list(layers().named_parameters()))
