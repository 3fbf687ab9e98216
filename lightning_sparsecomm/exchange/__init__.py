"""Whole rounds of communication."""

from lightning_sparsecomm.exchange.base import Exchange as Exchange
from lightning_sparsecomm.exchange.base import Exchanged as Exchanged
from lightning_sparsecomm.exchange.base import PlainExchange as PlainExchange
from lightning_sparsecomm.exchange.base import SparseExchange as SparseExchange
from lightning_sparsecomm.exchange.block import BlockReduce as BlockReduce
from lightning_sparsecomm.exchange.clients import ClientMean as ClientMean
from lightning_sparsecomm.exchange.compressed import CompressedAllReduce as CompressedAllReduce
from lightning_sparsecomm.exchange.contributions import GatherContributions as GatherContributions
from lightning_sparsecomm.exchange.dense import DenseAllReduce as DenseAllReduce
from lightning_sparsecomm.exchange.gather import Gather as Gather
from lightning_sparsecomm.exchange.gather_nonzero import GatherNonZero as GatherNonZero
from lightning_sparsecomm.exchange.gather_nonzero import NonZero as NonZero
from lightning_sparsecomm.exchange.ok_topk import OkTopK as OkTopK
from lightning_sparsecomm.exchange.power_sgd import PowerSGD as PowerSGD
from lightning_sparsecomm.exchange.quantized import QuantizedAllReduce as QuantizedAllReduce
from lightning_sparsecomm.exchange.region_sum import RegionSum as RegionSum
from lightning_sparsecomm.exchange.shared_positions import AlignedTopK as AlignedTopK
from lightning_sparsecomm.exchange.shared_positions import RandomK as RandomK
from lightning_sparsecomm.exchange.sketched import SketchedTopK as SketchedTopK
from lightning_sparsecomm.exchange.sparse import Sparse as Sparse
from lightning_sparsecomm.exchange.staged import Staged as Staged
from lightning_sparsecomm.exchange.status import NonFiniteGradientError as NonFiniteGradientError
from lightning_sparsecomm.exchange.ternary import MajorityVote as MajorityVote
from lightning_sparsecomm.exchange.ternary import TernarySum as TernarySum
from lightning_sparsecomm.exchange.transformed import Transformed as Transformed
