"""One of several replicas that come and go. First, on one machine: `sparsecomm lighthouse`. Then, as often as you like:

    python examples/elastic.py --lighthouse http://127.0.0.1:29510

Start some, kill one, start another: those that are there train on, and a new one goes on where they are. With
`--log members.jsonl` for each, the whole can be made again, to the same bits:

    sparsecomm replay members.jsonl -- python examples/elastic.py
"""

import argparse
import os

import pytorch_lightning as pl
from classifier import Classifier
from command_line import at_least
from images import Images

from lightning_sparsecomm import methods
from lightning_sparsecomm.strategies.pytorch_lightning import ElasticSparseCommStrategy

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lighthouse", default=os.environ.get("TORCHFT_LIGHTHOUSE"), help="the address it has printed")
    parser.add_argument("--replica", help="a name of this replica; that of the machine and process by default")
    parser.add_argument("--steps", type=at_least(1), default=1000, help="of each replica")
    parser.add_argument("--every", type=at_least(1), default=20, help="steps between two exchanges")
    parser.add_argument("--log", help="file for the log of members")
    parser.add_argument("--local-state", help="folder where a replica with a name keeps what is its own")
    options = parser.parse_args()

    pl.seed_everything(0, verbose=False)
    strategy = ElasticSparseCommStrategy(
        methods.sparse_loco(every=options.every),
        lighthouse=options.lighthouse,
        replica=options.replica,
        membership_log=options.log,
        local_state_dir=options.local_state,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model, data = Classifier(), Images()
    trainer.fit(model, data)
    assert strategy.turns is not None
    for change in strategy.turns.membership.changes:
        print(change)
    accuracy = float(trainer.callback_metrics["accuracy"]) if "accuracy" in trainer.callback_metrics else float("nan")
    print(f"accuracy {accuracy:.1%} after {trainer.global_step} steps and {strategy.turns.round} rounds")
