"""Memories and an exchange, joined: one round of communication."""

from lightning_sparsecomm.channel.adam import LocalAdam as LocalAdam
from lightning_sparsecomm.channel.adam_moments import AdamMoments as AdamMoments
from lightning_sparsecomm.channel.channel import Channel as Channel
from lightning_sparsecomm.channel.clipping import ClipLocalNorm as ClipLocalNorm
from lightning_sparsecomm.channel.contribution import AdamRule as AdamRule
from lightning_sparsecomm.channel.contribution import Contribution as Contribution
from lightning_sparsecomm.channel.contribution import MomentumRule as MomentumRule
from lightning_sparsecomm.channel.contribution import StepSettings as StepSettings
from lightning_sparsecomm.channel.ef21 import EF21 as EF21
from lightning_sparsecomm.channel.error_feedback import ErrorFeedback as ErrorFeedback
from lightning_sparsecomm.channel.memory import Memory as Memory
from lightning_sparsecomm.channel.memory import NamedVector as NamedVector
from lightning_sparsecomm.channel.momentum import Momentum as Momentum
from lightning_sparsecomm.channel.momentum import MomentumCorrection as MomentumCorrection
from lightning_sparsecomm.channel.shared_adam import SharedAdam as SharedAdam
from lightning_sparsecomm.channel.signs import SharedSign as SharedSign
