"""Whole gradients."""

from lightning_sparsecomm.exchange.dense import WireDtype
from lightning_sparsecomm.sharing import BucketSync, Method


class dense(Method):
    """Averages whole gradients by all-reduce during the backward pass, as DDP does, and counts the bytes.

    Bytes per step and rank: one element of the wire's dtype for each of n. "same" gives DDP's result to the bit; half
    precision saves half the bytes and rounds.

    Args:
        wire_dtype: "same" (the gradient's own), "float32", "float16" or "bfloat16".

    Raises:
        ValueError: Unknown `wire_dtype`.
    """

    def __init__(self, wire_dtype: WireDtype = "same") -> None:
        super().__init__([BucketSync(wire_dtype)])
