"""A real fetchd process, real small checkpoints, and an HTTP store that misbehaves when a test asks for it."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote

import pytest
from blake3 import blake3

from relay.clients.fetch import DescriptorClient, FetchClient
from relay.protocol.messages import FetchDone, FetchStart, FetchStarted
from relay.protocol.segment import SegmentReader
from tests.forked import Forked
from thaw.checkpoints import checkpoint, hash_tree
from thaw.dev.links import inside
from thaw.errors import ThawError, Unavailable
from thaw.ids import GroupId, InstanceId
from thaw.model import CHUNK_BYTES, INDEX_NAME, FileRange, ModelFacts
from thaw.plan import PlanModel

ROOT = Path(__file__).parents[2]
WEIGHTS = "model.safetensors"
CONFIG = {"num_hidden_layers": 3, "architectures": ["LlamaForCausalLM"]}


def safetensors_bytes(tensors: Mapping[str, bytes]) -> bytes:
    """A safetensors file of U8 tensors."""
    header: dict[str, Any] = {}
    at = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(tensors.values())


def write_model(directory: Path, n_layers: int = 3, layer_bytes: int = 3_000_001, seed: int = 1) -> Path:
    """Write a checkpoint whose bytes depend on ``seed``."""
    directory.mkdir(parents=True, exist_ok=True)
    stream = hashlib.shake_128(str(seed).encode()).digest(layer_bytes)
    tensors = {"model.embed_tokens.weight": stream[:1000]}
    for i in range(n_layers):
        tensors[f"model.layers.{i}.w"] = bytes([i]) + stream[1:]
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    (directory / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": n_layers}))
    (directory / "tokenizer.json").write_text('{"a": 1}')
    return directory


def digest(data: bytes | memoryview) -> str:
    return str(blake3(data).hexdigest())


def write_index(directory: Path) -> Path:
    """Write the ``thaw-index.json`` of a checkpoint.  Return the checkpoint."""
    files, tensors = [], []
    for path in sorted(directory.iterdir()):
        if checkpoint.is_fetchable(path.name):
            data = path.read_bytes()
            chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
            files.append(checkpoint.describe_file(path.name, chunks, digest))
            if path.suffix == ".safetensors":
                n = checkpoint.header_bytes(path.name, data, len(data))
                sums = hash_tree.TensorDigests(checkpoint.parse_header(path.name, data[8 : 8 + n], len(data)), digest)
                for chunk in chunks:
                    sums.update(chunk)
                tensors += sums.tensors()
    (directory / INDEX_NAME).write_bytes(checkpoint.write_index(checkpoint.build_index(files, tensors)))
    return directory


def flip(path: Path, at: int) -> None:
    """Change one bit of a file, whose length stays the same."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class Fetchd:
    """``with Fetchd(tmp) as fetchd``: the process is started and ready, and gone at the end."""

    def __init__(self, directory: Path, *, namespace: str = "", **settings: object) -> None:
        self.directory, self._namespace = directory, namespace
        self.short = tempfile.TemporaryDirectory(prefix="thaw-")  # pytest's own paths are too long for a socket
        self.socket = f"{self.short.name}/c.sock"
        self.client = FetchClient(self.socket)
        variables = {
            "THAW_FETCHD_POOL_MB": 96,
            "THAW_FETCHD_SLAB_MB": 4,
            "THAW_FETCHD_READ_TIMEOUT_S": 20,  # a store of this process may have to wait for a processor
            "THAW_FETCHD_ALLOW": "127.0.0.1, 10.231.0.0/16",  # the tests' stores
            "THAW_FETCHD_FILE_ROOTS": "/",
            "THAW_FETCHD_OWN_STORE": "s3://",
            **settings,
        }
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "THAW_HOST_ID": "host-1",
            "THAW_FETCHD_SOCKET": self.socket,
            "THAW_FETCHD_DOORS": f"{self.short.name}/d",
            **{k: str(v) for k, v in variables.items()},
        }
        self.events: list[dict[str, Any]] = []
        self._asked: dict[str, tuple[GroupId, int]] = {}  # by segment: the group and stage that requested it first

    def __enter__(self) -> Self:
        reading, writing = os.pipe()
        try:
            self.process = self._begin(writing)
        finally:
            os.close(writing)
        self._log = os.fdopen(reading)
        for line in self._log:
            if not line.startswith("{"):
                raise AssertionError(line + self._log.read())
            self.events.append(json.loads(line))
            if self.events[-1]["event"] in ("ready", "start_failed"):
                break
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        return self

    def _begin(self, stderr: int) -> subprocess.Popen[bytes] | Forked:
        if not self._namespace:
            return Forked("fetchd.main", env=self.environ, stderr=stderr)
        command = inside(self._namespace, (sys.executable, "-m", "fetchd.main"))
        return subprocess.Popen(command, env=self.environ, cwd=ROOT, stderr=stderr)

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
        self._reader.join(30)
        self._log.close()
        self.short.cleanup()

    def _read_log(self) -> None:
        for line in self._log:
            self.events.append(json.loads(line) if line.startswith("{") else {"event": "noise", "text": line})

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def start(
        self, facts: ModelFacts, group: str = "g", ranges: tuple[FileRange, ...] = (), **more: Any
    ) -> FetchStarted:
        """Fetch the whole model unless ``ranges`` says otherwise."""
        model = PlanModel(facts.uri, facts.sha256, facts.etag, facts.n_bytes)
        whole = tuple(FileRange(name, 0, n) for name, n in facts.files.items())
        fields = {"stage": 0, "epoch": 1, **more}
        started = self.client.start(FetchStart(GroupId(group), model=model, ranges=ranges or whole, **fields))
        self._asked.setdefault(started.segment_id, (GroupId(group), fields["stage"]))
        return started

    def wait(self, group: str = "g", deadline_s: float = 30) -> FetchDone:
        """Wait until the group's fetch has ended."""
        return self.client.wait(GroupId(group), 0, deadline_s=deadline_s)

    def fetch(self, facts: ModelFacts, group: str = "g", ranges: tuple[FileRange, ...] = (), **more: Any) -> FetchDone:
        """Start a fetch, and wait until it has ended."""
        self.start(facts, group, ranges, **more)
        return self.wait(group)

    def cancel(self, group: str = "g") -> None:
        self.client.cancel(GroupId(group), 1)

    def open(self, segment_id: str, instance: str = "i1", group: str = "") -> tuple[DescriptorClient, SegmentReader]:
        """Grant a segment, which this group has requested, to an instance.  Without one it is the first that has."""
        path = self.client.open_descriptor_socket(InstanceId(instance))
        asked = (GroupId(group), 0) if group else self._asked[segment_id]
        self.client.grant_segment(InstanceId(instance), segment_id, *asked)
        descriptors = DescriptorClient.connect(path)
        return descriptors, descriptors.segment(deadline_s=30)

    @contextmanager
    def reading(self, segment_id: str, instance: str = "i1", group: str = "") -> Iterator[SegmentReader]:
        """A container's view of a segment.  The container is gone at the end."""
        descriptors, reader = self.open(segment_id, instance, group)
        try:
            yield reader
        finally:
            reader.close()
            descriptors.close()
            with suppress(Unavailable):  # fetchd has ended
                self.client.close_descriptor_socket(InstanceId(instance))

    def files(self, facts: ModelFacts, group: str = "g") -> dict[str, bytes]:
        """The files that a start with these facts gets."""
        with self.reading(self.fetch(facts, group).segment_id, group, group) as reader:
            return {name: file_bytes(reader, facts, name) for name in facts.files}

    def reason(self, told: ThawError) -> dict[str, Any]:
        """Return the logged event of an error.  A tenant gets only the error's id."""
        found = re.search(r"\(error id (\w{8})\)$", told.message)
        assert found, told.message
        logged: list[dict[str, Any]] = []
        wait_until(lambda: bool(logged.extend(e for e in self.events if e.get("error_id") == found[1]) or logged))
        return logged[0]

    @contextmanager
    def failing(self, error: type[ThawError], words: str, hint: str = "") -> Iterator[None]:
        """The block fails with this error, and the log says why."""
        with pytest.raises(error) as told:
            yield
        reason = self.reason(told.value)
        assert words in reason["error"]
        assert hint in reason.get("hint", "")

    def free_bytes(self) -> int:
        return self.client.status().free_bytes


def file_bytes(reader: SegmentReader, facts: ModelFacts, name: str) -> bytes:
    return bytes(reader.view(reader.locate(name, 0), facts.files[name]))


Fault = Callable[["Request"], bool]
"""A function that gets a request before it is answered.  It returns True when it has handled the request itself."""


class Request:
    def __init__(self, sock: socket.socket, method: str, name: str, first: int, last: int, data: bytes, number: int):
        self.sock, self.method, self.name, self.number = sock, method, name, number
        self.first, self.last, self.data = first, last, data

    def head(self, status: str = "206 Partial Content", *, length: int | None = None, etag: str = "e1") -> bytes:
        n_bytes = self.last + 1 - self.first if length is None else length
        span = f"Content-Range: bytes {self.first}-{self.first + n_bytes - 1}/{len(self.data)}\r\n"
        ranged = span if status.startswith("206") else ""
        return f'HTTP/1.1 {status}\r\nETag: "{etag}"\r\n{ranged}Content-Length: {n_bytes}\r\n\r\n'.encode()

    @property
    def body(self) -> bytes:
        return self.data[self.first : self.last + 1]

    def cut(self, n_bytes: int) -> None:
        """Send the head and so many bytes of the body."""
        self.sock.sendall(self.head() + self.body[:n_bytes])

    def refuse(self, status: str) -> None:
        self.sock.sendall(self.head(status, length=0))


def of_weights(request: Request) -> bool:
    return (request.method, request.name) == ("GET", WEIGHTS)


def every(request: Request) -> bool:
    return True


class Instead:
    """A fault: the first ``times`` requests that are ``wanted`` get this answer, and are kept in ``met``."""

    def __init__(self, wanted: Fault, answer: Callable[[Request], object], times: float = math.inf) -> None:
        self._wanted, self._answer, self._times = wanted, answer, times
        self.met: list[Request] = []
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> bool:
        with self._lock:
            if len(self.met) >= self._times or not self._wanted(request):
                return False
            self.met.append(request)
        self._answer(request)
        return True


def holding(until: threading.Event, begun: threading.Event | None = None) -> Fault:
    """A fault: no byte of an object is sent before ``until``.  ``begun`` is set by the first request."""

    def hold(request: Request) -> bool:
        if request.method == "GET" and not until.is_set():
            if begun is not None:
                begun.set()
            until.wait(30)
        return False

    return hold


class Store:
    """An HTTP/1.1 file server with ranges and keep-alive on a real socket.  ``fault`` may answer in its place."""

    def __init__(
        self,
        root: Path,
        fault: Fault = lambda request: False,
        tls: ssl.SSLContext | None = None,
        missing: str = "404 Not Found",
    ) -> None:
        self.missing = missing
        self.root, self.fault, self._tls = root, fault, tls
        self.requests: list[tuple[str, str, int]] = []
        self.sent_bytes = 0
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http{'s' if tls else ''}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for sock in list(self._open):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(30)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(sock)
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        if self._tls is not None:
            try:
                sock = self._tls.wrap_socket(sock, server_side=True)
            except OSError:  # the client does not trust this server
                sock.close()
                return
        with sock, sock.makefile("rb") as stream:
            try:
                while self._answer(sock, stream):
                    pass
            except OSError:
                pass
        self._open.discard(sock)

    def _answer(self, sock: socket.socket, stream: Any) -> bool:
        words = stream.readline().split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/"):  # TLS may begin with three words, too
            return False
        headers = b"".join(itertools.takewhile(lambda line: line != b"\r\n", stream))
        name = words[1].decode().rpartition("/")[2]
        path = self.root / unquote(words[1].decode()).lstrip("/")
        if not path.is_file():
            sock.sendall(f"HTTP/1.1 {self.missing}\r\nContent-Length: 0\r\n\r\n".encode())
            return True
        data = path.read_bytes()
        span = re.search(rb"Range: bytes=(\d+)-(\d+)", headers)
        first, last = (int(span[1]), int(span[2])) if span else (0, len(data) - 1)
        with self._lock:
            self.requests.append((words[0].decode(), name, first))
            request = Request(sock, words[0].decode(), name, first, min(last, len(data) - 1), data, len(self.requests))
        if self.fault(request):
            return False
        if words[0] == b"HEAD":
            sock.sendall(request.head("200 OK"))
        else:
            self.sent_bytes += len(request.body)
            sock.sendall(request.head() + request.body)
        return True


def wait_until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    """Wait for an effect of another process that no message announces: check often, and fail at the deadline."""
    deadline = time.monotonic() + deadline_s
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        tick.wait(0.01)
