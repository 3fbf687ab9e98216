"""The laws that parts and methods must obey, as functions, for parts of your own; and a function run on several ranks.

Each `check_…` raises an `AssertionError` that says what was violated. They need no test framework. See
docs/extending.md.
"""

from lightning_sparsecomm.testing.codecs import check_index_codec, check_value_codec
from lightning_sparsecomm.testing.compressors import check_compressor
from lightning_sparsecomm.testing.exchanges import check_exchange
from lightning_sparsecomm.testing.memories import check_memory
from lightning_sparsecomm.testing.methods import check_method
from lightning_sparsecomm.testing.ranks import RankError, run_ranks
from lightning_sparsecomm.testing.selectors import check_selector

__all__ = [
    "RankError",
    "check_compressor",
    "check_exchange",
    "check_index_codec",
    "check_memory",
    "check_method",
    "check_selector",
    "check_value_codec",
    "run_ranks",
]
