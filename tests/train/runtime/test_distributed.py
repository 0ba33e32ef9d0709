"""How a process finds the others, which addresses it can write to, and how processes watch each other."""

import os
import signal
import socket
import threading

import jax
import pytest

from train.runtime import distributed, tether
from train.runtime.distributed import collect, decide, gather, is_loss, reached_preemption, start, stop_requested
from train.runtime.paths import check_checkpoints, path, write_file

ADDRESS = {"JAX_COORDINATOR_ADDRESS": "first:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}


@pytest.fixture
def joined(monkeypatch):
    """A function that gives the arguments of `jax.distributed.initialize`, or None if it was not called."""
    calls = [None]
    monkeypatch.setattr(jax.distributed, "initialize", lambda *places, **named: calls.append((places, named)))
    return lambda: calls[-1]


@pytest.mark.parametrize(
    "environment",
    [{}, {"SLURM_JOB_ID": "7"}, {**SLURM, "SLURM_NTASKS": "1"}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}],
)
def test_one_process_joins_nobody(joined, environment):
    start(environment)
    assert joined() is None


def test_variables_name_the_processes(joined):
    start({**ADDRESS, **SLURM})
    assert joined() == (("first:1234", 4, 2), {"cluster_detection_method": "deactivate"})


@pytest.mark.parametrize(
    "environment",
    [
        SLURM,
        {"OMPI_COMM_WORLD_SIZE": "2"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"},
        {**SLURM, "JAX_COORDINATOR_ADDRESS": "first:1234"},
    ],
)
def test_a_cluster_is_left_to_jax(joined, environment):
    start(environment)
    assert joined() == ((), {})


@pytest.mark.parametrize(("cpu", "found"), [({}, ((), {})), ({"JAX_PLATFORMS": "cpu"}, None)])
def test_a_host_of_tpus_joins_its_pod_unless_it_computes_on_its_cpu(joined, monkeypatch, cpu, found):
    monkeypatch.setattr(distributed.Path, "exists", lambda place: str(place) == "/dev/accel0")
    start({"TPU_WORKER_HOSTNAMES": "a,b", **cpu})
    assert joined() == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"JAX_PROCESS_ID": ""}, "JAX_PROCESS_ID not set; a process of several needs JAX_COORDINATOR_ADDRESS, "),
        ({"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID must be from 0 to JAX_NUM_PROCESSES - 1, found '4' of '4'"),
        ({"JAX_NUM_PROCESSES": "four"}, "found '2' of 'four'"),
        ({"JAX_COORDINATOR_ADDRESS": "first"}, "JAX_COORDINATOR_ADDRESS must be host:port, found 'first'"),
    ],
)
def test_incomplete_or_invalid_variables_are_refused(joined, changes, message):
    with pytest.raises(ValueError, match=message):
        start({**ADDRESS, **changes})
    assert joined() is None


def test_one_process_agrees_with_itself():
    assert gather("mine") == ["mine"]
    assert decide(lambda: {"a": [1]}) == {"a": [1]}
    assert collect(lambda: {"a": [1]}) == [{"a": [1]}]


def test_an_error_of_process_0_is_raised_in_all(monkeypatch):
    sent = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(distributed, "gather", lambda text: sent.append(text) or [sent[0], text])

    def fails():
        raise FileNotFoundError("no such text")

    for index in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        with pytest.raises(FileNotFoundError, match="no such text"):
            decide(fails)
    assert sent[1] == ""


@pytest.mark.parametrize(("kind", "raised"), [(ValueError, ValueError), (PermissionError, OSError)])
def test_an_error_of_any_process_is_raised_in_all(monkeypatch, kind, raised):
    """Two processes, which run here one after the other; the second one fails."""
    sent = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(distributed, "gather", lambda text: sent.append(text) or [sent[0], text])

    def fails():
        raise kind("its disk")

    assert collect(lambda: [1]) == [[1], [1]]
    with pytest.raises(raised, match="its disk"):
        collect(fails)
    monkeypatch.setattr(distributed, "gather", lambda text: [text, sent[1]])
    with pytest.raises(raised, match="its disk"):
        collect(lambda: [1])


def test_a_signal_asks_one_process_to_stop():
    with stop_requested() as stop:
        assert not reached_preemption(1, stop)
        os.kill(os.getpid(), signal.SIGTERM)
        assert reached_preemption(1, stop)


@pytest.mark.parametrize(
    ("error", "loss"),
    [
        (jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"), True),
        (ValueError("UNKNOWN: Gloo AllGather failed"), True),
        (TimeoutError("no sign of life from process 3"), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (ValueError("train.rows"), False),
        (None, False),
    ],
)
def test_lost_processes_are_distinguished_from_other_errors(error, loss):
    assert is_loss(error) == loss


def watched(says: bytes, done: bool = False) -> list[int]:
    """The processes that are reported as lost when process 3 sends `says` and ends."""
    lost, finished = [], threading.Event()
    here, there = socket.socketpair()
    if done:
        finished.set()
    with here, there:
        there.sendall(says)
        there.close()
        tether._watch(here, 3, lost.append, lambda _: None, finished)
    return lost


def test_a_process_that_ends_without_a_goodbye_is_lost():
    assert watched(b"") == [3]
    assert watched(b".") == []
    assert watched(b"", done=True) == []


@pytest.mark.parametrize(("module", "status"), [("google.auth.exceptions", 2), ("gcsfs.retry", 2), ("train.loop", 1)])
def test_a_process_without_access_to_a_store_leaves_with_one_line(monkeypatch, capsys, module, status):
    statuses = []
    monkeypatch.setattr(distributed, "_leaving", threading.Lock())
    monkeypatch.setattr(distributed, "_GRACE", 0.0)
    monkeypatch.setattr(os, "_exit", statuses.append)
    distributed._leave(type("NoAccess", (Exception,), {"__module__": module})("no credentials"))
    printed = capsys.readouterr().err
    assert statuses == [status]
    assert (printed == "error: process 0 of 1: no credentials\n") == (status == 2)


def test_strangers_are_turned_away_and_members_are_known():
    secret = "ab" * 16
    with tether._listen() as server:
        port = server.getsockname()[1]
        with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(b"x" * 20)
            with tether._connect(["localhost"], port, secret, 2) as member:
                [(number, end)] = tether._accept(server, secret, 1).items()
                end.sendall(b"!")
                member.settimeout(10)
                assert (number, member.recv(1)) == (2, b"!")
                end.close()
            assert stranger.recv(1) == b""


def test_no_connection_to_a_process_that_cannot_be_reached():
    with tether._listen() as server:
        port = server.getsockname()[1]
    assert tether._connect(["localhost"], port, "ab" * 16, 1) is None


def test_addresses(tmp_path):
    assert path("runs/a") == path("runs") / "a"
    assert path(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    assert str(path("memory://runs") / "a") == "memory://runs/a"
    with pytest.raises(ValueError, match="nowhere://x: unknown kind of address nowhere://; gs:// and local"):
        path("nowhere://x")
    check_checkpoints(tmp_path)
    with pytest.raises(ValueError, match="cannot be written to memory://, which TensorStore does not write"):
        check_checkpoints(path("memory://runs"))


@pytest.mark.parametrize("where", ["memory://files", None])
def test_files_are_written_whole(tmp_path, where):
    folder = path(where or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    for text in ("first", "second"):
        write_file(folder / "a.txt", text)
        assert (folder / "a.txt").read_text() == text
    assert [place.name for place in folder.iterdir()] == ["a.txt"]
