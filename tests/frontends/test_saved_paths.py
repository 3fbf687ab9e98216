"""A checkpoint's path that differs between ranks, such as one with the time in it: rank 0's counts, as under ddp."""

from pathlib import Path

from lightning_sparsecomm import methods
from lightning_sparsecomm.strategies.pytorch_lightning import SparseCommStrategy
from tests.frontends.fitting import Model, fit


class Saving(Model):
    """Saves after the second step, each rank to a path of its own. Rank 0 may remove that later, by itself."""

    def __init__(self, path: Path, removes: bool) -> None:
        super().__init__()
        self.path, self.removes = path, removes

    def on_train_batch_end(self, *args: object) -> None:
        if self.global_step == 2:
            self.trainer.save_checkpoint(self.path / f"from {self.global_rank}.ckpt")
        if self.global_step == 3 and self.removes and self.trainer.is_global_zero:
            self.trainer.strategy.remove_checkpoint(self.path / "from 0.ckpt")


def test_all_ranks_write_beside_rank_0s_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, Saving(tmp_path, removes=False), SparseCommStrategy(methods.dgc(0.1, warmup_steps=0)))
    assert sorted(path.name for path in tmp_path.glob("from*")) == ["from 0.ckpt", "from 0.ckpt.sparsecomm"]
    names = sorted(path.name.split(".")[0] for path in (tmp_path / "from 0.ckpt.sparsecomm").iterdir())
    assert names == ["rank_0_of_2", "rank_1_of_2"]


def test_rank_0_removes_a_checkpoint_by_itself(tmp_path: Path) -> None:
    """As under ddp, where Lightning asks nobody else. The other rank's file stays."""
    fit(tmp_path, Saving(tmp_path, removes=True), SparseCommStrategy(methods.dgc(0.1, warmup_steps=0)))
    assert [path.name for path in tmp_path.glob("from*")] == ["from 0.ckpt.sparsecomm"]
