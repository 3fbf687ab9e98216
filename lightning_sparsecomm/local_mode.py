"""What an optimizer sees of a rank's own gradient beside the shared one."""

from typing import Literal, NamedTuple

LocalName = Literal["none", "sum", "partial", "error"]


class LocalMode(NamedTuple):
    """The optimizer gets own·g/W + shared·mean(S) + sent·S/W, g being this rank's gradient and S what it sent.

    With a share of its own gradient every replica goes its own way, so parameters must be averaged now and then.

    Source: Combining Global Sparse Gradients with Local Gradients, section 3; divided by W as a whole.

    Attributes:
        own: Factor on this rank's gradient.
        shared: Factor on the mean of what all sent.
        sent: Factor on what this rank sent.
    """

    own: float
    shared: float
    sent: float

    @property
    def drifts(self) -> bool:
        """Whether replicas go apart."""
        return self.own != 0


LOCAL_MODES: dict[str, LocalMode] = {
    "none": LocalMode(0.0, 1.0, 0.0),
    "sum": LocalMode(0.5, 0.5, 0.0),
    "partial": LocalMode(1.0, 1.0, -1.0),
}
"""By name; `error` of the paper is `partial` without error feedback."""
