"""An honest tenant: it invokes a Python function over kept-alive connections, one request at a time on each."""

from __future__ import annotations

import base64
import http.client
import threading
import time
from dataclasses import dataclass

from bench._common import percentile
from bench._platform import BenchPlatform
from thaw.cli.platform_api.client import action_path
from thaw.cli.platform_api.property_file import read_properties

HELLO = "def main(args):\n    return {'greeting': 'Hello ' + args.get('name', 'stranger') + '!'}\n"
_PATH = "/api/v1/namespaces/_/actions/hello?blocking=true&result=true"
_LIST = "/api/v1/namespaces/_/activations?name=hello"
_CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class Answers:
    n: int
    p50_ms: float
    p99_ms: float


class Honest:
    def __init__(self, platform: BenchPlatform) -> None:
        """Deploys the function."""
        auth = read_properties(platform.layout.wskprops)["AUTH"]
        self.port = int(platform.platform.apihost.rsplit(":", 1)[1])
        credentials = base64.b64encode(auth.encode()).decode()
        self._headers = {"Authorization": f"Basic {credentials}", "Content-Type": "application/json"}
        code = {"exec": {"kind": "python:3.11", "code": HELLO, "binary": False}, "limits": {"concurrency": 1}}
        platform.api.put(action_path("hello"), code, overwrite=True)

    def ask(self, seconds: float, *, lists: bool = False) -> Answers:
        """Ask for so many seconds, and return the answers. A wrong or missing answer ends the program: an honest tenant
        is never refused, and a broken connection would hide slow answers."""
        what = ("GET", _LIST, b"") if lists else ("POST", _PATH, b'{"name": "you"}')
        found: list[float] = []
        refused: list[str] = []
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=self._until, args=(what, end, found, refused)) for _ in range(_CONNECTIONS)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if refused:
            raise SystemExit(f"the function's answer was {refused[0]}")
        return Answers(len(found), round(percentile(found, 50), 2), round(percentile(found, 99), 2))

    def _until(self, what: tuple[str, str, bytes], end: float, found: list[float], refused: list[str]) -> None:
        try:
            self._ask(what, end, found, refused)
        except (OSError, http.client.HTTPException) as e:
            refused.append(f"none: {e!r}")

    def _ask(self, what: tuple[str, str, bytes], end: float, found: list[float], refused: list[str]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while time.monotonic() < end and not refused:
            began = time.monotonic()
            connection.request(*what, self._headers)
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                refused.append(f"{response.status}: {text[:300]!r}")
            found.append((time.monotonic() - began) * 1e3)
        connection.close()
