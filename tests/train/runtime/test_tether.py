"""The line between processes: what ends a run, and what does not."""

import socket
import struct
import threading

import pytest

from train.runtime.tether import _GOODBYE, _watch


def say_goodbye(end):
    end.sendall(_GOODBYE)


def die(end):
    """As the system does for a process that ends."""
    end.close()


def be_cut_off(end):
    """As a network does that drops a connection: it is reset."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


@pytest.mark.parametrize(("happens", "told"), [(say_goodbye, []), (die, [("lost", 3)]), (be_cut_off, [("broken", 3)])])
@pytest.mark.parametrize("is_done", [False, True])
def test_a_process_is_lost_when_its_connection_is_closed_and_not_when_it_breaks(happens, told, is_done):
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
    assert found == ([] if is_done else told)
