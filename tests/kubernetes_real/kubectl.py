"""``kubectl`` as a person types it, against the cluster of KUBECONFIG."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NAMESPACE = "thaw"
WORKLOADS = (
    "statefulset/state",
    *(f"deployment/{name}" for name in ("relay", "store", "gateway", "scheduler", "operator")),
    "daemonset/node",
)
_LONGEST_S = 180.0
_ENDS_S = 10.0  # kubectl itself, after the time that it was told
_FORWARDED = re.compile(r"127\.0\.0\.1:(\d+) ->")


def kubectl(*words: str, stdin: str = "", timeout_s: float = _LONGEST_S) -> str:
    """Return the command's output.  If it fails, the test fails with its error message."""
    try:
        done = subprocess.run(["kubectl", *words], input=stdin, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as e:
        raise AssertionError(f"kubectl {' '.join(words)}: no end within {timeout_s:.0f} s") from e
    assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
    return done.stdout


def found(*words: str) -> list[dict[str, Any]]:
    """The objects that ``kubectl get`` finds."""
    plain = json.loads(kubectl("get", *words, "-o", "json"))
    return list(plain["items"]) if "items" in plain else [plain]


def names(*words: str) -> set[str]:
    return {str(one["metadata"]["name"]) for one in found(*words)}


def rolled_out() -> None:
    """Wait until every pod of the platform is ready."""
    deadline = time.monotonic() + _LONGEST_S
    for workload in WORKLOADS:
        _until(deadline, "-n", NAMESPACE, "rollout", "status", workload)


def delete(*words: str) -> None:
    """Delete the objects; return when they are gone."""
    _until(time.monotonic() + _LONGEST_S, "delete", *words)


def wait_gone(kind: str, look: Callable[[], set[str]]) -> None:
    """Wait until ``look`` finds the name of no object any more, those made meanwhile included."""
    deadline = time.monotonic() + _LONGEST_S
    while left := look():
        assert time.monotonic() < deadline, f"these {kind} are left: {left}"
        _until(deadline, "-n", NAMESPACE, "wait", "--for=delete", kind, *sorted(left))


def _until(deadline: float, *words: str) -> None:
    """Run a command that waits.  The message of a failure includes the cluster's state of the platform's pods."""
    left_s = max(1.0, deadline - time.monotonic())
    try:
        kubectl(*words, f"--timeout={left_s:.0f}s", timeout_s=left_s + _ENDS_S)
    except AssertionError as e:
        raise AssertionError(
            f"{e}\n{_said('pods', '-o', 'wide')}\n{_said('events', '--sort-by=.lastTimestamp')}"
        ) from e


def _said(*words: str) -> str:
    try:
        return kubectl("-n", NAMESPACE, "get", *words, timeout_s=_ENDS_S)
    except AssertionError as e:
        return str(e)


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
