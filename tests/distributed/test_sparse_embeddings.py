"""Embeddings with sparse gradients: exchanged exactly without a sketch, and still sparse for the optimizer."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_sparsecomm.methods import (
    dense,
    dgc,
    federated_averaging,
    gradient_dropping,
    s2_reducer,
    sbc,
    sketched_sgd,
    split,
)
from lightning_sparsecomm.sharing import Method
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests import laws
from tests.distributed.recording import recorded
from tests.distributed.scenarios import CLASSES, Scenario, fit

WORDS, WIDTH = 300, 12
EXACT = s2_reducer(block_density=1.0, sketch_ratio=None)


class Bag(pl.LightningModule):
    """Takes words from the batch's numbers. With optimizer "two", the tables have an optimizer of their own."""

    def __init__(self, sparse: bool, optimizer: str = "sgd", unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.tags = nn.EmbeddingBag(WORDS, 4, sparse=sparse)
        self.head = nn.Linear(WIDTH + 4, CLASSES)
        self.optimizer, self.unused = optimizer, unused
        self.automatic_optimization = optimizer != "two"

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        words = batch[0].mul(50).long().remainder(WORDS)
        tags = self.tags(words)
        if self.unused and self.global_rank == 1 and batch_idx % 2:
            tags = tags.detach()
        loss = cross_entropy(self.head(torch.cat([self.table(words).mean(1), tags], 1)), batch[1])
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        its = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for part in (self.table, self.tags):
            gradient = part.weight.grad
            if gradient is not None and id(part.weight) in its:
                assert (gradient.layout == torch.sparse_coo) == part.sparse
                if isinstance(optimizer, torch.optim.SparseAdam):  # takes no other
                    part.weight.grad = gradient if part.sparse else gradient.to_sparse(1)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "two":
            tables = [*self.table.parameters(), *self.tags.parameters()]
            sgd = torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)
            return [torch.optim.SparseAdam(tables, lr=0.01), sgd]
        return torch.optim.SGD(self.parameters(), lr=0.5)


def scenario(sparse: bool, optimizer: str = "sgd", unused: bool = False, **trainer: Any) -> Scenario:
    return Scenario(lambda: Bag(sparse, optimizer, unused), trainer, {"find_unused_parameters": unused})


def ddp_of(folder: Path, world_size: int, **options: Any) -> list[dict[str, Any]]:
    """What each rank ends with under ddp, whose gradients of tables are dense: these train alike.

    torch's own all-reduce of sparse tensors on Gloo, which no method of ours uses, corrupts memory now and then.
    """
    return fit(folder, scenario(**options | {"sparse": False}), world_size)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("one optimizer", {"sparse": True}),
        ("SparseAdam", {"sparse": True, "optimizer": "two"}),
        ("accumulation", {"sparse": True, "accumulate_grad_batches": 2}),
        ("dense gradients", {"sparse": False}),
    ],
)
def test_exact_blocks_equal_ddp(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    ddp = ddp_of(tmp_path / "ddp", 3, **options)
    ours = fit(tmp_path / "ours", scenario(**options), 3, EXACT)
    laws.trained(Bag(True).state_dict(), ours[0])
    laws.replicas_are_equal(ours)
    laws.equal_to_round_off(ours[0], ddp[0], 2e-6)


@pytest.mark.parametrize("rest", [dense(), dgc(1.0, warmup_steps=0, momentum_masking=False)], ids=["dense", "dgc"])
def test_one_method_for_tables_and_another_for_the_rest(tmp_path: Path, rest: Method) -> None:
    options: dict[str, Any] = {"sparse": True, "optimizer": "two"}
    ddp = ddp_of(tmp_path / "ddp", 2, **options)
    ours = fit(tmp_path / "ours", scenario(**options), 2, split(["table.*", "tags.*"], EXACT, rest))
    laws.replicas_are_equal(ours)
    laws.equal_to_round_off(ours[0], ddp[0], 2e-6)


def test_momentum_is_taken_over_for_both_parts(tmp_path: Path) -> None:
    """Tables with dense gradients share an optimizer with weights whose momentum dgc corrects."""

    class WithMomentum(Bag):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True)

    with_momentum = Scenario(lambda: WithMomentum(sparse=False))
    method = split(["table.*", "tags.*"], EXACT, dgc(1.0, warmup_steps=0, momentum_masking=False))
    ddp = fit(tmp_path / "ddp", with_momentum, 2)
    ours = fit(tmp_path / "ours", with_momentum, 2, method)
    laws.replicas_are_equal(ours)
    laws.equal_to_round_off(ours[0], ddp[0], 2e-6)


def test_a_table_that_one_rank_does_not_use(tmp_path: Path) -> None:
    ddp = ddp_of(tmp_path / "ddp", 2, unused=True)
    ours = fit(tmp_path / "ours", scenario(True, unused=True), 2, recorded(EXACT))
    laws.replicas_are_equal(ours)
    laws.shared_is_bit_equal(ours)
    laws.equal_to_round_off(ours[0], ddp[0], 2e-6)


def test_bytes_count_against_what_ddp_gathers(tmp_path: Path) -> None:
    ranks = fit(tmp_path, scenario(True), 2, EXACT)
    ledger = ranks[0]["ledger"]
    # The head goes through an all-reduce. Rows of the two tables are gathered, each with an index.
    assert ledger.ddp_bytes == 20 * 4 * (CLASSES * (WIDTH + 4) + CLASSES)
    rows, rest = divmod(ledger.ddp_gathered_bytes, 1)
    assert rest == 0
    assert 20 * 10 * (8 + 4 * WIDTH + 8 + 4 * 4) < rows < 20 * 120 * (8 + 4 * WIDTH + 8 + 4 * 4)
    assert ledger.ddp_link_bytes == ledger.ddp_bytes + ledger.ddp_gathered_bytes


@pytest.mark.parametrize(
    "method", [dense(), dgc(), gradient_dropping(), sketched_sgd(), split(["head.*"], EXACT, dgc())], ids=repr
)
def test_methods_that_cannot_take_them_say_what_can(method: Method) -> None:
    trainer = pl.Trainer(
        strategy=SparseCommStrategy(method=method, start_method="fork"), accelerator="cpu", devices=1, logger=False,
        max_steps=1, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(
        Exception, match=r"the gradient of 'table.weight' is sparse .*methods.split\(\['table.weight'\]"
    ):
        trainer.fit(Bag(True), torch.utils.data.DataLoader([(torch.zeros(6), 0)]))


class Frozen(Bag):
    """Its tables may begin to train later."""

    def __init__(self, sparse: bool, thaw_at: int | None = None) -> None:
        super().__init__(sparse)
        self.thaw_at = thaw_at
        self.thaw(False)

    def thaw(self, on: bool = True) -> None:
        self.table.requires_grad_(on)
        self.tags.requires_grad_(on)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.thaw_at:
            self.thaw()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "method", [dense(), dgc(0.2, warmup_steps=0), split(["head.*"], gradient_dropping(0.2), dgc())]
)
def test_frozen_tables_are_no_concern_of_any_method(tmp_path: Path, method: Method) -> None:
    sparse = fit(tmp_path / "sparse", Scenario(lambda: Frozen(True)), 2, method)
    plain = fit(tmp_path / "plain", Scenario(lambda: Frozen(False)), 2, method)
    laws.replicas_are_equal(sparse)
    for name, weight in sparse[0]["weights"].items():
        assert torch.equal(weight, plain[0]["weights"][name])
    assert torch.equal(sparse[0]["weights"]["table.weight"], Frozen(True).table.weight)


def test_frozen_tables_that_begin_to_train_are_refused_then(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"gradient of 'table\.weight' is sparse .* cannot take.* methods\.parallax"):
        fit(tmp_path, Scenario(lambda: Frozen(True, thaw_at=3)), 2, dgc(0.2, warmup_steps=0))


def test_what_is_left_out_goes_whole_and_stays_sparse(tmp_path: Path) -> None:
    ddp = ddp_of(tmp_path / "ddp", 2)
    ours = fit(tmp_path / "ours", scenario(True), 2, s2_reducer(exclude=["*"]))
    laws.equal_to_round_off(ours[0], ddp[0], 2e-6)


def test_clipping_is_taken_over_for_both_parts(tmp_path: Path) -> None:
    """dgc clips each rank's own gradient instead of the Trainer, so the other sync must clip too."""
    start = Bag(False).state_dict()
    method = split(["table.*", "tags.*"], EXACT, dgc(1.0, warmup_steps=0, momentum_masking=False))
    clipped = Scenario(lambda: Bag(False), {"gradient_clip_val": 1e-5}, steps=5)
    ranks = fit(tmp_path, clipped, 2, method)
    laws.replicas_are_equal(ranks)
    for name, tensor in start.items():
        moved = (ranks[0]["weights"][name] - tensor).norm()
        assert 0 < moved <= 5 * 0.5 * 1e-5 * 2**0.5 * 1.01, name


@pytest.mark.parametrize("rest", [sbc(every=2), federated_averaging(every=2)], ids=["sbc", "federated_averaging"])
def test_a_norm_that_would_differ_between_ranks_is_refused(tmp_path: Path, rest: Method) -> None:
    method = split(["table.*", "tags.*"], s2_reducer(sketch_ratio=None), rest)
    ranks = fit(tmp_path / "unclipped", Scenario(lambda: Bag(False), steps=5), 2, method)
    laws.replicas_are_equal(ranks)
    with pytest.raises(Exception, match="gradients cannot be clipped by norm where a method shares some"):
        fit(tmp_path / "clipped", Scenario(lambda: Bag(False), {"gradient_clip_val": 0.1}, steps=5), 2, method)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "method",
    [
        split(["table.*", "tags.*"], split(["table.*"], EXACT, gradient_dropping(1.0)), dense()),
        split(["table.*"], EXACT, split(["head.*"], gradient_dropping(1.0), dense())),
        split(["*.weight"], split(["table.*"], EXACT, gradient_dropping(1.0)), dense()),
        split(["t*"], split(["*.weight"], EXACT, dense()), split(["*.bias"], dense(), gradient_dropping(1.0))),
    ],
)
def test_splits_of_splits(tmp_path: Path, method: Method) -> None:
    ddp = ddp_of(tmp_path / "ddp", 2)
    ours = fit(tmp_path / "ours", scenario(False), 2, method)
    laws.equal_to_round_off(ours[0], ddp[0], 2e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: split("table.*", EXACT, dense()),
            r"parameters must be a list of one or more patterns of names; got 'table.\*'. Use \['emb",
        ),
        (lambda: split([], EXACT, dense()), r"parameters must be a list of one or more patterns of names; got \[\]"),
        (lambda: split(["table.*"], "dgc", dense()), "method must be a Method, such as methods.dgc.*got 'dgc'"),
        (lambda: split(["table.*"], dense(), dense), "rest must be a Method"),
    ],
)
def test_split_refuses(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()
