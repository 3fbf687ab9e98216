"""What a method is: which parameters are exchanged, when, and where the result goes."""

from lightning_sparsecomm.sharing.averaging import Averaging as Averaging
from lightning_sparsecomm.sharing.bucket import BucketSync as BucketSync
from lightning_sparsecomm.sharing.delta import DeltaSync as DeltaSync
from lightning_sparsecomm.sharing.gradient import GradientSync as GradientSync
from lightning_sparsecomm.sharing.method import Method as Method
from lightning_sparsecomm.sharing.share import Share as Share
from lightning_sparsecomm.sharing.share import Turn as Turn
from lightning_sparsecomm.sharing.sync import Sync as Sync
