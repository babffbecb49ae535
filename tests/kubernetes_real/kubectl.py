"""``kubectl`` as a person types it, against the cluster of KUBECONFIG."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMESPACE = "thaw"
_LONGEST_S = 180.0
_FORWARDED = re.compile(r"127\.0\.0\.1:(\d+) ->")


def kubectl(*words: str, stdin: str = "", timeout_s: float = _LONGEST_S) -> str:
    """What it prints; fails with what it says of an error."""
    done = subprocess.run(["kubectl", *words], input=stdin, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
    return done.stdout


def found(*words: str) -> list[dict[str, Any]]:
    """The objects that ``kubectl get`` finds."""
    plain = json.loads(kubectl("get", *words, "-o", "json"))
    return list(plain["items"]) if "items" in plain else [plain]


def names(*words: str) -> set[str]:
    return {str(one["metadata"]["name"]) for one in found(*words)}


def apply(folder: Path) -> None:
    kubectl("apply", "-k", str(folder))


def rolled_out() -> None:
    """Wait until every pod of the platform is ready."""
    for workload in ("statefulset/state", "deployment/relay", "deployment/gateway", "deployment/scheduler"):
        kubectl(
            "-n", NAMESPACE, "rollout", "status", workload, f"--timeout={_LONGEST_S:.0f}s", timeout_s=2 * _LONGEST_S
        )
    kubectl(
        "-n", NAMESPACE, "rollout", "status", "daemonset/node", f"--timeout={_LONGEST_S:.0f}s", timeout_s=2 * _LONGEST_S
    )


@contextmanager
def forwarded(target: str, port: int) -> Iterator[str]:
    """The URL at which this machine reaches a port of the cluster."""
    command = ["kubectl", "-n", NAMESPACE, "port-forward", target, f":{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forwarder:
        try:
            assert forwarder.stdout is not None
            line = forwarder.stdout.readline()
            local = _FORWARDED.search(line)
            assert local is not None, f"kubectl port-forward ended: {line}"
            yield f"http://127.0.0.1:{local[1]}"
        finally:
            forwarder.terminate()
            forwarder.wait(_LONGEST_S)
