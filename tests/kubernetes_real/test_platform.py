"""docs/kubernetes.md on a real cluster: from nothing to an answer, and to nothing again.  ``make test-kubernetes``."""

from __future__ import annotations

import base64
import os
import secrets
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from invoker.drivers.kubernetes.spec import APP, APP_LABEL, INSTANCE, ROLE
from tests.kubernetes_real import fitted
from tests.kubernetes_real.kubectl import (
    NAMESPACE,
    apply,
    delete,
    forwarded,
    found,
    kubectl,
    names,
    rolled_out,
    wait_gone,
)
from thaw.action import KIND_PYTHON

pytestmark = pytest.mark.kubernetes

HELLO = "def main(args):\n    print('hello')\n    return {'greeting': 'Hello ' + args.get('name', 'you')}\n"
START_S = 120.0
FUNCTIONS = ("pods", "-A", "-l", f"{APP_LABEL}={APP}")
INSTANCES = ("pods", "-A", "-l", f"{APP_LABEL}={APP},{ROLE}={INSTANCE}")


class Platform:
    def __init__(self, url: str, key: str) -> None:
        self._url = f"{url}/api/v1/namespaces/_"
        self._headers = {"Authorization": "Basic " + base64.b64encode(key.encode()).decode()}

    def deploy(self, name: str, code: str) -> None:
        body = {"exec": {"kind": KIND_PYTHON, "code": code}, "limits": {"memory": 128}}
        self.call("PUT", f"/actions/{name}?overwrite=true", json=body)

    def invoke(self, action: str, **arguments: str) -> dict[str, Any]:
        """The activation's record."""
        return self.call("POST", f"/actions/{action}?blocking=true", json=arguments)

    def call(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        answer = requests.request(method, self._url + path, headers=self._headers, timeout=START_S, **body)
        assert answer.status_code == 200, answer.text
        plain: dict[str, Any] = answer.json()
        return plain


@pytest.fixture(scope="module")
def overlay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A platform on the cluster; afterwards there is nothing of it."""
    if not os.environ.get("KUBECONFIG"):
        pytest.fail("KUBECONFIG names no cluster: make test-kubernetes KUBECONFIG=FILE")
    if NAMESPACE in names("namespaces"):
        pytest.fail(f"the cluster has a namespace {NAMESPACE} already, which this test would delete")
    kubectl("create", "namespace", NAMESPACE)
    made = None
    try:
        words = {"state-password": secrets.token_hex(24), "relay-password": secrets.token_hex(24)}
        words["first-key"] = f"{uuid.uuid4()}:{secrets.token_hex(32)}"
        literals = [f"--from-literal={name}={word}" for name, word in words.items()]
        kubectl("-n", NAMESPACE, "create", "secret", "generic", "thaw", *literals)
        made = fitted.overlay(tmp_path_factory.mktemp("overlay"))
        apply(made)
        rolled_out()
        yield made
    finally:
        delete("namespace", NAMESPACE, "--ignore-not-found")


@pytest.fixture(scope="module")
def platform(overlay: Path) -> Iterator[Platform]:
    (secret,) = found("secret", "thaw", "-n", NAMESPACE)
    key = base64.b64decode(secret["data"]["first-key"]).decode()
    with forwarded("service/gateway", 3233) as url:
        yield Platform(url, key)


def instances() -> set[str]:
    return names(*INSTANCES, "--field-selector=status.phase=Running")


def volumes() -> set[str]:
    """Those of the platform that a cluster removes with their claims."""
    return {
        str(one["metadata"]["name"])
        for one in found("persistentvolumes")
        if one["spec"].get("claimRef", {}).get("namespace") == NAMESPACE
        and one["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
    }


@pytest.mark.begins("overlay")
def test_a_function_answers_cold_and_then_warm_in_one_pod(platform: Platform) -> None:
    platform.deploy("hello", HELLO)
    cold = platform.invoke("hello", name="cold")
    assert cold["response"]["result"] == {"greeting": "Hello cold"}
    lines = platform.call("GET", f"/activations/{cold['activationId']}/logs")["logs"]
    assert [line.partition(": ")[2] for line in lines] == ["hello"]
    made = instances()
    assert len(made) == 1
    warm = platform.invoke("hello", name="warm")
    assert warm["response"]["result"] == {"greeting": "Hello warm"}
    assert instances() == made
    started = {a["key"]: a["value"] for a in cold["annotations"]}, {a["key"]: a["value"] for a in warm["annotations"]}
    assert "initTime" in started[0]
    assert "initTime" not in started[1]


def test_a_functions_pod_is_confined_and_belongs_to_its_nodes_daemon_set(platform: Platform) -> None:
    platform.deploy(
        "whose", "import os\ndef main(args):\n    return {'uid': os.getuid(), 'root': os.access('/', os.W_OK)}\n"
    )
    result = platform.invoke("whose")["response"]["result"]
    assert result["uid"] >= 1 << 20
    assert result["root"] is False
    for pod in found(*FUNCTIONS):
        assert [owner["kind"] for owner in pod["metadata"]["ownerReferences"]] == ["DaemonSet"]


@pytest.mark.ends("overlay")
def test_nothing_is_left_of_a_platform_that_is_deleted(overlay: Path, platform: Platform) -> None:
    platform.deploy("last", HELLO)
    platform.invoke("last")
    assert instances()
    delete("daemonset", "node", "-n", NAMESPACE)  # alone: the deletion of a namespace would take every pod with it
    wait_gone("pods", lambda: names(*FUNCTIONS))
    delete("-k", str(overlay), "--ignore-not-found")
    wait_gone("persistentvolumes", volumes)
    assert NAMESPACE not in names("namespaces")
    parts = "thaw-gateway, thaw-scheduler, thaw-node, thaw-state, thaw-relay"
    assert found("pods", "-A", "-l", f"{APP_LABEL} in ({APP}, {parts})") == []
