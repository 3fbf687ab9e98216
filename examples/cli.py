"""Trains a small network from a YAML file: `python examples/cli.py fit --config examples/configs/sparsecomm.yaml`.

Strategy, method and each of its parts can be set in the file or on the command line; `fit --print_config` shows all.
"""

from classifier import Classifier
from images import Images
from pytorch_lightning.cli import LightningCLI

import lightning_sparsecomm  # noqa: F401  (registers the names of strategies, such as strategy: sparsecomm)

if __name__ == "__main__":
    LightningCLI(Classifier, Images)
