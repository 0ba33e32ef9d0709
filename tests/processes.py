"""Processes that run a command together, as the hosts of a pod do."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from flags import environment

ROOT = Path(__file__).parents[1]
TIMEOUT = 150  # seconds for a command; far more than it needs, even on a busy machine


class Processes:
    """The processes of one run, started together, with ``devices`` devices each. Their output goes to files."""

    def __init__(
        self,
        folder: Path,
        name: str,
        count: int,
        devices: int,
        *overrides: str,
        own: dict | None = None,
        command: str = "fit",
    ):
        self.directory = folder / name
        with socket.create_server(("localhost", 0)) as server:
            address = f"localhost:{server.getsockname()[1]}"
        self._outputs = [folder / f"{name}.{index}.txt" for index in range(count)]
        self._started = []
        for index, output in enumerate(self._outputs):
            distributed = {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
            }
            env = environment(devices, **(distributed if count > 1 else {}))
            argv = [sys.executable, "-m", "train", command, str(folder / "config.yaml"), *overrides, f"name={name}"]
            with output.open("wb") as file:
                self._started.append(
                    subprocess.Popen(
                        argv + (own or {}).get(index, []),
                        cwd=ROOT,
                        env=env,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )

    @property
    def all(self) -> range:
        return range(len(self._started))

    def wait_until(self, condition) -> None:
        """Returns as soon as `condition()` is true; fails if the first process ends before that."""
        while not condition():
            assert self._started[0].poll() is None, f"the run ended too early:\n{self.printed(0)}"
            time.sleep(0.002)

    def send(self, number: signal.Signals, *indices: int) -> None:
        for index in indices:
            self._started[index].send_signal(number)

    def end(self, *wanted: int | None) -> list[int]:
        """Waits for all processes and checks their exit statuses against `wanted`, where None is any error."""
        try:
            found = [process.wait(timeout=TIMEOUT) for process in self._started]
        except subprocess.TimeoutExpired:
            found = [process.poll() for process in self._started]
            self.send(signal.SIGKILL, *self.all)
        as_wanted = all(a == b or (b is None and bool(a)) for a, b in zip(found, wanted, strict=True))
        outputs = "\n".join(f"--- process {n}:\n{self.printed(n)}" for n in self.all)
        assert as_wanted, f"the processes ended with {found}, not {wanted} (None: still there)\n{outputs}"
        return found

    def printed(self, index: int) -> str:
        return self._outputs[index].read_text(errors="replace")

    def errors(self, index: int) -> list[str]:
        """The error messages that a process printed."""
        return [line for line in self.printed(index).splitlines() if line.startswith("error:")]
