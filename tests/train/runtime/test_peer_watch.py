"""The connections between processes: what ends a run, and what does not. The members here speak the bytes."""

import queue
import socket
import struct

import pytest

from train.runtime import peer_watch


class Run:
    """Process 0 of a run of two, what it noticed, and process 1, if it comes; a stranger comes before it."""

    def __init__(self):
        self.noticed, self.address = queue.Queue(), None

    def decide(self, function):
        value = function()
        self.address = self.address or value
        return value

    def gather(self, text):
        _, port, secret = self.address
        self.stranger, self.member = (socket.create_connection(("localhost", port)) for _ in range(2))
        self.stranger.sendall(b"x" * 20)
        self.member.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        card = bytes.fromhex(secret) + (1).to_bytes(4)
        for piece in (card[:7], card[7:]):  # a card may come in pieces
            self.member.sendall(piece)
        return ["", "connected"]

    def watched(self, gather):
        calls = (lambda process, what=what: self.noticed.put((what, process)) for what in ("lost", "broken"))
        return peer_watch.peer_watch(0, ["localhost"], *calls, self.decide, gather)


def say_goodbye(end):
    end.sendall(b".")


def die(end):
    """As the operating system does for a process that ends."""
    end.close()


def be_cut_off(end):
    """As a network that drops a connection: it is reset."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


@pytest.mark.parametrize(
    ("happens", "reported"), [(say_goodbye, None), (die, ("lost", 1)), (be_cut_off, ("broken", 1))]
)
def test_a_process_is_lost_when_its_connection_is_closed_and_not_when_it_breaks(happens, reported):
    run = Run()
    with run.watched(run.gather) as apart:
        assert apart == []
        assert run.stranger.recv(1) == b"", "strangers are turned away"
        happens(run.member)
        if reported:
            assert run.noticed.get(timeout=10) == reported
        else:
            with pytest.raises(queue.Empty):
                run.noticed.get(timeout=0.3)
    run.stranger.close()
    run.member.close()


def test_a_process_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(peer_watch, "_PATIENCE", 0.3)
    with Run().watched(lambda text: ["", "connected"]) as apart:
        assert apart == [1]
