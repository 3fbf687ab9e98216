"""Parts are found in other parts, however deep."""

from dataclasses import dataclass

from lightning_sparsecomm.basis.parts import Part, parts_in


@dataclass
class Leaf(Part):
    number: int


@dataclass
class Branch(Part):
    held: object


def numbers(part: object) -> list[int]:
    return [leaf.number for leaf in parts_in(part, Leaf)]


def test_parts_are_found_in_order_however_deep() -> None:
    assert numbers(Leaf(1)) == [1]
    assert numbers([Branch(Leaf(1)), (Leaf(2), Branch([Leaf(3), Branch(Leaf(4))]))]) == [1, 2, 3, 4]
    assert list(parts_in(Branch(3), int)) == [3]


def test_only_parts_and_lists_are_looked_into() -> None:
    class Stranger:
        def __init__(self) -> None:
            self.leaf = Leaf(1)

    assert numbers(Stranger()) == []
    assert numbers({"leaf": Leaf(1)}) == []
    assert numbers(None) == []
    # What is found is not looked into: a part inside a part of its own kind is that part's business.
    inner = Branch(Leaf(1))
    assert list(parts_in(Branch(inner), Branch)) == [Branch(inner)]
