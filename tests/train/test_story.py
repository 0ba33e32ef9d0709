"""A run from end to end, as on a pod: the hosts share only an object store, and one of them dies."""

import json
import random
import signal
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

import pytest
import yaml
from object_store import of_the_store, serving_by_another
from processes import Processes

pytest.importorskip("gcsfs")
pytestmark = pytest.mark.slow

STEPS, HOSTS = 40, 4
EXTENDED = {"name": "rope", "label": "ntk", "extend": {"frequencies": {"name": "ntk", "factor": 8.0}}}


class Bucket:
    """What is in the store, over its own interface."""

    def __init__(self, address: str):
        self._address = address

    def put(self, name: str, text: str) -> None:
        url = f"{self._address}/upload/storage/v1/b/bucket/o?uploadType=media&name={quote(name, safe='')}"
        urlopen(url, text.encode(), timeout=30).close()

    def read(self, name: str) -> bytes | None:
        try:
            with urlopen(
                f"{self._address}/storage/v1/b/bucket/o/{quote(name, safe='')}?alt=media", timeout=30
            ) as found:
                return found.read()
        except HTTPError:
            return None

    def rows(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.read(name) or b"").splitlines()]


@pytest.fixture
def bucket(monkeypatch):
    """The store that all processes use instead of Google's, with some texts."""
    draw = random.Random(0)
    with serving_by_another() as address:
        for name, value in of_the_store(address).items():
            monkeypatch.setenv(name, value)
        found = Bucket(address)
        for number in range(6):
            found.put(f"text/{number}.txt", " ".join(draw.choices(("the", "of", "a", "text", "not"), k=200)))
        yield found


@pytest.fixture
def folder(tmp_path):
    """A config whose rows are split over the hosts."""
    data = {"source": "files", "paths": ["gs://bucket/text/*.txt"], "held_out": 0.3, "cache": "gs://bucket/tokens"}
    train = {"length": 32, "batch_tokens": 128, "steps": STEPS, "warmup_steps": 2, "checkpoint_every": 3}
    config = {
        "output": "gs://bucket/runs",
        "data": data,
        "model": {"num_layers": 1, "model_dim": 16, "num_heads": 4, "mlp_dim": 16},
        "train": train | {"log_every": 1, "mesh": {"data": 1, "context": HOSTS}},
        "evaluate": {"lengths": [32, 256], "tokens": 512, "batch_tokens": 512},
        "compare": {"schemes": ["rope", EXTENDED]},
        "monitor": {"tensorboard": False, "evaluate_every": 4, "compilation_cache": str(tmp_path / "compiled")},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def test_a_pod_trains_loses_a_host_resumes_and_is_measured(folder, bucket):
    hosts = Processes(folder, "pod", HOSTS, 1)
    hosts.wait_until(lambda: bucket.read("runs/pod/checkpoints/3/commit_success.txt") is not None)
    hosts.send(signal.SIGKILL, 2)
    hosts.end(None, None, -9, None)
    Processes(folder, "pod", HOSTS, 1).end(*[0] * HOSTS)
    other = "evaluate.mesh={data: 1, fsdp: 2, context: 2}"
    Processes(folder, "pod", 2, 2, other, command="evaluate").end(0, 0)
    prompt = {0: ["--prompt", "the text", "--tokens", "5"]}
    Processes(folder, "pod", 1, 4, own=prompt, command="generate").end(0)
    Processes(folder, "both", 1, 4, command="compare").end(0)
    Processes(folder, "pod", 1, 4, "gs://bucket/model", command="export").end(0)

    measured = bucket.rows("runs/pod/evaluation.jsonl")
    assert [row["length"] for row in measured] == [32, 256]
    both = {(row["label"], row["length"]): row["window_nll"] for row in bucket.rows("runs/both/results.jsonl")}
    assert both.keys() == {(label, length) for label in ("rope", "ntk") for length in (32, 256)}
    for row in measured:  # the same training, by one process that was not killed
        assert row["window_nll"] == pytest.approx(both["rope", row["length"]], rel=1e-3)
    assert bucket.read("model/model.safetensors")
    page = bucket.read("runs/pod/index.html").decode()
    for part in ("256 (8x)", "Time of training", "restart", "data:image/png"):
        assert part in page
    assert bucket.read("runs/pod/training.png")
