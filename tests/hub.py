"""A local server that answers as the Hugging Face hub does when files of a model are downloaded.

Small files come at once, and others by a redirect whose answer names size and hash of the linked file. Errors have the
hub's status and ``X-Error-Code``. See ``huggingface_hub``'s `get_hf_file_metadata` and `hf_raise_for_status`.
"""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"
"""The path of a file at the hub, as huggingface_hub fills it in."""
TOKEN = "hf_of_an_account"  # whose owner has accepted every licence
_FILE = re.compile(r"/(?P<kind>resolve|linked)/(?P<model>[\w.-]+/[\w.-]+)/(?P<revision>[^/]+)/(?P<file>.+)")


class Hub:
    """The models of a hub.

    Attributes:
        url: of the server; linked files are at another host, `storage`.
        folders: the folder of every commit of every model, by the model's name and the commit.
        refs: the commit of every branch and tag, by the model's name and the branch.
        gated: models whose files only `TOKEN` opens.
        asked: the files that were asked for, as ``method file``.
    """

    def __init__(self, url: str):
        self.url, self.storage = url, url.replace("127.0.0.1", "localhost")
        self.folders: dict[tuple[str, str], Path] = {}
        self.refs: dict[tuple[str, str], str] = {}
        self.gated: set[str] = set()
        self.asked: list[str] = []

    def add(self, model: str, folder: Path, branch: str = "main") -> str:
        """Puts a folder up as the newest commit of a branch; returns the commit."""
        commit = hashlib.sha1(f"{model} {branch} {len(self.folders)}".encode()).hexdigest()
        self.folders[model, commit], self.refs[model, branch] = folder, commit
        return commit

    def downloaded(self) -> set[str]:
        """The names of the files whose contents were sent."""
        return {asked.split()[1] for asked in self.asked if asked.startswith("GET")}


@contextmanager
def running() -> Iterator[Hub]:
    """A hub on a free port of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        """Everything but the content."""
        self._answer()

    def do_GET(self) -> None:
        """A file."""
        self._answer()

    def log_message(self, *_) -> None:
        """Nothing is printed."""

    def _answer(self) -> None:
        hub = self.server.hub
        # The hub has /{model}/resolve/{revision}/{file}; linked files are elsewhere.
        path = re.sub(r"^/([\w.-]+/[\w.-]+)/resolve/", r"/resolve/\1/", unquote(self.path))
        found = _FILE.fullmatch(path)
        if found is None:
            return self._refuse(404, "Unknown")
        kind, model, revision, file = found.group("kind", "model", "revision", "file")
        hub.asked.append(f"{self.command} {file}")
        commit = hub.refs.get((model, revision), revision)
        if not any(model == name for name, _ in hub.folders):
            return self._refuse(401, "RepoNotFound")
        if (model, commit) not in hub.folders:
            return self._refuse(404, "RevisionNotFound")
        if model in hub.gated and kind == "resolve" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, "GatedRepo")
        location = hub.folders[model, commit] / file
        about = {"X-Repo-Commit": commit}
        if not location.is_file():
            return self._refuse(404, "EntryNotFound", about)
        content = location.read_bytes()
        if kind == "linked":
            return self._send(200, content, {})
        if file.endswith(".safetensors"):
            linked = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"'}
            return self._send(302, b"", about | linked | {"Location": f"{hub.storage}/linked/{model}/{commit}/{file}"})
        return self._send(200, content, about | {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

    def _refuse(self, status: int, code: str, about: dict[str, str] | None = None) -> None:
        self._send(status, b"", {"X-Error-Code": code} | (about or {}))

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
