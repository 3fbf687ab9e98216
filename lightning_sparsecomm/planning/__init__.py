"""Predicts what a training step takes with each method over a given network, and chooses."""

from lightning_sparsecomm.planning.links import Link as Link
from lightning_sparsecomm.planning.links import Network as Network
from lightning_sparsecomm.planning.measured_link import MeasuredLink as MeasuredLink
from lightning_sparsecomm.planning.model import Predicted as Predicted
from lightning_sparsecomm.planning.model import Work as Work
from lightning_sparsecomm.planning.model import predict as predict
from lightning_sparsecomm.planning.model_layout import ModelLayout as ModelLayout
from lightning_sparsecomm.planning.planner import Plan as Plan
from lightning_sparsecomm.planning.planner import plan as plan
from lightning_sparsecomm.planning.planner import square_layers as square_layers
from lightning_sparsecomm.planning.rehearsed import Rehearsed as Rehearsed
from lightning_sparsecomm.planning.rehearsed import rehearse as rehearse
