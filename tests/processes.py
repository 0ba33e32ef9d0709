"""Processes that run a command together, as the hosts of a pod do."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from flags import environment

ROOT = Path(__file__).parents[1]
TIMEOUT = 150  # seconds for a command, on a busy machine; far more than it takes


class Processes:
    """The processes of one run, each with so many devices, started together; what they print is in files."""

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
        self._prints = [folder / f"{name}.{index}.txt" for index in range(count)]
        self._started = []
        for index, prints in enumerate(self._prints):
            several = {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
            }
            env = environment(devices, **(several if count > 1 else {}))
            order = [sys.executable, "-m", "train", command, str(folder / "config.yaml"), *overrides, f"name={name}"]
            with prints.open("wb") as file:
                self._started.append(
                    subprocess.Popen(
                        order + (own or {}).get(index, []),
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
        """Returns as soon as `condition()` is true; fails when the run is over before."""
        while not condition():
            assert self._started[0].poll() is None, f"the run ended too early:\n{self.printed(0)}"
            time.sleep(0.002)

    def send(self, number: signal.Signals, *indices: int) -> None:
        for index in indices:
            self._started[index].send_signal(number)

    def end(self, *wanted: int | None) -> list[int]:
        """The exit statuses, which must be as `wanted`, None for any error; all processes must end by themselves."""
        try:
            found = [process.wait(timeout=TIMEOUT) for process in self._started]
        except subprocess.TimeoutExpired:
            found = [process.poll() for process in self._started]
            self.send(signal.SIGKILL, *self.all)
        right = all(a == b or (b is None and bool(a)) for a, b in zip(found, wanted, strict=True))
        prints = "\n".join(f"--- process {n}:\n{self.printed(n)}" for n in self.all)
        assert right, f"the processes ended with {found}, not {wanted} (None: still there)\n{prints}"
        return found

    def printed(self, index: int) -> str:
        return self._prints[index].read_text(errors="replace")

    def errors(self, index: int) -> list[str]:
        """The lines of a process that tell an error."""
        return [line for line in self.printed(index).splitlines() if line.startswith("error:")]
