"""A rehearsal's bytes are those of a real training, and no figure comes from a formula of its own."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_sparsecomm import Method, methods
from lightning_sparsecomm.planning import MeasuredLink, Work, predict, rehearse, square_layers
from lightning_sparsecomm.planning.planner import optimizer_for
from lightning_sparsecomm.planning.rehearsed import Rehearsed
from lightning_sparsecomm.planning.stand_ins import extrapolated, features
from lightning_sparsecomm.sharing.gradients import note_few_rows


def rehearsed(method: Method, size: int = 200_000, optimizer: str = "sgd", **options: Any) -> Rehearsed:
    parameters = square_layers(size)
    return rehearse(method, [(optimizer_for(optimizer, parameters), parameters)], 4, **options)


def test_bytes_do_not_depend_on_the_size_of_the_stand_ins() -> None:
    method = methods.gradient_dropping(0.01)
    whole, small = rehearsed(method, 400_000), rehearsed(method, 400_000, elements=50_000)
    assert small.link_bytes == pytest.approx(whole.link_bytes, rel=0.1)
    assert small.held_bytes == pytest.approx(whole.held_bytes, rel=0.05)


@pytest.mark.few(2)
@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("method", [methods.powersgd(2), methods.onebit_sgd()], ids=repr)
def test_nor_where_bytes_grow_with_rows_and_columns_too(method: Method, timed: bool) -> None:
    whole, small = rehearsed(method, 2_000_000), rehearsed(method, 2_000_000, elements=50_000, timed=timed)
    assert small.link_bytes == pytest.approx(whole.link_bytes, rel=0.02)
    assert small.held_bytes == pytest.approx(whole.held_bytes, rel=0.02)


def test_blocks_that_stand_ins_have_the_fewest_of_count_by_elements() -> None:
    whole, small = (rehearsed(methods.aligned_topk(), 2_000_000, elements=size) for size in (2_000_000, 50_000))
    assert whole.link_bytes < small.link_bytes < 2 * whole.link_bytes


@pytest.mark.parametrize("shape", [(1, 5_000_000), (5_000_000, 1), (7_000_000,), (300_000, 3_000_000)])
def test_models_of_any_size_and_shape_are_rehearsed(shape: tuple[int, ...]) -> None:
    parameters = [("weight", torch.nn.Parameter(torch.zeros(1).expand(shape)))]
    for method in (methods.default(), methods.powersgd(2)):
        kinds = [(optimizer_for("sgd", parameters), parameters)]
        seen = rehearse(method, kinds, 4, length=1000, elements=50_000, timed=False)
        assert 0 < seen.link_bytes < 7 * math.prod(shape)


@pytest.mark.few(2)
@pytest.mark.parametrize("elements", [4_000_000, 400_000])
@pytest.mark.parametrize("length", [1000, 3000])
def test_a_table_with_gradients_of_few_rows_sends_those(length: int, elements: int) -> None:
    table, weight = torch.nn.Parameter(torch.zeros(8000, 128)), torch.nn.Parameter(torch.zeros(512, 512))
    note_few_rows(table, 80)

    def played(method: Method, **parameters: torch.nn.Parameter) -> Rehearsed:
        kinds = [(optimizer_for("sgd", list(parameters.items())), list(parameters.items()))]
        return rehearse(method, kinds, 2, length=length, elements=elements)

    # Beside it, layers exchange in each step, also in a run in which they would in every second one.
    both = played(methods.default().for_run(length, 2), table=table, weight=weight)
    in_each = played(methods.default(every=1), table=table, weight=weight)
    assert sum(often for _, _, often in both.calls) == sum(often for _, _, often in in_each.calls)
    # In bfloat16, each with its position.
    assert both.calls[-1][1] == pytest.approx(80 * (2 * 128 + 8), rel=0.05)
    if length == 1000:
        rest = played(methods.default(every=1), weight=weight).link_bytes
        assert both.link_bytes - both.calls[-1][1] == pytest.approx(rest, rel=0.1)
    # A method that does not take them apart fills its residual with what few rows bring one after another.
    others = methods.dgc(0.1)
    with_mark = played(others, table=table, weight=weight).link_bytes
    note_few_rows(table, 0)
    assert played(others, table=table, weight=weight).link_bytes == with_mark


def test_no_figure_is_negative() -> None:
    """Whatever is found: here less the more there is of all."""
    sets = [[1.0, rows, columns, rows * columns, 0.0] for rows in (64.0, 32.0) for columns in (64.0, 32.0)]
    assert extrapolated([100, 200, 300, 400], sets, [1.0, 1e4, 1e4, 1e8, 0.0]) >= 0
    assert extrapolated([0, 0, 0, 0], sets, [1.0, 1e4, 1e4, 1e8, 0.0]) == 0


def test_gradient_dropping_sends_what_its_docstring_says() -> None:
    elements = 400_000
    sent = rehearsed(methods.gradient_dropping(0.01), elements).link_bytes / 3
    assert sent == pytest.approx(6 * 0.01 * elements, rel=0.15)


@pytest.mark.parametrize("rank", [1, 4])
def test_factors_grow_with_rows_and_columns(rank: int) -> None:
    """And not with their product, as what other methods send does."""
    parameters = square_layers(400_000)
    shapes = [weight.shape for _, weight in parameters]
    factors = sum(rank * sum(shape) for shape in shapes if len(shape) > 1)
    whole = sum(shape.numel() for shape in shapes if len(shape) < 2)
    for elements in (400_000, 50_000):
        sent = rehearsed(methods.powersgd(rank), 400_000, elements=elements).link_bytes / 1.5
        assert sent == pytest.approx(4 * (factors + whole + len(shapes)), rel=0.05)


def test_ddp_sends_all_in_its_buckets() -> None:
    # 22 M float32: a first bucket above 1 MB, and the others above 25 MB, of layers of 11 MB.
    dense, rounded = rehearsed(methods.dense(), 22_000_000), rehearsed(methods.dense("bfloat16"), 22_000_000)
    sizes = [size for _, size, _ in dense.calls]
    assert dense.overlaps and len(sizes) > 2
    assert sum(sizes) == pytest.approx(88e6, rel=0.01)
    assert rounded.link_bytes == pytest.approx(dense.link_bytes / 2)
    assert dense.computing == 0 < rounded.computing


def test_weights_exchanged_every_few_steps_count_by_the_step() -> None:
    each = rehearsed(methods.federated_averaging(every=1)).link_bytes
    assert each == pytest.approx(4 * 200_000 * 1.5, rel=0.02)
    assert rehearsed(methods.federated_averaging(every=100)).link_bytes == pytest.approx(each / 100, rel=0.01)


@pytest.mark.parametrize(("name", "every"), [("sgd", 4), ("adamw", 2)])
def test_local_steps_count_by_those_of_the_optimizers_own_method(name: str, every: int) -> None:
    """And not of its fallbacks: in long runs the default exchanges half as often by SGD as by Adam."""
    parameters = square_layers(200_000)
    found = rehearse(methods.default().for_run(10_000, 4), [(optimizer_for(name, parameters), parameters)], 4, 10_000)
    assert max(often for _, _, often in found.calls) == pytest.approx(1 / every)


def test_a_schedule_of_exchanges_counts_by_its_steps() -> None:
    often, seldom = (rehearsed(methods.post_local_sgd(500, every=10), length=length) for length in (500, 1_000_000))
    half = rehearsed(methods.post_local_sgd(500, every=10), length=1000)
    assert seldom.link_bytes == pytest.approx(often.link_bytes / 10, rel=0.01)
    assert half.link_bytes == pytest.approx(0.55 * often.link_bytes, rel=0.01)


def test_a_warm_up_is_over() -> None:
    assert rehearsed(methods.dgc(0.001)).link_bytes < rehearsed(methods.dgc(0.01, warmup_steps=0)).link_bytes


def test_densities_follow_the_length() -> None:
    sent = [rehearsed(methods.default(), length=length).link_bytes for length in (300, 10_000, math.inf)]
    assert sent[0] > 2 * sent[1]


@pytest.mark.parametrize("make", methods.RECIPES.values(), ids=methods.RECIPES)
def test_every_recipe_can_be_rehearsed(make: Callable[[], Method]) -> None:
    optimizer = "adamw" if make in (methods.local_adam, methods.onebit_adam) else "sgd"
    seen = rehearsed(make(), 20_000, optimizer)
    assert seen.link_bytes > 0
    assert seen.computing >= 0
    assert seen.name == repr(make())
    # On a link that was measured, too.
    points = [(8.0, 0.001), (1e6, 0.25)]
    assert predict(seen, MeasuredLink(4, {"all_reduce": points, "all_gather": points}), Work(0.1)).seconds > 0.1


def test_a_method_that_is_not_defined_says_so() -> None:
    with pytest.raises(TypeError, match="momentum correction takes over"):
        rehearsed(methods.dgc(), 20_000, "adamw")


def test_it_leaves_no_trace() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    parameters = square_layers(20_000)
    optimizer = optimizer_for("sgd", parameters)
    rehearse(methods.dgc(), [(optimizer, parameters)], 4)
    assert torch.equal(torch.rand(4), expected)
    assert all(weight.grad is None for _, weight in parameters)
    # No hook refuses steps of optimizers elsewhere.
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=1.0).step()
    assert torch.equal(weight.detach(), torch.zeros(2))


def test_the_first_steps_of_a_staged_exchange_count_by_their_part_of_the_run() -> None:
    half, later = (
        rehearsed(methods.onebit_adam(warmup_steps=steps), optimizer="adam", length=length)
        for steps, length in ((500, 1000), (1, 1_000_000))
    )
    whole = rehearsed(methods.dense())
    assert later.link_bytes < whole.link_bytes / 20
    assert half.link_bytes == pytest.approx((later.link_bytes + whole.link_bytes) / 2, rel=0.02)


def test_a_matrix_without_rows_has_features() -> None:
    assert features([torch.nn.Parameter(torch.empty(0, 5)), torch.nn.Parameter(torch.empty(2, 3))])[:4] == [2, 2, 8, 6]
