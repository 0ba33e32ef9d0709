"""The connections between processes: what ends a run, and what does not."""

import json
import socket
import struct
import threading

import pytest

from train.runtime import tether
from train.runtime.tether import _GOODBYE, _accept, _connect, _listen, _watch, tied

SECRET = "ab" * 16


def say_goodbye(end):
    end.sendall(_GOODBYE)


def die(end):
    """As the operating system does for a process that ends."""
    end.close()


def be_cut_off(end):
    """As a network that drops a connection: it is reset."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


@pytest.mark.parametrize(
    ("happens", "reported"), [(say_goodbye, []), (die, [("lost", 3)]), (be_cut_off, [("broken", 3)])]
)
@pytest.mark.parametrize("is_done", [False, True])
def test_a_process_is_lost_when_its_connection_is_closed_and_not_when_it_breaks(happens, reported, is_done):
    found, done = [], threading.Event()
    with socket.create_server(("localhost", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    if is_done:
        done.set()
    calls = (lambda process: found.append(("lost", process))), (lambda process: found.append(("broken", process)))
    with ours, theirs:
        watching = threading.Thread(target=_watch, args=(ours, 3, *calls, done))
        watching.start()
        happens(theirs)
        watching.join(timeout=10)
        assert not watching.is_alive()
    assert found == ([] if is_done else reported)


def test_a_card_may_come_in_pieces():
    with _listen() as server, socket.create_connection(("localhost", server.getsockname()[1])) as member:
        member.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        card = bytes.fromhex(SECRET) + (5).to_bytes(4)
        member.sendall(card[:7])
        threading.Timer(0.3, member.sendall, (card[7:],)).start()
        [(number, end)] = _accept(server, SECRET, 1).items()
        end.close()
        assert number == 5


def test_a_process_that_is_too_late_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(tether, "_PATIENCE", 0.3)
    with _listen() as server, _connect(["localhost"], server.getsockname()[1], SECRET, 2):
        ends = _accept(server, SECRET, 2)
        assert list(ends) == [2]
        ends[2].close()


def test_all_agree_on_who_is_apart(monkeypatch):
    """Of three processes, the second connects but never sends its card; no process reports another as lost."""
    monkeypatch.setattr(tether, "_PATIENCE", 0.5)
    monkeypatch.setattr(tether.socket.socket, "sendall", _unless_it_is_a_card_of(1, socket.socket.sendall))
    barrier, texts, found, lost = threading.Barrier(3), {}, {}, []

    def agreeing(index):
        def gather(text):
            texts[index] = text
            barrier.wait(10)
            answers = [texts[each] for each in range(3)]
            barrier.wait(10)
            return answers

        def decide(function):
            return json.loads(gather(json.dumps(function()) if index == 0 else "")[0])

        return decide, gather

    def take_part(index):
        with tied(index, ["localhost"], lost.append, lost.append, *agreeing(index)) as apart:
            found[index] = apart
            barrier.wait(10)

    threads = [threading.Thread(target=take_part, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == {index: [1] for index in range(3)}
    assert lost == []


def _unless_it_is_a_card_of(number, sendall):
    def send(end, content):
        if content[-4:] != number.to_bytes(4):
            sendall(end, content)

    return send
