"""How a process finds the others, and what it does at a signal."""

import os
import signal
import threading

import jax
import pytest
from refusals import refused

from train.runtime.distributed import EXPLICIT, reached_preemption, start, stop_requested

ADDRESS = {"JAX_COORDINATOR_ADDRESS": "first:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
POD = {"TPU_WORKER_HOSTNAMES": "a,b"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
BY_JAX = ((), {"heartbeat_timeout_seconds": 30})


@pytest.fixture
def joined(monkeypatch):
    """A function that gives the arguments of `jax.distributed.initialize`, or None if it was not called."""
    calls = [None]
    monkeypatch.setattr(jax.distributed, "initialize", lambda *places, **named: calls.append((places, named)))
    return lambda: calls[-1]


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, None),
        ({**SLURM, "SLURM_NTASKS": "1"}, None),
        (KUBERNETES, None),
        (
            {**ADDRESS, **SLURM},
            (("first:1234", 4, 2), {**BY_JAX[1], "cluster_detection_method": "deactivate"}),
        ),
        (SLURM, BY_JAX),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, BY_JAX),
        ({**KUBERNETES, "JOB_COMPLETION_INDEX": "0"}, BY_JAX),
        ({**SLURM, "JAX_COORDINATOR_ADDRESS": "first:1234"}, BY_JAX),
        (POD, BY_JAX),
        ({**POD, "JAX_PLATFORMS": "cpu"}, None),
    ],
    ids=str,
)
def test_a_process_joins_those_that_its_environment_names(joined, monkeypatch, environment, found):
    monkeypatch.setattr("train.runtime.distributed.Path.exists", lambda place: str(place) == "/dev/accel0")
    off = {} if "TPU_WORKER_HOSTNAMES" in environment else {"TPU_SKIP_MDS_QUERY": "1"}
    start({**environment, **off})
    assert joined() == found


def test_incomplete_or_invalid_variables_are_refused(joined):
    for name, values in {EXPLICIT[0]: ["first"], EXPLICIT[1]: ["four"], EXPLICIT[2]: ["", "4"]}.items():
        for value in values:
            refused(name, lambda changes={name: value}: start({**ADDRESS, **changes}))
    assert joined() is None


def test_a_signal_asks_one_process_to_stop():
    with stop_requested() as stop:
        assert not reached_preemption(1, stop)
        os.kill(os.getpid(), signal.SIGTERM)
        assert reached_preemption(1, stop)


def test_signals_are_left_alone_outside_the_main_thread():
    handler, seen = signal.getsignal(signal.SIGINT), []

    def look():
        with stop_requested():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [handler]
