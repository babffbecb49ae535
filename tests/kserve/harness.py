"""A host with a model port: real fetchd, real state server, real S3 store; and something between it and its readers."""

from __future__ import annotations

import http.client
import http.server
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import redis

from relay.state.allowed_models import AllowedModels
from relay.state.api_keys import ApiKeys, Role
from relay.state.keys import SCHEDULER_EPOCH
from tests.fetchd.harness import Fetchd, safetensors_bytes
from tests.seaweed import KEY, SECRET
from thaw.ids import Namespace
from thaw.model import CHUNK_BYTES

ROOT = Path(__file__).parents[2]
STORE_KEYS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
SHARD = "model-00001-of-00002.safetensors"
SHARD_BYTES = 2 * CHUNK_BYTES + 1_000_003
"""Three chunks and a piece of THAW_MODEL_PORT_PIECE_MB=8 each, the last one short."""


def of_store(endpoint: str) -> dict[str, object]:
    """The settings of a fetchd that reads this store."""
    return {"THAW_S3_ENDPOINT": endpoint, "THAW_FETCHD_READ_TIMEOUT_S": 10, **STORE_KEYS}


def write_checkpoint(directory: Path, seed: int = 1) -> Path:
    """Write a model of two shards."""
    directory.mkdir(parents=True)
    data = bytes((i * seed) % 251 for i in range(1 << 16))
    for n in (1, 2):
        tensors = {f"model.layers.{n - 1}.w": (data * (SHARD_BYTES // len(data) + 1))[n:][:SHARD_BYTES]}
        (directory / f"model-0000{n}-of-00002.safetensors").write_bytes(safetensors_bytes(tensors))
    places = {f"model.layers.{n - 1}.w": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    plain = {"metadata": {"total_size": 2 * SHARD_BYTES}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(plain))
    config = {"num_hidden_layers": 2, "architectures": ["LlamaForCausalLM"], "seed": seed}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text('{"a": 1}')
    return directory


def key_of(valkey_url: str, namespace: str, *prefixes: str) -> str:
    """A tenant's key; ``prefixes``: the models that its namespace may have beside those for all."""
    with redis.Redis.from_url(valkey_url) as client:
        if prefixes:
            AllowedModels(client).add(Namespace(namespace), prefixes)
        return ApiKeys(client).create(Namespace(namespace), Role.TENANT)[0]


def revoke(valkey_url: str, key: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        ApiKeys(client).revoke(key.partition(":")[0])


_EPOCHS = itertools.count(3)


def set_epoch(valkey_url: str) -> None:
    """Be a scheduler that came later than all before."""
    with redis.Redis.from_url(valkey_url) as client:
        client.set(SCHEDULER_EPOCH, next(_EPOCHS))


class ModelPortProcess:
    """``python -m invoker.model_port.main``.  ``url`` is there once it listens."""

    def __init__(self, fetchd: Fetchd, valkey_url: str, **settings: object) -> None:
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "THAW_STATE_URL": valkey_url,
            "THAW_FETCHD_SOCKET": fetchd.socket,
            "THAW_MODEL_PORT_PIECE_MB": "8",
            **{k: str(v) for k, v in settings.items()},
        }
        self.process = subprocess.Popen(
            (sys.executable, "-m", "invoker.model_port.main"), env=environ, cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        self.events: list[dict[str, Any]] = []
        line = self.process.stderr.readline()
        if not line.startswith("{"):
            raise AssertionError(line + self.process.communicate(timeout=15)[1])
        self.address = json.loads(line)["address"]
        self.url = f"http://{self.address}"
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,))
        self._reader.start()

    def _read(self, stream: Any) -> None:
        self.events += (json.loads(line) for line in stream if line.startswith("{"))

    def end(self, sig: int = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(sig)
            self.process.wait(15)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def get(self, path: str, key: str = "", authorization: str = "") -> tuple[int, Any]:
        connection = http.client.HTTPConnection(*self.address.split(":"), timeout=60)  # type: ignore[arg-type]
        header = authorization or (f"Bearer {key}" if key else "")
        connection.request("GET", path, headers={"Authorization": header} if header else {})
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read())
        connection.close()
        return found


@contextmanager
def model_port(fetchd: Fetchd, valkey_url: str, **settings: object) -> Iterator[ModelPortProcess]:
    made = ModelPortProcess(fetchd, valkey_url, **settings)
    try:
        yield made
    finally:
        made.end()


def initializer(url: str, key: str, *arguments: str, patience_s: float = 30) -> subprocess.Popen[str]:
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "THAW_MODEL_PORT_URL": url,
        "THAW_API_KEY": key,
        "THAW_MODEL_PATIENCE_S": str(patience_s),
    }
    command = (sys.executable, "-m", "thaw.kserve.initializer", *arguments)
    return subprocess.Popen(command, env=environ, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def load(url: str, key: str, *arguments: str, patience_s: float = 30) -> tuple[int, str]:
    """Run the initializer to its end: its status, and what it printed."""
    process = initializer(url, key, *arguments, patience_s=patience_s)
    printed = process.communicate(timeout=120)[1]
    return process.returncode, printed


def store_bytes(fetchd: Fetchd) -> int:
    """The bytes that fetchd has read of its S3 store."""
    found = re.search(r'^thaw_fetchd_bytes_total\{source="s3"\} (\S+)$', fetchd.client.metrics(), re.M)
    return int(float(found[1])) if found else 0


Spoil = Callable[["Between", dict[str, str], Any, Any], bool]
"""Gets the parameters of a request for a file, the port's answer and the reader's socket.  True: it has answered."""


class Between(http.server.ThreadingHTTPServer):
    """Passes requests on to a model port, and notes those for files.  ``spoil`` may answer in its place."""

    daemon_threads = True

    def __init__(self, url: str, spoil: Spoil = lambda *_: False) -> None:
        self.there, self.spoil = urlsplit(url).netloc, spoil
        self.asked: list[dict[str, str]] = []
        self.stopped, self.reached = threading.Event(), threading.Event()
        super().__init__(("127.0.0.1", 0), _Passing)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))

    def __enter__(self) -> Between:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.shutdown()
        self.server_close()
        self._thread.join(5)


class _Passing(http.server.BaseHTTPRequestHandler):
    server: Between

    def do_GET(self) -> None:
        connection = http.client.HTTPConnection(self.server.there, timeout=60)
        try:
            connection.request("GET", self.path, headers={"Authorization": self.headers["Authorization"]})
            with connection.getresponse() as answer:
                self._pass_on(answer)
        except (OSError, http.client.HTTPException):  # one of the two has left
            self.close_connection = True
        finally:
            connection.close()

    def _pass_on(self, answer: http.client.HTTPResponse) -> None:
        parts = urlsplit(self.path)
        if parts.path == "/file" and answer.status == 200:
            asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
            self.server.asked.append(asked)
            if self.server.spoil(self.server, asked, answer, self.wfile):
                return
        self.wfile.write(f"HTTP/1.1 {answer.status} x\r\nContent-Length: {answer.length}\r\n\r\n".encode())
        self.wfile.write(answer.read())

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
