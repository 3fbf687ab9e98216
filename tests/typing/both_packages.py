"""Checked by mypy alone: our classes are accepted by the Trainers of both Lightning packages."""

import lightning as L
import pytorch_lightning as pl

from lightning_sparsecomm import (
    CompressionMonitor,
    ParameterAveraging,
    RaySparseCommStrategy,
    SparseCommStrategy,
    SparsityWarmup,
    methods,
)

L.Trainer(
    strategy=SparseCommStrategy(methods.dgc()),
    callbacks=[CompressionMonitor(), SparsityWarmup(steps=10), ParameterAveraging()],
)
pl.Trainer(
    strategy=SparseCommStrategy(methods.dgc()),
    callbacks=[CompressionMonitor(), SparsityWarmup(steps=10), ParameterAveraging()],
)
L.Trainer(strategy=RaySparseCommStrategy(methods.dgc(), nodes="auto"))
pl.Trainer(strategy=RaySparseCommStrategy(methods.dgc(), nodes="auto"))
