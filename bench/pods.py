"""What does a start take where the container is a pod, compared with driver ``process`` and with a pod made on demand?

Each start is a new action's first request, from the client's request to its answer: the whole answer of a Python
function, and the first token of SmolLM2-135M, whose bytes are in the host's memory already.  Starts on the cluster and
on a platform of this machine alternate.  Each begins when every host has its stem cells, so no pod that replaces an
earlier one imports vLLM meanwhile; the one that replaces the cell of the start itself does.  Then the stem cells of the
cluster are switched off, and the same starts make their pods on demand.

The cluster is that of KUBECONFIG, on which the first block of docs/kubernetes.md has run.  The requests go to the
address of a gateway's pod, so run this on a machine that reaches pods (a node does).
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import _common, _model
from bench._common import figure, interleave, judge, median, say
from bench._origin import Origin
from bench._platform import BenchPlatform, llm_config
from bench._sse import Caller
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.cli.model_stores.demo_model import cache_dir
from thaw.cli.platform_api.client import Client, action_path
from thaw.cli.platform_api.host_reports import reports
from thaw.cli.platform_api.property_file import Target, resolve
from thaw.dev.smollm2 import obtain
from thaw.host import HostReport

_NAMESPACE = "thaw"
_CODE = "def main(args):\n    return {'n': args['n'] + 1}\n"
_PROMPT = "A cook has three baskets. The first holds twelve apples. Explain how many apples there are."
_MEMORY = {"gpu_memory_mb": 1024, "host_memory_mb": 768}
"""Together less than the limit of a stem cell, which no cluster before 1.33 can raise: such a start makes a pod."""
_WAIT_S = 180.0
_AT_ONCE = 8
_CHANGES = ("POST", "PUT", "PATCH")


class Place:
    """A platform that starts containers.  ``model_uri``: where it finds the model."""

    def __init__(self, target: Target, model_uri: str) -> None:
        self.api = Client(target)
        self._target, self._model_uri, self._n = target, model_uri, 0
        self._before = set[str]()  # the instances of others

    def function_ms(self) -> float:
        """Return the milliseconds of a Python function's first answer."""
        name = self.deploy_function()
        began = time.monotonic()
        self.invoke(name)
        taken_ms = 1000 * (time.monotonic() - began)
        self.remove(name)
        return taken_ms

    def model_ms(self) -> float:
        """Return the milliseconds to the model's first token."""
        config = llm_config(self._model_uri) | {"resources": _MEMORY}
        name = self._deploy({"config": config, "exec": {"kind": KIND_LLM, "code": ""}})
        caller = Caller(self._target.apihost, name, self._target.require_auth())
        answer = caller.chat(_PROMPT, 8)
        caller.close()
        record = self.api.get(f"activations/{answer.activation_id}?wait_s=10")
        say(f"{name}: {[note['value'] for note in record['annotations'] if note['key'] == 'startMode']}")
        self.remove(name)
        return 1000 * answer.ttft_s

    def starts_per_s(self) -> float:
        """Return the rate of the starts of several functions at once."""
        names = [self.deploy_function() for _ in range(_AT_ONCE)]
        began = time.monotonic()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(self.invoke, names))
        rate = _AT_ONCE / (time.monotonic() - began)
        self.remove(*names)
        return rate

    def wait_cells(self) -> None:
        """Wait until every host has its stem cells: then a start finds one, and no pod imports vLLM beside it."""
        self._until(lambda: all_have_cells(reports(self.api)), "a host lacks a stem cell")

    def deploy_function(self) -> str:
        return self._deploy({"exec": {"kind": KIND_PYTHON, "code": _CODE}, "limits": {"memory": 128}})

    def invoke(self, name: str) -> None:
        answer = self.api.post(f"{action_path(name)}?blocking=true&result=true", {"n": 1})
        if answer != {"n": 2}:
            raise SystemExit(f"{name} answered {answer}")

    def remove(self, *names: str) -> None:
        for name in names:
            self.api.delete(action_path(name))
        self._until(lambda: self._instances() <= self._before, "an instance is left")

    def _deploy(self, body: dict[str, object]) -> str:
        self._n += 1
        name, self._before = f"bench{self._n}", self._instances()
        self.api.put(action_path(name), body, overwrite=True)
        return name

    def _instances(self) -> set[str]:
        return {each for host in reports(self.api) for each in host.instances}

    @staticmethod
    def _until(is_so: Callable[[], bool], otherwise: str) -> None:
        end = time.monotonic() + _WAIT_S
        while not is_so():
            if time.monotonic() > end:
                raise SystemExit(f"{otherwise} after {_WAIT_S:.0f} s")
            time.sleep(0.1)


def all_have_cells(hosts: Sequence[HostReport]) -> bool:
    """Whether every host has a stem cell of each kind that it keeps, and a start of any kind finds one somewhere."""
    missing = {t.kind for host in hosts for t in host.stem_targets if t.count and t.kind not in host.stem_kinds}
    return not missing and {KIND_PYTHON, KIND_LLM} <= {kind for host in hosts for kind in host.stem_kinds}


def kubectl(*words: str) -> str:
    return subprocess.run(["kubectl", *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def on_cluster() -> Place:
    secret = json.loads(kubectl("-n", _NAMESPACE, "get", "secret", "thaw", "-o", "json"))
    gateways = kubectl("-n", _NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=thaw-gateway", "-o", "json")
    pod = next(p for p in json.loads(gateways)["items"] if "deletionTimestamp" not in p["metadata"])
    key = base64.b64decode(secret["data"]["first-key"]).decode()
    return Place(Target(f"http://{pod['status']['podIP']}:3233", key, "the cluster"), "s3://models/smollm2-135m")


@contextlib.contextmanager
def on_this_machine(work: Path) -> Iterator[Place]:
    model = work / "models" / "smollm2"
    shutil.copytree(obtain(cache_dir(), say), model)
    _model.write_index(model)
    with Origin(work, work) as origin, BenchPlatform(work / "state"):
        yield Place(resolve(None, None), f"{origin.url}/models/smollm2")


@contextlib.contextmanager
def without_stem_cells() -> Iterator[None]:
    _set_stem_cells("THAW_STEM_CELLS=off")
    try:
        yield
    finally:
        _set_stem_cells("THAW_STEM_CELLS-")


def _set_stem_cells(setting: str) -> None:
    kubectl("-n", _NAMESPACE, "set", "env", "daemonset/node", "-c", "invoker", setting)
    kubectl("-n", _NAMESPACE, "rollout", "status", "daemonset/node", "--timeout=180s")


def n_changes() -> int:
    """Return how many changes of pods the API server has been asked for, without the kubelet's reports of them."""
    lines = re.findall(r"^apiserver_request_total\{(.*)\} (\S+)$", kubectl("get", "--raw", "/metrics"), re.MULTILINE)
    found = 0.0
    for labels, count in lines:
        at = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if at.get("resource") == "pods" and at.get("subresource") != "status" and at.get("verb") in _CHANGES:
            found += float(count)
    return int(found)


def changes_of_a_start(place: Place) -> float:
    """Return how many changes of pods a start asks for, with the stem cell that is made for the next one."""
    before, name = n_changes(), place.deploy_function()
    place.invoke(name)
    place.wait_cells()
    found = n_changes() - before
    place.remove(name)
    return float(found)


def _when_quiet(places: Sequence[Place], measure: Callable[[], float]) -> Callable[[], float]:
    """Begin a start when no place makes a stem cell: all of them share this machine's cores."""

    def run() -> float:
        for place in places:
            place.wait_cells()
        return measure()

    return run


def main() -> int:
    options = _common.options(__doc__ or "")
    rounds = options.n or (1 if options.quick else 5)
    work = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
    try:
        pods = on_cluster()
        with on_this_machine(work) as processes:
            both = (pods, processes)
            for place in both:  # these starts fetch the model, and import what is not in the page cache
                _when_quiet(both, place.model_ms)()
            starts = {
                "function_claimed": pods.function_ms,
                "function_process": processes.function_ms,
                "model_claimed": pods.model_ms,
                "model_process": processes.model_ms,
                "changes": lambda: changes_of_a_start(pods),
                "starts_per_s": pods.starts_per_s,
            }
            found = interleave({name: _when_quiet(both, start) for name, start in starts.items()}, rounds)
            with without_stem_cells():
                on_demand = {"function_on_demand": pods.function_ms, "model_on_demand": pods.model_ms}
                found |= interleave(on_demand, rounds)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return _report(found, rounds)


def _report(found: dict[str, list[float]], rounds: int) -> int:
    middle = {name: median(values) for name, values in found.items()}
    goals = []
    for what in ("function", "model"):
        claimed, process, demanded = (middle[f"{what}_{how}"] for how in ("claimed", "process", "on_demand"))
        floor = f"{claimed:.0f} against {process:.0f} ms"
        goals += [
            judge(f"{what}_added_ms", claimed - process, "<=", 100, floor=floor),
            figure(f"{what}_vs_on_demand", claimed / demanded, floor=f"{claimed:.0f} against {demanded:.0f} ms"),
        ]
    goals += [
        judge("changes_per_start", middle["changes"], "<=", 3, floor="of pods, asked of the API server"),
        figure("starts_per_s", middle["starts_per_s"], floor=f"{_AT_ONCE} functions at once on one node"),
    ]
    return _common.report("pods", goals, rounds=rounds, samples=found)


if __name__ == "__main__":
    sys.exit(main())
