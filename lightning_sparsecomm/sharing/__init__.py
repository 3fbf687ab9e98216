"""What a method is: which parameters are exchanged, when, and where the result goes."""

from lightning_sparsecomm.sharing.averaging import Averaging
from lightning_sparsecomm.sharing.bucket import BucketSync
from lightning_sparsecomm.sharing.delta import DeltaSync
from lightning_sparsecomm.sharing.gradient import GradientSync
from lightning_sparsecomm.sharing.method import Method
from lightning_sparsecomm.sharing.share import Share, Turn
from lightning_sparsecomm.sharing.sync import Sync

__all__ = ["Averaging", "BucketSync", "DeltaSync", "GradientSync", "Method", "Share", "Sync", "Turn"]
