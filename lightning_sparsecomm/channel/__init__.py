"""Memories and an exchange, joined: one round of communication."""

from lightning_sparsecomm.channel.channel import Channel
from lightning_sparsecomm.channel.clipping import ClipLocalNorm
from lightning_sparsecomm.channel.contribution import Contribution, MomentumRule, StepSettings
from lightning_sparsecomm.channel.error_feedback import ErrorFeedback
from lightning_sparsecomm.channel.memory import Memory, NamedVector
from lightning_sparsecomm.channel.momentum import Momentum, MomentumCorrection

__all__ = [
    "Channel",
    "ClipLocalNorm",
    "Contribution",
    "ErrorFeedback",
    "Memory",
    "Momentum",
    "MomentumCorrection",
    "MomentumRule",
    "NamedVector",
    "StepSettings",
]
