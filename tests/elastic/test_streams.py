"""Messages over several connections: they arrive whole, or not at all."""

import socket
import threading

import pytest
import torch
from torch import Tensor

from lightning_sparsecomm.elastic.streams import CONNECTIONS, PLACE_BYTES, Place, Sending, fetch

SECONDS = 20.0


def content_of(count: int) -> Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def sending(content: Tensor, connecting: float = SECONDS) -> Sending:
    return Sending(content, "127.0.0.1", connecting, SECONDS)


@pytest.mark.parametrize("count", [1, 2**18, 2**18 + 1, 10_000_001])
def test_a_message_arrives_whole(count: int) -> None:
    sent = content_of(count)
    outgoing = sending(sent)
    received = torch.zeros_like(sent)
    fetch(outgoing.place, received, SECONDS)
    outgoing.wait()
    assert torch.equal(received, sent)
    assert outgoing.over


def test_a_message_that_was_altered_on_its_way_is_refused() -> None:
    sent = content_of(1_000_000)
    outgoing = sending(sent)
    # What leaves is no longer what the digest is of.
    sent[654_321] ^= 4
    with pytest.raises(ConnectionError, match=r"the 1,000,000 bytes from 127\.0\.0\.1:\d+ are damaged"):
        fetch(outgoing.place, torch.zeros_like(sent), SECONDS)
    outgoing.wait()


def test_whoever_lacks_the_token_gets_nothing() -> None:
    sent = content_of(1_000_000)
    outgoing = sending(sent)
    received = torch.zeros_like(sent)
    with pytest.raises(ConnectionError, match=r"of 1,000,000 bytes from 127\.0\.0\.1:\d+, 0 have arrived"):
        fetch(outgoing.place._replace(token="00" * 16), received, SECONDS)
    outgoing.wait()
    assert not received.any()


def test_others_that_connect_do_not_keep_it_from_its_receiver() -> None:
    sent = content_of(1_000_000)
    outgoing = sending(sent)
    received = torch.zeros_like(sent)
    with socket.create_connection((outgoing.place.host, outgoing.place.port)) as other:
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        fetch(outgoing.place, received, SECONDS)
    assert torch.equal(received, sent)


def test_a_stranger_that_says_nothing_holds_nobody_up() -> None:
    outgoing = Sending(content_of(1_000), "127.0.0.1", connecting=0.2, timeout=1000.0)
    with socket.create_connection((outgoing.place.host, outgoing.place.port)):
        outgoing.turn_away()
        outgoing.wait()
    assert outgoing.over


def test_a_receiver_that_does_not_come_is_not_waited_for() -> None:
    outgoing = sending(content_of(1), connecting=0.1)
    outgoing.wait()
    with pytest.raises(ConnectionError, match="of 1 bytes"):
        fetch(outgoing.place, torch.zeros(1, dtype=torch.uint8), SECONDS)
    outgoing = sending(content_of(1))
    outgoing.turn_away()
    outgoing.wait()


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\0" * 5,
        (8).to_bytes(8, "little") + (3).to_bytes(4, "little"),
        (2**63).to_bytes(8, "little") + b"\1\0\0\0",
    ],
)
def test_what_is_no_piece_of_it_is_an_error(wrong: bytes) -> None:
    """Nothing; half a head; a piece beyond the end; one far beyond it."""
    server = socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS)

    def serve() -> None:
        for _ in range(CONNECTIONS):
            connection, _ = server.accept()
            with connection:
                connection.recv(16)
                connection.sendall(wrong)

    thread = threading.Thread(target=serve)
    thread.start()
    place = Place(10, "127.0.0.1", server.getsockname()[1], "00" * 16, "00000000")
    with server, pytest.raises(ConnectionError, match=r"of 10 bytes from .*, 0 have arrived"):
        fetch(place, torch.zeros(10, dtype=torch.uint8), SECONDS)
    thread.join()


def test_a_place_is_read_as_it_was_written() -> None:
    place = Place(2**40, "2001:db8:85a3:8d3:1319:8a2e:370:7348", 65_535, "ab" * 16, "0123abcd")
    assert Place.from_tensor(place.to_tensor()) == place
    assert place.to_tensor().shape == (PLACE_BYTES,)
    with pytest.raises(ValueError, match="is no place"):
        Place.from_tensor(torch.zeros(PLACE_BYTES, dtype=torch.uint8))
