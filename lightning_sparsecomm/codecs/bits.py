"""One bit for each of many elements."""

from torch import Tensor

from lightning_sparsecomm.codecs.payload import wrong_section
from lightning_sparsecomm.kernels import position_kernels_for


def packed(flags: Tensor) -> Tensor:
    """`[⌈n / 8⌉]` uint8 for `[n]` bool: flag i is bit i mod 8 of byte ⌊i / 8⌋. The last bits are 0.

    >>> packed(torch.tensor([True, False, True] * 3))
    tensor([109,   1], dtype=torch.uint8)
    """
    return position_kernels_for(flags.device).write_flags(flags)


def unpacked(section: Tensor, count: int, name: str) -> Tensor:
    """The `[count]` bool in a section that has exactly ⌈count / 8⌉ bytes.

    Raises:
        PayloadError: A bit after the last flag is 1. The error names the section.
    """
    if count % 8 and int(section[-1]) >> count % 8:
        raise wrong_section(name, f"padding in byte {section.numel() - 1} is not 0", "zeros")
    return position_kernels_for(section.device).read_flags(section, count)
