"""Named vectors: allocated, grown, saved and resumed by name; and the memories that hold them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_sparsecomm.basis import Layout, Round, SparseVector
from lightning_sparsecomm.channel import Contribution, Memory, NamedVector
from lightning_sparsecomm.exchange import Exchanged

CPU = torch.device("cpu")
SMALL = Layout([("b", (3,))])
LARGE = Layout([("a", (2, 2)), ("b", (3,))])


def filled(layout: Layout, *values: float) -> NamedVector:
    vector = NamedVector()
    vector.bind(layout, torch.float32, CPU)
    assert vector.flat is not None
    vector.flat.copy_(torch.tensor(values))
    return vector


def test_a_vector_grows_and_loses_nothing() -> None:
    vector = filled(SMALL, 1, 2, 3)
    vector.bind(LARGE, torch.float64, CPU)
    assert vector.flat is not None
    assert vector.flat.dtype == torch.float64
    assert vector.flat.tolist() == [0, 0, 0, 0, 1, 2, 3]
    assert [tuple(part.shape) for part in vector.parts] == [(2, 2), (3,)]
    vector.parts[1].zero_()
    assert vector.norm() == 0


def test_what_was_sent_is_subtracted_or_masked_sparse_or_dense() -> None:
    sparse = SparseVector(torch.tensor([0, 2]), torch.tensor([1.0, -3.0], dtype=torch.float64), 3)
    for sent in (sparse, sparse.dense().float()):
        vector = filled(SMALL, 1, 2, 3)
        vector.subtract_(sent)
        assert vector.flat is not None
        assert vector.flat.tolist() == [0, 2, 6]
        vector.zero_where_(sent)
        assert vector.flat.tolist() == [0, 2, 0]


def test_a_vector_holds_nothing_before_it_is_bound() -> None:
    assert NamedVector().norm() == 0
    assert NamedVector().state_dict() == {}


def test_a_loaded_state_is_copied_before_and_after_binding() -> None:
    state = {"b": torch.tensor([1.0, 2.0, 3.0]), "gone": torch.ones(2)}
    early, late = NamedVector(), NamedVector()
    early.load_state_dict(state)
    early.bind(LARGE, torch.float32, CPU)
    late.bind(LARGE, torch.float32, CPU)
    late.load_state_dict(state)
    state["b"].zero_()
    for vector in (early, late):
        assert vector.state_dict()["b"].tolist() == [1, 2, 3]
        # A parameter that is not trained yet may come back.
        assert vector.state_dict()["gone"].tolist() == [1, 1]


class Counting(Memory):
    """Holds nothing; its methods are those of `Memory`."""

    def prepare(self, contribution: Contribution, context: Round) -> Contribution:
        return contribution


class TwoVectors(Counting):
    def __init__(self) -> None:
        super().__init__("slow", "fast")


def test_a_memory_binds_and_saves_its_vectors_by_name() -> None:
    memory, other = TwoVectors(), TwoVectors()
    memory.bind(LARGE, torch.float32, CPU)
    assert memory.held["slow"].flat is not None
    memory.held["slow"].flat.fill_(2)
    state: Mapping[str, Mapping[str, Tensor]] = memory.state_dict()
    assert {group: list(held) for group, held in state.items()} == {"slow": ["a", "b"], "fast": ["a", "b"]}
    other.load_state_dict({"slow": state["slow"]})
    other.bind(LARGE, torch.float32, CPU)
    assert other.held["slow"].norm() == memory.held["slow"].norm() > 0
    assert other.held["fast"].norm() == 0


def test_a_memory_changes_nothing_by_default() -> None:
    memory, context = Counting(), Round(SMALL)
    exchanged = Exchanged(torch.ones(3), torch.ones(3), [True])
    assert memory.commit(exchanged, context) is exchanged
    memory.abort(Contribution(SMALL.views(torch.ones(3))), context)
    assert memory.objection(torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])) is None
    assert memory.state_dict() == {}
