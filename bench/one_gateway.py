"""How many streams does one gateway hold, and what does a whole invocation cost compared with a bare web application?

Streams are answers of the real engine.  All of them are requested before any has ended, and each must get every token
and its end.  Invocations are blocking calls of a Python function, with key check, routing, container and record.  They
are compared with a flask application under gunicorn that says hello, on the same cores and with the same load
generator.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench import _common, _model, _streams
from bench._common import PYTHON, cpu_seconds, interleave, judge, median, python_env, say, start
from bench._platform import BenchPlatform, llm_config
from thaw.cli.model_stores.demo_model import cache_dir
from thaw.cli.platform_api.client import action_path
from thaw.cli.platform_api.property_file import read_properties
from thaw.dev.ports import free_ports
from thaw.dev.smollm2 import obtain

_HELLO = "def main(args):\n    return {'greeting': 'Hello ' + args.get('name', 'stranger') + '!'}\n"
_FLASK = """
import flask
app = flask.Flask("hello")
@app.post("/hello")
def hello():
    return {"greeting": "Hello " + (flask.request.get_json(silent=True) or {}).get("name", "stranger") + "!"}
"""
_THREADS = 8
_TOKENS = 16
"""The tokens of each stream: enough that the first stream has not ended when the last one is accepted."""


class GatewayBench:
    def __init__(self, work: Path, platform: BenchPlatform, load: Path) -> None:
        self.work, self.platform, self.load = work, platform, load
        self.auth = read_properties(platform.layout.wskprops)["AUTH"]
        self.port = int(platform.platform.apihost.rsplit(":", 1)[1])

    def invocations(self, connections: int, seconds: float) -> dict[str, Any]:
        before, cpu = self._records(), self._cpu_s()
        found = self._run(self.port, "/api/v1/namespaces/_/actions/hello?blocking=true", connections, seconds)
        end = time.monotonic() + 30
        while (made := self._records() - before) < found["answers"] and time.monotonic() < end:
            time.sleep(0.1)  # records are written after the answers
        if made != found["answers"]:
            raise SystemExit(f"{found['answers']} answers, {made} records")
        found["cpu_ms"] = round(1000 * (self._cpu_s() - cpu) / made, 3)
        return found

    def bare(self, port: int, connections: int, seconds: float) -> dict[str, Any]:
        return self._run(port, "/hello", connections, seconds)

    def hold(self, streams: int) -> _streams.Held:
        held = _streams.hold(self.port, self.auth, "chat", streams, _TOKENS, 300.0)
        say(f"streams: {held}")
        return held

    def _run(self, port: int, path: str, connections: int, seconds: float) -> dict[str, Any]:
        body = b'{"name": "you"}'
        request = self.work / f"request-{port}"
        auth = base64.b64encode(self.auth.encode()).decode()
        request.write_bytes(
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Basic {auth}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        command = [str(self.load), str(port), str(request), str(connections), str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise SystemExit(f"the load generator failed: {done.stderr}")
        found: dict[str, Any] = json.loads(done.stdout)
        if found["not_200"]:
            raise SystemExit(f"{found['not_200']} of {found['answers']} answers were not 200")
        return found

    def _cpu_s(self) -> float:
        """The CPU seconds of all processes of the platform, containers included.

        The CPU time of a process that has ended is lost.
        """
        return sum(cpu_seconds(pid) for pid in self.platform.pids() if Path(f"/proc/{pid}").exists())

    def _records(self) -> int:
        return int(self.platform.api.get("activations", count="true")["activations"])


@contextlib.contextmanager
def _flask(work: Path) -> Any:
    """The flask application with one worker process, as many as the gateway has."""
    (work / "hello_app.py").write_text(_FLASK)
    port = free_ports(1)[0]
    command = [
        PYTHON,
        "-m",
        "gunicorn",
        "--bind",
        f"127.0.0.1:{port}",
        "--worker-class",
        "gthread",
        "--workers",
        "1",
        "--threads",
        str(_THREADS),
        "hello_app:app",
    ]
    program = start(command, work / "flask.log", "Booting worker", env=python_env(), cwd=work)
    try:
        yield port
    finally:
        program.stop()


def main() -> int:
    options = _common.options(__doc__ or "", streams=(1000, "streams held at once"), connections=(8, "of the load"))
    rounds = options.n or (2 if options.quick else 7)
    seconds = 3.0 if options.quick else 10.0
    work = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        load = work / "load"
        source = Path(__file__).with_name("_load.cpp")
        subprocess.run(["g++", "-O2", "-std=c++17", str(source), "-o", str(load)], check=True)
        model = work / "store" / "smollm2"
        shutil.copytree(obtain(cache_dir(), say), model)
        _model.write_index(model)
        platform = stack.enter_context(BenchPlatform(work / "state", store=work / "store"))
        bench = GatewayBench(work, platform, load)
        code = {"exec": {"kind": "python:3.11", "code": _HELLO, "binary": False}, "limits": {"concurrency": 1}}
        platform.api.put(action_path("hello"), code, overwrite=True)
        bench.invocations(options.connections, 2.0)  # this starts the containers
        with _flask(work) as port:
            runs = {
                "thaw": partial(bench.invocations, options.connections, seconds),
                "flask": partial(bench.bare, port, options.connections, seconds),
            }
            found = interleave(runs, rounds)
        config = llm_config(f"file://{model}", max_batch=256)
        platform.deploy("chat", {**config, "limits": {"concurrency": options.streams}})
        platform.caller("chat").chat("Hello.", 4)
        n_holds = 1 if options.quick else min(rounds, 5)
        holds = [bench.hold(options.streams) for _ in range(n_holds)]
    held = min(holds, key=lambda h: min(h.at_once, h.complete))
    rps = {name: median([r["per_s"] for r in values]) for name, values in found.items()}
    thaw = found["thaw"]
    floor = f"{rps['thaw']:.0f} against {rps['flask']:.0f} a second, p50 {median([r['p50_ms'] for r in thaw]):.1f} ms"
    goals = [
        judge(
            "streams_at_once",
            min(held.at_once, held.complete),
            ">=",
            1000,
            rounds=n_holds,
            floor=f"{held.complete} of {held.asked} complete in {held.seconds:.0f} s; {held.first_failure}",
        ),
        judge("rps_vs_bare_flask", rps["thaw"] / rps["flask"], ">=", 0.2, floor=floor),
    ]
    return _common.report(
        "one_gateway",
        goals,
        rounds=rounds,
        per_s=rps,
        connections=options.connections,
        cpu_ms_an_invocation=median([r["cpu_ms"] for r in thaw]),
        streams_s=round(held.seconds, 1),
        tokens_a_stream=_TOKENS,
    )


if __name__ == "__main__":
    sys.exit(main())
