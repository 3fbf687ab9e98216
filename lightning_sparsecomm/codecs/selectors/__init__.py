"""Selectors: which elements of a vector are sent."""

from lightning_sparsecomm.codecs.selectors.base import Selector as Selector
from lightning_sparsecomm.codecs.selectors.base import k_of as k_of
from lightning_sparsecomm.codecs.selectors.blocks import TopBlocks as TopBlocks
from lightning_sparsecomm.codecs.selectors.chunks import ChunkTopK as ChunkTopK
from lightning_sparsecomm.codecs.selectors.one_sided import OneSidedTopK as OneSidedTopK
from lightning_sparsecomm.codecs.selectors.top_k import TopK as TopK
