"""Whole numbers in as few bytes as they need, in payloads of any source."""

from lightning_sparsecomm.codecs.payload import wrong_section


def varint(number: int) -> bytes:
    """LEB128: seven bits a byte, lowest first. The highest bit says that another byte follows."""
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def read_varint(data: bytes, at: int, section: str) -> tuple[int, int]:
    """The number that begins at byte `at`, of at most 5 bytes, and the position of the byte after it.

    Raises:
        PayloadError: It ends later, or has more bytes than it needs. The error names the `section`.
    """
    number = 0
    for i, byte in enumerate(data[at : at + 5]):
        number |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            if i and not byte:
                raise wrong_section(section, f"count at byte {at} ends in 0x00", "fewer bytes")
            return number, at + i + 1
    found = f"count at byte {at} does not end within 5 bytes and the section"
    raise wrong_section(section, found, "a last byte below 0x80")
