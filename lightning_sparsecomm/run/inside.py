"""Inside a node: gradients are summed, each rank keeping its parameters' part, and results are handed out to all."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparsecomm.run.nodes import Nodes
from lightning_sparsecomm.sharing.gradients import NamedParameters

# Ranks' parts are padded to equal length, in so much memory at most, in times of all parts.
_PADDED = 1.5


class Piece:
    """Tensors that belong to parameters of one width, in a row for each rank of a node.

    Ranks of one machine write and read them in memory that they share. Otherwise rows travel in stretches, equally
    long on all ranks; where a rank has fewer elements, zeros follow. One stretch is all there is, unless a rank has
    much more than the others, as where one tensor is most of a model.

    Args:
        places: The tensors of each rank: parameters, or what belongs to them.
        nodes: Who is on a node with this rank.
        dtype: Float32 or wider.
    """

    def __init__(self, places: Sequence[Sequence[Tensor]], nodes: Nodes, dtype: torch.dtype) -> None:
        self.places = places
        self.own = places[nodes.inside.rank]
        self._inside, self._memory = nodes.inside, nodes.memory
        self._dtype = dtype
        self._device = next(each.device for part in places for each in part)
        self._sizes = [sum(each.numel() for each in part) for part in places]
        longest = max(self._sizes)
        step = math.ceil(longest / math.ceil(longest * len(places) / (_PADDED * sum(self._sizes))))
        self._stretches = [slice(at, min(at + step, longest)) for at in range(0, longest, step)]
        self._row = torch.empty(0)

    def sum_gradients(self) -> list[Tensor]:
        """The mean over the node of this rank's parameters' gradients; one that a rank lacks counts as zero.

        A collective. Bytes on the link inside: (L-1) times those of the longest row; none in shared memory.
        """
        rows = self._memory.to_sum(sum(self._sizes), self._dtype, self._device)
        self._row = self._summed_over_wire() if rows is None else self._summed_in(rows)
        return [view for _, view in _views(self.own, self._row)]

    def hand_out(self, results: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """All the tensors, each with the result of the rank that has it. A collective.

        Args:
            results: This rank's. Where they are still what `sum_gradients` gave, changed in place, nothing is copied.
        """
        row, self._row = self._row, torch.empty(0)
        region = self._memory.for_results(sum(self._sizes), self._dtype, self._device)
        if region is not None:
            rows = region.split(self._sizes)
            for result, (_, view) in zip(results, _views(self.own, rows[self._inside.rank]), strict=True):
                view.copy_(result)
            self._memory.meet()
        else:
            if row.numel() != max(self._sizes):
                row = self._new(max(self._sizes)).zero_()
            for result, (_, view) in zip(results, _views(self.own, row), strict=True):
                if result.data_ptr() != view.data_ptr():
                    view.copy_(result)
            rows = self._gathered_over_wire(row)
        for part, each in zip(self.places, rows):
            yield from _views(part, each)

    def _summed_in(self, rows: Tensor) -> Tensor:
        for part, row in zip(self.places, rows[self._inside.rank].split(self._sizes)):
            for parameter, view in _views(part, row):
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
                else:
                    view.zero_()
        self._memory.meet(to_sum=True)
        begin = sum(self._sizes[: self._inside.rank])
        first, *others = rows[:, begin : begin + self._sizes[self._inside.rank]]
        total: Tensor = first.clone()
        for other in others:
            total.add_(other)
        return total.div_(len(rows))

    def _summed_over_wire(self) -> Tensor:
        row = self._new(max(self._sizes))
        for stretch in self._stretches:
            sent = self._new(len(self.places), stretch.stop - stretch.start)
            for part, size, each in zip(self.places, self._sizes, sent):
                each[max(0, size - stretch.start) :].zero_()
                for parameter, here, there in _overlaps(part, stretch):
                    if parameter.grad is not None:
                        each[there].copy_(parameter.grad.reshape(-1)[here])
                    else:
                        each[there].zero_()
            torch.sum(self._inside.all_to_all(sent), 0, out=row[stretch]).div_(len(self.places))
        return row

    def _gathered_over_wire(self, row: Tensor) -> Sequence[Tensor]:
        if len(self._stretches) == 1:
            return list(self._inside.all_gather(row))
        rows = [self._new(size) for size in self._sizes]
        for stretch in self._stretches:
            for whole, part in zip(rows, self._inside.all_gather(row[stretch].contiguous())):
                here = whole[stretch]
                here.copy_(part[: len(here)])
        return rows

    def _new(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=self._dtype, device=self._device)


def pieces_of(held: Sequence[tuple[Parameter, Tensor]], nodes: Nodes) -> list[Piece]:
    """Tensors, each with its parameter, in pieces, one for each width of parameters.

    Equal on all ranks but for which part is this rank's own.
    """
    places = nodes.by_place(held)
    dtypes = sorted({_wide(parameter) for parameter, tensor in held if tensor.numel()}, key=str)
    return [
        Piece([[each for owner, each in part if _wide(owner) == dtype] for part in places], nodes, dtype)
        for dtype in dtypes
    ]


class NodeGradients:
    """One step's gradients of one optimizer: this rank's part of the node's means, and what becomes of it.

    The gradients that the user sees stay as they are until `hand_out`. So a step whose exchange fails can be repeated.

    Args:
        parameters: Of the optimizer, equal on all ranks.
        nodes: Who is on a node with this rank. Making this is a collective inside it.
    """

    def __init__(self, parameters: NamedParameters, nodes: Nodes) -> None:
        self._nodes, self._device = nodes, parameters[0][1].device
        self._parameters = [each for _, each in parameters if each.numel()]
        self._pieces = pieces_of([(each, each) for _, each in parameters], nodes)
        here = self._on_node([each.grad is not None for each in self._parameters])
        self._means: list[tuple[Tensor, Tensor | None]] = []
        for piece in self._pieces:
            for parameter, mean in zip(piece.own, piece.sum_gradients(), strict=True):
                self._means.append((parameter, mean.to(parameter.dtype) if id(parameter) in here else None))
        self._before: list[Tensor | None] = []

    @property
    def own(self) -> list[Tensor]:
        """The node's mean gradients of this rank's parameters, those that the node has."""
        return [mean for _, mean in self._means if mean is not None]

    def __enter__(self) -> None:
        """Puts the node's means in place of this rank's own gradients, for its parameters."""
        self._before = [parameter.grad for parameter, _ in self._means]
        for parameter, mean in self._means:
            parameter.grad = mean

    def __exit__(self, *error: object) -> None:
        """Keeps what is in their place now, and puts this rank's own gradients back."""
        self._means = [(parameter, parameter.grad) for parameter, _ in self._means]
        for (parameter, _), before in zip(self._means, self._before, strict=True):
            parameter.grad = before

    def _on_node(self, flags: Sequence[bool]) -> set[int]:
        """Identities of the parameters whose flag any rank of the node has. A collective."""
        own = torch.tensor(flags, dtype=torch.uint8, device=self._device)
        found = self._nodes.inside.all_reduce_or_(own).tolist()
        return {id(each) for each, flag in zip(self._parameters, found, strict=True) if flag}

    def hand_out(self) -> None:
        """Writes the results of all ranks of the node to `.grad`, where any rank of any node has a gradient."""
        results = {id(parameter): result for parameter, result in self._means}
        here = self._on_node([results.get(id(each)) is not None for each in self._parameters])
        for piece in self._pieces:
            found = [
                result if (result := results[id(each)]) is not None else torch.zeros_like(each) for each in piece.own
            ]
            for parameter, result in piece.hand_out(found):
                if id(parameter) in here:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    parameter.grad.copy_(result)


def hand_out(held: Sequence[tuple[Parameter, Tensor]], nodes: Nodes) -> None:
    """Writes to each tensor what it holds on that rank of this node which has its parameter.

    A collective inside the node. Bytes on the link inside: (L-1)/L of the tensors', in float32 or wider.

    Args:
        held: Floating-point tensors, each with its parameter: the same on all ranks of a node, in an order in which
            those of each rank are alike.
        nodes: Who is on a node with this rank.
    """
    for piece in pieces_of(held, nodes):
        for tensor, result in piece.hand_out([each.detach() for each in piece.own]):
            tensor.detach().copy_(result)


def _views(tensors: Sequence[Tensor], row: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    sizes = [each.numel() for each in tensors]
    for tensor, part in zip(tensors, row.split([*sizes, row.numel() - sum(sizes)])):
        yield tensor, part.view(tensor.shape)


def _overlaps(tensors: Sequence[Tensor], stretch: slice) -> Iterator[tuple[Tensor, slice, slice]]:
    """Tensors of a row that a stretch of it meets: which of their elements, and where in the stretch these are."""
    at = 0
    for tensor in tensors:
        first, end = max(at, stretch.start), min(at + tensor.numel(), stretch.stop)
        if first < end:
            yield tensor, slice(first - at, end - at), slice(first - stretch.start, end - stretch.start)
        at += tensor.numel()


def _wide(parameter: Parameter) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)
