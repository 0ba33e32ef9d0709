"""A connection between process 0 and every other process, by which all notice at once when one dies.

A process that waits in a collective for one that died may wait until jax's heartbeats time out, after 100 seconds. The
system closes the connections of a process that ends, in whatever way, so an open connection is a sign of life. A
process that ends normally says goodbye first. When process 0 notices a loss it ends too, so all others notice.

A connection that breaks without being closed does not show that a process died: the network may have dropped it, or a
host is gone. Then jax's heartbeats decide.
"""

import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

_GOODBYE = b"."
_PATIENCE = 10.0  # seconds for an address of process 0 to answer
_SECRET = 16  # bytes of a secret that only processes of this run know
_NUMBER = 4  # bytes of a process's number


@contextmanager
def peer_watch(
    index: int,
    hosts: list[str],
    lost: Callable[[int], None],
    broken: Callable[[int], None],
    decide: Callable[[Callable[[], Any]], Any],
    gather: Callable[[str], list[str]],
) -> Iterator[list[int]]:
    """During a ``with``, calls ``lost(process)`` from a thread when a process has ended without a goodbye.

    Calls ``broken(process)`` when the connection of a process broke; that process is then no longer watched. Process
    0 is reached at one of the `hosts` that it names. Gives the processes that cannot reach process 0 within
    `_PATIENCE`; they are not watched either. `decide` and `gather` are those of `train.runtime.distributed`.
    """
    with ExitStack() as stack:
        server = stack.enter_context(_listen()) if index == 0 else None
        address = decide(lambda: [hosts, server.getsockname()[1], secrets.token_hex(_SECRET)])
        to_first = None if index == 0 else _connect(*address, index)
        answers = gather("" if to_first is None else "connected")
        ends = {0: to_first} if to_first else {}
        if server is not None:
            ends = _accept(server, address[2], sum(map(bool, answers)))
        known = decide(lambda: sorted(ends))
        apart = [process for process in range(1, len(answers)) if process not in known]
        if to_first and index in apart:
            to_first.close()
            ends = {}
        done = threading.Event()
        for process, end in ends.items():
            stack.enter_context(end)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # so that no network drops an idle connection
            threading.Thread(target=_watch, args=(end, process, lost, broken, done), name="peers", daemon=True).start()
        yield apart
        done.set()
        for end in ends.values():
            with suppress(OSError):
                end.sendall(_GOODBYE)


def _listen() -> socket.socket:
    """A socket on a free port of all interfaces."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def _connect(hosts: list[str], port: int, secret: str, index: int) -> socket.socket | None:
    """This process's connection to process 0; None when no address of process 0 answers."""
    for host in hosts:
        with suppress(OSError):
            end = socket.create_connection((host, port), timeout=_PATIENCE)
            end.sendall(bytes.fromhex(secret) + index.to_bytes(_NUMBER))
            end.settimeout(None)
            return end
    return None


def _accept(server: socket.socket, secret: str, count: int) -> dict[int, socket.socket]:
    """Process 0's connections to `count` processes, by number, or to the fewer that connect in time; others are
    refused."""
    ends: dict[int, socket.socket] = {}
    server.settimeout(_PATIENCE)
    with suppress(TimeoutError):
        while len(ends) < count:
            end, _ = server.accept()
            end.settimeout(_PATIENCE)
            with suppress(OSError):
                card = _read_card(end)
                if secrets.compare_digest(card[:_SECRET], bytes.fromhex(secret)):
                    end.settimeout(None)
                    ends[int.from_bytes(card[_SECRET:])] = end
                    continue
            end.close()
    return ends


def _read_card(end: socket.socket) -> bytes:
    """The bytes by which a process names itself, which may arrive in pieces; fewer if the connection ends early."""
    card = b""
    while len(card) < _SECRET + _NUMBER and (piece := end.recv(_SECRET + _NUMBER - len(card))):
        card += piece
    return card


def _watch(
    end: socket.socket,
    process: int,
    lost: Callable[[int], None],
    broken: Callable[[int], None],
    done: threading.Event,
) -> None:
    """Reads until the other side says goodbye, dies or is cut off; the latter two are ignored once this side is
    done."""
    try:
        said = end.recv(1)
    except OSError:
        if not done.is_set():
            broken(process)
        return
    if said != _GOODBYE and not done.is_set():
        lost(process)
