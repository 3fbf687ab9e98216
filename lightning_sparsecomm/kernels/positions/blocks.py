"""Codes that blocks of positions choose for themselves: the definition, in torch operations that run on any device."""

from typing import NamedTuple

import torch
from torch import Tensor

# Consecutive positions that share a code.
BLOCK = 64
# Codes are 0 to 63.
CODE_BITS = 6
LAST_CODE = 63
# The largest b of an Exp-Golomb code.
MOST_SHIFT = 20
# The longest prefix of an Exp-Golomb code: longer ones stand for runs of 2^32 zeros and more.
LONGEST_PREFIX = 32
GOLOMB, THIRDS, EXPONENTIAL = range(3)


class ParsedBlocks(NamedTuple):
    """What a section holds. The caller checks it against what the section should hold.

    Attributes:
        indices: `[held]` int64, positions below the size, strictly increasing.
        held: How many positions there are before the first that is cut off or not below the size; at most `count`.
        end: Where the section's last bit is, plus 1, if `held` is `count`.
        repeated: The first block that writes the code of the block before; -1 if there is none. Then `held` is 0.
    """

    indices: Tensor
    held: int
    end: int
    repeated: int


_NOTHING = 0, 0, -1
# The bits of a number that are written at a time.
_STEP = 24


class BlockKernels:
    """The kernels in torch. Subclasses are faster and give the same bits.

    A run is the number of zeros before a position. Each block of 64 runs, the last of which may have fewer, has a code
    c = 3b + kind, with which its runs are written as a prefix, q zeros and a one, and a suffix:

    - kind 0: q = ⌊run / 2^b⌋, and the rest in b bits;
    - kind 1: q = ⌊run / (3·2^b)⌋; of the rest, ⌊rest / 2^b⌋ is 0, 1 or 2. The suffix has the rest's lower b bits, and a
      bit that says whether it is more than 0. If so, one more bit, a third, says whether it is 2;
    - kind 2: q = ⌊log₂(⌊run / 2^b⌋ + 1)⌋, and run − (2^q − 1)·2^b in b + q bits.

    A section has a bit for each block that says whether its code differs from the one before (0 for the first); six
    bits for each code that does; all prefixes; all suffixes; all thirds. Numbers begin with the lowest bit.

    Sections may come from an untrusted source: readers stay within them, and take time linear in their length.

    Arguments that methods share:
        indices: `[k]` int64, strictly increasing, not negative, below 2^32.
        codes: `[⌈k / 64⌉]` uint8, at most 63: each block's code.
    """

    def choose_codes(self, indices: Tensor) -> Tensor:
        """A code for each block: the shortest of at most eight that suit its mean and its mean logarithm.

        With n the number of bits of ⌊mean run⌋, they are those of the kinds 0 and 1 from 3(n − 2) to 3n; those of kind
        2 with b = g and g − 1, where g = ⌊mean of ⌊log₂(run + 1)⌋⌋, at most 20; and that of the block before. Any other
        than that counts as six bits longer. Of equally short ones, it is the lowest.
        """
        return self.follow(*self.choices(indices))

    def choices(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """What each block chooses, if that of the block before suits it less, and which of those suit it no less.

        Returns:
            best: `[⌈k / 64⌉]` uint8, a code.
            kept: `[⌈k / 64⌉]` int64. Bit c is set if the block takes code c where the block before has it.
        """
        runs, held = _in_blocks(indices)
        counts = held.sum(1)
        means = runs.sum(1) // counts
        lengths = torch.where(means > 0, _log(means.clamp(min=1)) + 1, 0)[:, None]
        shifts = ((_log(runs + 1) * held).sum(1) // counts).clamp(max=MOST_SHIFT)[:, None]
        bits = torch.stack([(_bits(runs, code) * held).sum(1) for code in range(LAST_CODE + 1)], 1)
        codes = torch.arange(LAST_CODE + 1, device=indices.device)
        near = (codes >= 3 * (lengths - 2)) & (codes <= 3 * lengths) & (codes % 3 != EXPONENTIAL)
        near |= (codes == 3 * shifts + EXPONENTIAL) | (codes == 3 * (shifts - 1).clamp(min=0) + EXPONENTIAL)
        least = torch.where(near, bits, torch.iinfo(torch.int64).max).amin(1, keepdim=True)
        best = torch.where(near & (bits == least), codes, LAST_CODE).amin(1, keepdim=True)
        another = least + CODE_BITS
        kept = (bits < another) | (bits == another) & (codes < best)
        return best.view(-1).to(torch.uint8), (kept.to(torch.int64) << codes).sum(1)

    def follow(self, best: Tensor, kept: Tensor) -> Tensor:
        """The codes, given the result of `choices`: from block to block, since each looks at the one before."""
        codes, code = [], 0
        for own, mask in zip(best.tolist(), kept.tolist()):
            if not mask >> code & 1:
                code = own
            codes.append(code)
        return torch.tensor(codes, dtype=torch.uint8, device=best.device)

    def blocks_bits(self, indices: Tensor, codes: Tensor) -> int:
        """How many bits `write_blocks` needs."""
        runs, each = _runs(indices), _each(codes, indices.numel())
        shifts, kinds = each // 3, each % 3
        prefixes, _, thirds = _parts(runs, shifts, kinds)
        parts = (prefixes + 1 + _widths(prefixes, shifts, kinds)).sum() + (thirds >= 0).sum()
        return codes.numel() + CODE_BITS * int(_changes(codes).sum()) + int(parts)

    def write_blocks(self, indices: Tensor, codes: Tensor) -> Tensor:
        """Writes the run of zeros before each position in its block's code: `[bytes]` uint8."""
        runs, each, device = _runs(indices), _each(codes, indices.numel()), indices.device
        shifts, kinds = each // 3, each % 3
        prefixes, suffixes, thirds = _parts(runs, shifts, kinds)
        changes = _changes(codes)
        named = codes[changes].to(torch.int64)
        widths, has_third = _widths(prefixes, shifts, kinds), thirds >= 0
        flags_end = codes.numel() + CODE_BITS * named.numel()
        ends = flags_end + torch.cumsum(prefixes + 1, 0)
        suffix_ends = _last(ends, flags_end) + torch.cumsum(widths, 0)
        third_ends = _last(suffix_ends, flags_end) + torch.cumsum(has_third, 0)
        total = int(_last(third_ends, flags_end))
        words = torch.zeros(total // 32 + 4, dtype=torch.int64, device=device)
        _put(words, changes.nonzero().view(-1), torch.ones_like(named), 1)
        _put(words, codes.numel() + CODE_BITS * torch.arange(named.numel(), device=device), named, CODE_BITS)
        _put(words, ends - 1, torch.ones_like(ends), 1)
        _put(words, suffix_ends - widths, suffixes, int(widths.max()) if widths.numel() else 0)
        _put(words, third_ends[has_third] - 1, thirds[has_third], 1)
        return words.to(torch.int32).view(torch.uint8)[: (total + 7) // 8]

    def encode_blocks(self, indices: Tensor, most_bits: int) -> Tensor | None:
        """What `write_blocks` returns with the codes of `choose_codes`; None if that has more bits than `most_bits`."""
        codes = self.choose_codes(indices)
        return self.write_blocks(indices, codes) if self.blocks_bits(indices, codes) <= most_bits else None

    def read_codes(self, section: Tensor, count: int) -> tuple[Tensor, int]:
        """The codes of `count` positions' blocks, and the bit after them. The section has a bit for each block."""
        blocks = -(-count // BLOCK)
        changes = _unpacked(section[: (blocks + 7) // 8])[:blocks].to(torch.bool)
        written = int(changes.sum())
        end = blocks + CODE_BITS * written
        if end > 8 * section.numel():
            return changes.new_empty(0, dtype=torch.uint8), end
        bits = _unpacked(section[: (end + 7) // 8])[blocks:end].view(-1, CODE_BITS)
        numbers = (bits << torch.arange(CODE_BITS, dtype=torch.uint8, device=section.device)).sum(1, dtype=torch.uint8)
        return torch.cat([numbers.new_zeros(1), numbers])[changes.cumsum(0)], end

    def read_blocks(self, section: Tensor, count: int, size: int) -> ParsedBlocks:
        """Reads `count` positions; stops at one that exceeds the section or is not below `size`.

        The section has at least a bit for each position and each block. `size`, the length of the vector, is at most
        2^32.
        """
        nothing = ParsedBlocks(torch.empty(0, dtype=torch.int64, device=section.device), *_NOTHING)
        total = 8 * section.numel()
        codes, begin = self.read_codes(section, count)
        if begin > total:
            return nothing
        blocks = -(-count // BLOCK)
        changes = _unpacked(section[: (blocks + 7) // 8])[:blocks].to(torch.bool)
        repeated = (changes & ~_changes(codes)).nonzero()
        if repeated.numel():
            return nothing._replace(repeated=int(repeated[0, 0]))
        bits = _unpacked(section)
        ends = bits[begin:].nonzero().view(-1)[:count] + begin
        if ends.numel() < count:
            return nothing._replace(held=ends.numel())
        prefixes = torch.diff(ends, prepend=ends.new_tensor([begin - 1])) - 1
        each = _each(codes, count)
        shifts, kinds = each // 3, each % 3
        widths = _widths(prefixes, shifts, kinds)
        start = int(ends[-1]) + 1 if count else begin
        stops = start + torch.cumsum(widths, 0)
        sound = (stops <= total) & ((kinds != EXPONENTIAL) | (prefixes <= LONGEST_PREFIX))
        reading = torch.where(sound, widths, 0)
        suffixes = _read(section, torch.where(sound, stops - widths, 0), reading)
        more = sound & (kinds == THIRDS) & (suffixes >> shifts == 1)
        places = (int(stops[-1]) if count else start) + torch.cumsum(more, 0) - 1
        sound &= ~more | (places < total)
        taken = more & sound
        suffixes[taken] += bits[places[taken]].to(torch.int64) << shifts[taken]
        # What is not sound may be any number, and all of them are kept so small that sums cannot overflow int64.
        limit = prefixes.clamp(max=size + 1)
        exponential = ((1 << prefixes.clamp(max=LONGEST_PREFIX)) - 1) << shifts
        factors = torch.where(kinds == THIRDS, 3, 1)
        runs = torch.where(kinds == EXPONENTIAL, exponential, factors * limit << shifts) + suffixes
        indices = torch.cumsum(runs.clamp_(max=size) + 1, 0) - 1
        sound &= indices < size
        held = int(sound.logical_not().nonzero()[0, 0]) if not bool(sound.all()) else count
        end = (int(places[-1]) + 1 if count else start) if held == count else 0
        return ParsedBlocks(indices[:held], held, end, -1)


def _runs(indices: Tensor) -> Tensor:
    return torch.diff(indices, prepend=indices.new_full((1,), -1)).sub_(1)


def _in_blocks(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Runs, `[blocks, 64]`, padded with zeros, and which of them are no padding."""
    padding = (0, -indices.numel() % BLOCK)
    held = torch.nn.functional.pad(torch.ones_like(indices), padding).view(-1, BLOCK)
    return torch.nn.functional.pad(_runs(indices), padding).view(-1, BLOCK), held


def _each(codes: Tensor, count: int) -> Tensor:
    """The code of each position: `[count]` int64."""
    return codes.to(torch.int64).repeat_interleave(BLOCK)[:count]


def _changes(codes: Tensor) -> Tensor:
    """Which codes differ from the one before."""
    return torch.cat([codes.new_zeros(1), codes])[:-1] != codes


def _log(numbers: Tensor) -> Tensor:
    """⌊log₂⌋ of positive numbers below 2^53."""
    return torch.frexp(numbers.to(torch.float64)).exponent.to(torch.int64) - 1


def _parts(runs: Tensor, shifts: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The prefix and suffix of each run, and its third; -1 where it has none."""
    whole = runs >> shifts
    logs = _log(whole + 1)
    prefixes = torch.where(kinds == GOLOMB, whole, torch.where(kinds == THIRDS, whole // 3, logs))
    rest = whole - torch.where(kinds == THIRDS, 3 * prefixes, torch.where(kinds == GOLOMB, prefixes, (1 << logs) - 1))
    low = runs - (whole << shifts)
    high = torch.where(kinds == THIRDS, rest.clamp(max=1), rest)
    return prefixes, low + (high << shifts), torch.where((kinds == THIRDS) & (rest > 0), rest - 1, -1)


def _last(numbers: Tensor, otherwise: int) -> Tensor | int:
    """The last number, if there is one."""
    return numbers[-1] if numbers.numel() else otherwise


def _put(words: Tensor, starts: Tensor, numbers: Tensor, most: int) -> None:
    """Writes numbers of at most `most` bits into 32-bit words, which are int64, from these bits on.

    Nothing but zeros was written there. So adding a number writes it, in whichever order a GPU adds them.
    """
    for shift in range(0, most, _STEP):
        places = starts + shift
        shifted = (numbers >> shift & (1 << _STEP) - 1) << (places & 31)
        words.index_add_(0, places >> 5, shifted & 0xFFFFFFFF)
        words.index_add_(0, (places >> 5) + 1, shifted >> 32)


def _read(section: Tensor, starts: Tensor, widths: Tensor) -> Tensor:
    """The numbers of `widths` bits, at most 56, from these bits on, all within the section."""
    numbers = torch.zeros_like(starts)
    most = int(widths.max()) if widths.numel() else 0
    for byte in range((most + 14) // 8 if most else 0):
        place = ((starts >> 3) + byte).clamp(max=section.numel() - 1)
        numbers |= section[place].to(torch.int64) << 8 * byte
    return numbers >> (starts & 7) & (1 << widths) - 1


def _widths(prefixes: Tensor, shifts: Tensor, kinds: Tensor) -> Tensor:
    """How many bits each suffix has."""
    return shifts + torch.where(kinds == EXPONENTIAL, prefixes, (kinds == THIRDS).to(torch.int64))


def _bits(runs: Tensor, code: int) -> Tensor:
    """The bits that each run takes in this code."""
    shift, kind = divmod(code, 3)
    whole = runs >> shift
    if kind == THIRDS:
        return (whole + 2) // 3 + 2 + shift
    return (whole if kind == GOLOMB else 2 * _log(whole + 1)) + 1 + shift


def _unpacked(section: Tensor) -> Tensor:
    return (section[:, None] >> torch.arange(8, dtype=torch.uint8, device=section.device) & 1).view(-1)
