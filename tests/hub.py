"""A hub on loopback that speaks the part of Hugging Face's API that a download uses, and its store at another port.

Weights are in LFS: the hub answers 302 with a signed URL of the store.  Other files it gives itself.  A test changes
repositories, tokens and signatures while it runs; ``fault`` may answer in the hub's place.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qs, unquote, urlsplit

Files = Mapping[str, bytes]


def files_in(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(directory.iterdir()) if p.is_file()}


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_lfs(name: str) -> bool:
    return name.endswith(".safetensors")


class Asked(NamedTuple):
    server: str  # "hub" or "store"
    method: str
    path: str
    token: str
    first: int


@dataclass
class Repository:
    """A repository of the hub.  ``opens`` are the tokens that may read it; None means everybody."""

    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    opens: frozenset[str] | None = None
    is_gated: bool = False  # its files' names are public, their bytes are not

    def commit(self, files: Files, branch: str = "main") -> str:
        text = json.dumps([[n, git_oid(d)] for n, d in sorted(files.items())]) + str(len(self.commits)) + branch
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha], self.branches[branch] = dict(files), sha
        return sha

    def find(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class LoopbackHub:
    def __init__(self, page_size: int = 1000, tls: ssl.SSLContext | None = None) -> None:
        """``tls`` is for the hub; its store is plain."""
        self.repositories: dict[str, Repository] = {}
        self.moved: dict[str, str] = {}
        self.tokens: set[str] = set()
        self.asked: list[Asked] = []
        self.fault: Callable[[Answering], bool] = lambda answering: False
        self.page_size = page_size
        self.generation = 0  # the signatures that the store accepts
        self.sent_bytes = 0
        self.weak = ""  # the file whose etag is marked as weak
        self.lock = threading.Lock()
        self._servers = [_Server(self, _Hub), _Server(self, _Store)]
        self.endpoint, self.store = (f"http://127.0.0.1:{s.server_address[1]}" for s in self._servers)
        if tls is not None:
            self.endpoint = self.endpoint.replace("http:", "https:")
            self._servers[0].socket = tls.wrap_socket(self._servers[0].socket, server_side=True)

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=s.serve_forever, args=(0.05,)) for s in self._servers]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        for thread in self._threads:
            thread.join(5)

    def add(self, name: str, files: Files, **more: Any) -> Repository:
        repository = self.repositories[name] = Repository(**more)
        repository.commit(files)
        return repository

    def expire(self) -> None:
        """From now on the store refuses all URLs that were signed before."""
        self.generation += 1

    def blob(self, sha256: str) -> bytes | None:
        for repository in self.repositories.values():
            for files in repository.commits.values():
                for data in files.values():
                    if hashlib.sha256(data).hexdigest() == sha256:
                        return data
        return None

    def requests(self, server: str = "hub", method: str = "") -> list[str]:
        return [a.path for a in self.asked if a.server == server and method in ("", a.method)]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: LoopbackHub, handler: type[Answering]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.hub = hub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no defect."""


class Answering(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    name = ""
    server: _Server

    @property
    def hub(self) -> LoopbackHub:
        return self.server.hub

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    @property
    def span(self) -> tuple[int, int] | None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)?", self.headers.get("Range", ""))
        return (int(found[1]), int(found[2] or 1 << 60)) if found else None

    def do_GET(self) -> None:
        first = self.span[0] if self.span else 0
        with self.hub.lock:
            self.hub.asked.append(Asked(self.name, self.command, self.path, self.token, first))
        if not self.hub.fault(self):
            self.answer()

    do_HEAD = do_GET

    def answer(self) -> None:
        raise NotImplementedError

    def tell(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def give(self, data: bytes, cut: int | None = None, **headers: str) -> None:
        """The object, or the range of it that was asked for; with ``cut`` only that many bytes, then the end."""
        if self.span is None:
            self.tell(200, data, Accept_Ranges="bytes", **headers)
            return
        first, last = self.span[0], min(self.span[1], len(data) - 1)
        if first > last:
            self.tell(416)
            return
        body = data[first : last + 1]
        self.send_response(206)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with self.hub.lock:
            self.hub.sent_bytes += len(body[:cut])
        self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: tests read ``asked``."""


class _Hub(Answering):
    name = "hub"

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/((?:refs/[^/]+/)?[^/]+)/(.+)", path)
        found = api or file
        if found is None:
            self.tell(404)
            return
        if found[1] in self.hub.moved:
            self.tell(307, Location=self.path.replace(found[1], self.hub.moved[found[1]]))
            return
        repository = self.hub.repositories.get(found[1])
        if self.token and self.token not in self.hub.tokens:
            self.tell(401, X_Error_Message="Invalid credentials in Authorization header")
            return
        may = repository is not None and (repository.opens is None or self.token in repository.opens)
        if repository is None or not (may or repository.is_gated):
            self.tell(404 if self.token else 401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
            return
        sha = repository.find(found[3] if api else found[2])
        if sha is None:
            self.tell(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
        elif api:
            self._describe(found[1], sha, repository.commits[sha], found[2])
        elif not may:
            self.tell(403 if self.token else 401, X_Error_Code="GatedRepo", X_Error_Message="Access is restricted")
        else:
            self._resolve(sha, repository.commits[sha], found[3])

    def _resolve(self, sha: str, files: Files, name: str) -> None:
        data = files.get(name)
        if data is None:
            self.tell(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", X_Repo_Commit=sha)
        elif not is_lfs(name):
            self.give(data, ETag=f'"{git_oid(data)}"', X_Repo_Commit=sha)
        else:
            oid = hashlib.sha256(data).hexdigest()
            self.tell(
                302,
                b"Found. Redirecting",
                Location=f"{self.hub.store}/blobs/{oid}?expires=1&signature={self.hub.generation}",
                X_Repo_Commit=sha,
                X_Linked_Etag=f'W/"{oid}"' if name == self.hub.weak else f'"{oid}"',
                X_Linked_Size=str(len(data)),
            )

    def _describe(self, name: str, sha: str, files: Files, what: str) -> None:
        if what == "revision":
            siblings = [{"rfilename": n} for n in files]
            self.tell(200, json.dumps({"id": name, "sha": sha, "siblings": siblings}).encode())
            return
        query = parse_qs(urlsplit(self.path).query)
        recursive = query.get("recursive") == ["true"]
        entries = [_entry(n, d) for n, d in sorted(files.items()) if recursive or "/" not in n]
        at = int(query.get("cursor", ["0"])[0])
        page, rest = entries[at : at + self.hub.page_size], len(entries) > at + self.hub.page_size
        url = f"{self.hub.endpoint}/api/models/{name}/tree/{sha}?cursor={at + self.hub.page_size}"
        url += "&recursive=true" if recursive else ""
        link = {"Link": f'<{url}>; rel="next"'} if rest else {}
        self.tell(200, json.dumps(page).encode(), Content_Type="application/json", **link)


def _entry(name: str, data: bytes) -> dict[str, object]:
    oid, n_bytes = hashlib.sha256(data).hexdigest(), len(data)
    lfs = {"lfs": {"oid": oid, "size": n_bytes, "pointerSize": 130}} if is_lfs(name) else {}
    return {"type": "file", "path": name, "size": n_bytes, "oid": git_oid(data), **lfs}


class _Store(Answering):
    name = "store"

    def answer(self) -> None:
        parts = urlsplit(self.path)
        data = self.hub.blob(parts.path.rpartition("/")[2])
        if parse_qs(parts.query).get("signature") != [str(self.hub.generation)]:
            self.tell(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
        elif data is None:
            self.tell(404)
        else:
            self.give(data)
