"""What must be equal on all ranks, and the words for what is not. Ranks that do differ are in tests/distributed."""

from typing import Any

import torch
from torch import nn

from lightning_sparsecomm.basis import Wire
from lightning_sparsecomm.methods import dgc, gradient_dropping
from lightning_sparsecomm.run import agreement
from lightning_sparsecomm.run.agreement import Fact, facts_of_optimizers, facts_of_rates, facts_of_run, plain_repr
from lightning_sparsecomm.run.engine import Engine
from lightning_sparsecomm.sharing import Method
from tests.run.training import chain


def topics(facts: list[Fact]) -> dict[str, str]:
    return {fact.topic: fact.value for fact in facts}


def test_addresses_do_not_differ_between_processes() -> None:
    class Named(Method):
        def __repr__(self) -> str:
            return "Named(<function outer at 0x7f00AB>, <object at 0x1>)"

    assert plain_repr(Named(dgc().syncs)) == "Named(<function outer>, <object>)"


def test_the_facts_of_a_run() -> None:
    weight, frozen = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2).bfloat16(), requires_grad=False)
    lazy = nn.LazyLinear(3).weight
    named = [("a", weight), ("b", frozen), ("c", lazy)]
    facts = topics(facts_of_run(gradient_dropping(), named, 3, None, scales_loss=True))
    assert facts["seed"] == "3"
    assert facts["check_replicas_every"] == "None"
    assert facts["method"] == plain_repr(gradient_dropping())
    assert facts["the loss scaler"] == "one"
    assert facts["parameter 'a'"] == "torch.float32 of shape (2, 3), trained"
    assert facts["parameter 'b'"] == "torch.bfloat16 of shape (2,), frozen"
    assert facts["parameter 'c'"] == "torch.float32 of no shape yet, trained"
    assert facts["the version of torch"] == torch.__version__


def test_the_facts_of_optimizers() -> None:
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizers = [torch.optim.SGD([a], lr=0.1), torch.optim.Adam([a])]
    assert topics(facts_of_optimizers(optimizers, [("a", a), ("b", b)])) == {
        "the list of optimizers": "SGD, Adam",
        "the optimizer of parameter 'a'": "number 0 (SGD) and number 1 (Adam)",
        "the optimizer of parameter 'b'": "none",
    }
    assert topics(facts_of_optimizers([], [])) == {"the list of optimizers": "none"}


def test_a_group_may_have_no_learning_rate_of_its_own() -> None:
    """As Hugging Face's Adafactor, which finds it by itself."""
    groups: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": torch.tensor(0.25)}, {"lr": None}, {}]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    optimizer.param_groups = groups
    facts = facts_of_rates([optimizer])
    assert [fact.value for fact in facts] == ["0.1", "0.25", "none", "none"]


def test_the_first_difference_is_named_by_rank() -> None:
    ranks = [
        [Fact("seed", "0", "Fix it."), Fact("method", "x", "Fix it.")],
        [Fact("seed", "0", "Fix it."), Fact("method", "y", "Fix it."), Fact("more", "z", "Fix that.")],
        [Fact("seed", "0", "Fix it."), Fact("method", "x", "Fix it.")],
    ]
    words = agreement._difference(ranks)
    assert words == "method must be equal on all ranks; got x on ranks 0, 2; y on rank 1. Fix it."
    ranks[1][1] = ranks[0][1]
    words = agreement._difference(ranks)
    assert words == "more must be equal on all ranks; got none on ranks 0, 2; z on rank 1. Fix that."
    swapped = [ranks[0], ranks[0][::-1]]
    words = agreement._difference(swapped)
    assert "the order of parameters must be equal on all ranks; got seed earlier on rank 0; method earlier on" in words


def test_long_texts_are_shortened_to_where_they_differ() -> None:
    texts = ["a" * 300 + middle + "z" * 300 for middle in ("one", "two")]
    found = agreement._shortened(texts)
    assert [text.strip("…az") for text in found] == ["one", "two"]
    assert all(text.startswith("…a") and text.endswith("z…") and len(text) < 130 for text in found)
    assert agreement._shortened(["one", "two"]) == ["one", "two"]


def test_a_rank_alone_agrees_without_a_collective(wire: Wire) -> None:
    engine = Engine(gradient_dropping(), wire)
    engine.registry.add_module(chain())
    engine.agreement.on_setup()
    number = engine.agreement.run
    assert number > 0
    engine.agreement.on_setup()
    assert engine.agreement.run == number
    engine.agreement.on_optimizers([])
    engine.agreement.on_weights([(3, {id(p): p for _, p in engine.registry.named})])
    assert wire.ledger.rows == {}
    engine.close()
