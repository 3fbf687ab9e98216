"""What every room builds on: layouts, rounds, schedules, and the wire with its ledger."""

from lightning_sparsecomm.basis.layout import Layout as Layout
from lightning_sparsecomm.basis.layout import Segment as Segment
from lightning_sparsecomm.basis.layout import SparseVector as SparseVector
from lightning_sparsecomm.basis.layout import Vector as Vector
from lightning_sparsecomm.basis.ledger import DDP_BUFFERS as DDP_BUFFERS
from lightning_sparsecomm.basis.ledger import DDP_SETUP as DDP_SETUP
from lightning_sparsecomm.basis.ledger import DDP_UNUSED as DDP_UNUSED
from lightning_sparsecomm.basis.ledger import GRADIENTS as GRADIENTS
from lightning_sparsecomm.basis.ledger import OURS as OURS
from lightning_sparsecomm.basis.ledger import PARAMETERS as PARAMETERS
from lightning_sparsecomm.basis.ledger import UPDATES as UPDATES
from lightning_sparsecomm.basis.ledger import Collective as Collective
from lightning_sparsecomm.basis.ledger import Ledger as Ledger
from lightning_sparsecomm.basis.ledger import link_bytes as link_bytes
from lightning_sparsecomm.basis.rounds import Round as Round
from lightning_sparsecomm.basis.schedules import ByLength as ByLength
from lightning_sparsecomm.basis.schedules import Density as Density
from lightning_sparsecomm.basis.schedules import DensityWarmup as DensityWarmup
from lightning_sparsecomm.basis.schedules import Every as Every
from lightning_sparsecomm.basis.schedules import Exponential as Exponential
from lightning_sparsecomm.basis.schedules import Schedule as Schedule
from lightning_sparsecomm.basis.schedules import Stages as Stages
from lightning_sparsecomm.basis.schedules import Warmup as Warmup
from lightning_sparsecomm.basis.wire import PeerError as PeerError
from lightning_sparsecomm.basis.wire import Wire as Wire
