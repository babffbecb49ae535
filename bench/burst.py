"""How long does the scheduler have to gather the requests of a burst, and what does gathering them gain?

Thirty chat requests are sent at once to one gateway process with a real state server, and their arrivals are timed
where the scheduler reads its events.  These times are then replayed to the pure policy on 16 idle hosts with links of
2 GB/s, a model of 13 GB and batches of 8, with several ways to gather (_gathering.py).  The results are the number of
groups that the policy starts, and its prediction of the burst's first tokens.  A burst ends when its requests are
answered with an error.
"""

from __future__ import annotations

import base64
import contextlib
import json
import queue
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import requests

from bench import _common
from bench._common import PYTHON, figure, python_env, say, start
from bench._gathering import gaps_ms, table
from relay.protocol.messages import DemandAdded, StartFailed
from relay.state import bus, redis_link
from relay.state.api_keys import ApiKey, ApiKeys, digest_of
from thaw.dev.components import _valkey_server
from thaw.dev.ports import free_ports
from thaw.errors import ErrorInfo
from thaw.ids import GroupId, Namespace
from thaw.logs import Log

_N_REQUESTS: Final = 30
_KEY: Final = ("23bc46b1-71f6-4ed5-8c54-816aa4f8c502", "secret")
_CONFIG: Final = {"kind": "llm:vllm", "model": {"uri": "s3://models/tiny", "served_name": "tiny"}}
_DEADLINE_S: Final = 30.0
_OVER: Final = ErrorInfo("unavailable", "The burst was measured.")


class Bursts:
    """Reads the events of ``state_url`` in the same way as the scheduler."""

    def __init__(self, state_url: str, port: int) -> None:
        self._port, self._client = port, redis_link.connect(state_url)
        self._arrived: queue.SimpleQueue[tuple[float, DemandAdded]] = queue.SimpleQueue()
        self._up = threading.Event()
        self._reader = bus.EventReader(state_url, self._take, self._up.set, Log("bench"))

    def __enter__(self) -> Bursts:
        self._reader.start()
        if not self._up.wait(_DEADLINE_S):
            raise SystemExit("the state server's events cannot be read")
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.stop()
        self._reader.join(_DEADLINE_S)
        self._client.close()

    def arrivals_s(self) -> list[float]:
        """The arrivals of one burst, in seconds from the moment in which the first request is sent."""
        with contextlib.ExitStack() as stack:
            connections = [self._connect(stack) for _ in range(_N_REQUESTS)]
            began = time.monotonic()
            for connection in connections:
                connection.sendall(_request())
            found = [self._arrived.get(timeout=_DEADLINE_S) for _ in connections]
            self._end([demand for _, demand in found])
            for connection in connections:
                connection.recv(65536)  # after the answer the gateway no longer holds the request
        return [at - began for at, _ in found]

    def _connect(self, stack: contextlib.ExitStack) -> socket.socket:
        return stack.enter_context(socket.create_connection(("127.0.0.1", self._port), _DEADLINE_S))

    def _end(self, demands: list[DemandAdded]) -> None:
        activations = tuple(demand.activation_id for demand in demands)
        bus.publish(self._client, StartFailed(demands[0].action, activations, _OVER, GroupId("")))

    def _take(self, message: object) -> None:
        if isinstance(message, DemandAdded):
            self._arrived.put((time.monotonic(), message))


def _request() -> bytes:
    body = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hi"}]}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Basic {base64.b64encode(':'.join(_KEY).encode()).decode()}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


@contextlib.contextmanager
def _gateway(work: Path) -> Iterator[tuple[str, int]]:
    """A state server and a gateway, with a chat function that no instance serves.

    Yields the state server's URL and the gateway's port.
    """
    state_port, port = free_ports(2)
    url = f"redis://127.0.0.1:{state_port}/0"
    with contextlib.ExitStack() as stack:
        settings = [
            "--port",
            str(state_port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(work),
            "--save",
            "",
            "--appendonly",
            "yes",
            "--appendfsync",
            "always",
        ]
        state = start([str(_valkey_server()), *settings], work / "state.log", "Ready to accept connections")
        stack.callback(state.stop)
        with redis_link.connect(url) as client:
            ApiKeys(client).put(digest_of(":".join(_KEY)), ApiKey(Namespace("guest"), "guest-user"))
        env = python_env(THAW_STATE_URL=url, THAW_GATEWAY_BIND=f"127.0.0.1:{port}")
        gateway = start([PYTHON, "-m", "gateway.main"], work / "gateway.log", '"event": "gateway_started"', env=env)
        stack.callback(gateway.stop)
        reply = requests.put(
            f"http://127.0.0.1:{port}/api/v1/namespaces/_/actions/chat",
            json={"config": _CONFIG},
            auth=_KEY,
            timeout=_DEADLINE_S,
        )
        reply.raise_for_status()
        yield url, port


def main() -> int:
    options = _common.options(__doc__ or "")
    rounds = options.n or (6 if options.quick else 24)
    work = Path(tempfile.mkdtemp(prefix="bench-burst-"))
    try:
        with _gateway(work) as (state_url, port), Bursts(state_url, port) as sender:
            sender.arrivals_s()  # the gateway makes its own connections during this first burst
            bursts = [sender.arrivals_s() for _ in range(rounds)]
    finally:
        shutil.rmtree(work)
    gaps, ways = gaps_ms(bursts), table(bursts)
    say(f"{_N_REQUESTS} requests at the scheduler, ms: " + ", ".join(f"{k} {v:.2f}" for k, v in gaps.items()))
    say("  starts are decided  groups  workers  foretold TTFT s  a lone request waits, ms")
    for name, way in ways.items():
        say(f"  {name:18}  {way['groups']:6.1f}  {way['workers']:7.1f}  {way['ttft_s']:15.2f}  {way['lone_ms']:.0f}")
    figures = [figure(name, value) for name, value in gaps.items()]
    for name in ("each", "gather_50"):
        figures += [figure(f"groups_{name}", ways[name]["groups"]), figure(f"ttft_{name}_s", ways[name]["ttft_s"])]
    return _common.report("burst", figures, rounds=rounds, requests=_N_REQUESTS, ways=ways)


if __name__ == "__main__":
    sys.exit(main())
