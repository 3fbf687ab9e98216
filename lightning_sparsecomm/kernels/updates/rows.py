"""What kernels find in each row of a matrix: the definition, in torch operations that run on any device."""

import torch
from torch import Tensor


class Rows:
    """The part of `Reference` that looks at rows."""

    def largest_in_rows(self, rows: Tensor, k: int) -> Tensor:
        """Sorted positions, in the flattened rows, of each row's min(k, non-zeros) largest magnitudes.

        Of equal magnitudes for the last places, kernels may take different ones.

        Args:
            rows: `[rows, columns]`, contiguous and finite.
            k: At least 1, at most the columns.
        """
        largest = rows.abs().topk(k, dim=1, sorted=False)
        columns = torch.where(largest.values > 0, largest.indices, rows.shape[1]).sort(1).values
        starts = torch.arange(0, rows.numel(), rows.shape[1], device=rows.device)
        return (columns + starts[:, None])[columns < rows.shape[1]]
