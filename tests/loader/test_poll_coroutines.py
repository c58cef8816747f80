"""Races between things that wait, over real sockets."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from teneral.loader.sources.http.poll_coroutines import PollCoroutine, Race, Wait


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Three connected pairs: a test writes to the first of each, a racer reads from the second."""
    made = [socket.socketpair() for _ in range(3)]
    for _, reading in made:
        reading.setblocking(False)
    yield made
    for pair in made:
        for end in pair:
            end.close()


def receive(reading: socket.socket, given_up: list[socket.socket]) -> PollCoroutine[bytes]:
    """What comes, or the error that b'!' asks for; notes that it was given up."""
    try:
        while True:
            try:
                data = reading.recv(100)
            except BlockingIOError:
                yield Wait(reading.fileno(), select.POLLIN)
                continue
            if data == b"!":
                raise ConnectionError("broken")
            return data
    except GeneratorExit:
        given_up.append(reading)
        raise


def test_the_first_to_get_something_wins_and_the_other_is_given_up(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    given_up: list[socket.socket] = []
    race = Race[bytes]()
    for _, reading in pairs[:2]:
        race.enter(receive(reading, given_up))
    assert race.wait() is None
    pairs[1][0].send(b"here")
    assert race.wait() == (1, b"here")
    race.close()
    assert given_up == [pairs[0][1]]


def test_a_racer_that_fails_in_passing_leaves_the_race_to_the_other(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    race = Race[bytes](passing=(ConnectionError,))
    for _, reading in pairs[:2]:
        race.enter(receive(reading, []))
    pairs[0][0].send(b"!")
    assert race.wait() is None
    assert len(race) == 1
    pairs[1][0].send(b"!")
    with pytest.raises(ConnectionError, match="broken"):
        race.wait()


def test_any_other_error_ends_the_race(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    race = Race[bytes](passing=(TimeoutError,))
    for _, reading in pairs[:2]:
        race.enter(receive(reading, []))
    pairs[0][0].send(b"!")
    with pytest.raises(ConnectionError, match="broken"):
        race.wait()


def test_the_oldest_makes_room_for_a_third(pairs: list[tuple[socket.socket, socket.socket]]) -> None:
    given_up: list[socket.socket] = []
    race = Race[bytes]()
    for _, reading in pairs[:2]:
        race.enter(receive(reading, given_up))
    race.drop_oldest()
    race.enter(receive(pairs[2][1], given_up))
    assert given_up == [pairs[0][1]]
    pairs[0][0].send(b"too late")
    pairs[2][0].send(b"here")
    assert race.wait() == (2, b"here")
    race.close()


def test_a_racer_that_need_not_wait_has_won_when_it_entered(
    pairs: list[tuple[socket.socket, socket.socket]],
) -> None:
    pairs[0][0].send(b"here")
    race = Race[bytes]()
    race.enter(receive(pairs[0][1], []))
    assert len(race) == 0
    assert race.wait() == (0, b"here")
