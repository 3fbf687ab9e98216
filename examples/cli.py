"""Trains a small network from a YAML file: `python examples/cli.py fit --config examples/configs/sparsecomm.yaml`.

Strategy, method and every part of it can be changed in the file or behind it; `fit --print_config` shows them all.
"""

from classifier import Classifier
from images import Images
from pytorch_lightning.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(Classifier, Images)
