"""The definition that the sketch kernels are tested against, against the documented example."""

from tests.reference.count_sketch import place


def test_worked_example():
    # The example in docs/formats.md.
    signs = 0xA65305FD338EC8FE, 0x9AAF21D8296E1E3D
    for block, start in enumerate((72, 54)):
        for i in range(64):
            assert place(64 * block + i, 0, 100, 7) == ((start + i) % 100, bool(signs[block] >> i & 1))
