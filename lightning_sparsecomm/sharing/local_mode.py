"""What an optimizer sees of its rank's own gradient, besides the shared one."""

from typing import Literal, NamedTuple

LocalName = Literal["none", "sum", "partial", "error"]
SharedName = Literal["none", "sum", "partial"]


class LocalMode(NamedTuple):
    """The optimizer gets own·g/W + shared·mean(S) + sent·S/W, for this rank's gradient g and what it sent, S.

    With a part of their own gradients replicas drift, so parameters must be averaged now and then.

    Source: Combining Global Sparse Gradients with Local Gradients, section 3; divided by W as a whole.
    """

    own: float
    shared: float
    sent: float

    @property
    def drifts(self) -> bool:
        """Whether replicas drift."""
        return self.own != 0


LOCAL_MODES: dict[str, LocalMode] = {
    "none": LocalMode(0.0, 1.0, 0.0),
    "sum": LocalMode(0.5, 0.5, 0.0),
    "partial": LocalMode(1.0, 1.0, -1.0),
}
"""By name; `error` of the paper is `partial` without error feedback."""
