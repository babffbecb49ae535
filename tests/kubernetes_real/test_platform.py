"""docs/kubernetes.md on a real cluster: from nothing to an answer, and to nothing again.  ``make test-kubernetes``."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from invoker.drivers.kubernetes.spec import APP, APP_LABEL, INSTANCE, KIND, ROLE, STEM_CELL
from tests.e2e.test_readme import blocks
from tests.kubernetes_real import fitted
from tests.kubernetes_real.kubectl import NAMESPACE, delete, forwarded, found, kubectl, names, rolled_out, wait_gone
from tests.kubernetes_real.own_cluster import OwnCluster
from tests.kubernetes_real.platform import Platform, Stream
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.dev.known_answers import FRANCE

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
HELLO = "def main(args):\n    print('hello')\n    return {'greeting': 'Hello ' + args.get('name', 'you')}\n"
SLOW = "import time\ndef main(args):\n    time.sleep(args['s'])\n    return {'slept': args['s']}\n"
FUNCTIONS = ("pods", "-A", "-l", f"{APP_LABEL}={APP}")
AWAY_S = 60.0


@pytest.fixture(scope="module")
def overlay(own_cluster: OwnCluster | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The manifests for this cluster.  At the end, everything of the platform is removed."""
    del own_cluster
    if NAMESPACE in names("namespaces"):
        pytest.fail(f"the cluster has a namespace {NAMESPACE} already, which this test would delete")
    kubectl("create", "namespace", NAMESPACE)
    try:
        yield fitted.overlay(tmp_path_factory.mktemp("overlay"))
    finally:
        delete("namespace", NAMESPACE, "--ignore-not-found")
        delete("crd", fitted.CRD, "--ignore-not-found")


@pytest.fixture(scope="module")
def first_answer(overlay: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Run the page's first block, which deploys ``chat``, and return its output."""
    page = blocks(ROOT / "docs/kubernetes.md")[0].code.replace("deploy/kubernetes/overlays/trial", str(overlay))
    page = page.replace("kubectl create namespace thaw\n", "")  # the addresses of the Services were asked for in it
    for port in ("3233", "8333"):
        page = page.replace(f"{port}:{port}", f"{(free := free_port())}:{port}")
        page = page.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free}")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "THAW_S3"))}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env["WSK_CONFIG_FILE"] = str(tmp_path_factory.mktemp("user") / "wskprops")
    script = f"set -euo pipefail\ntrap 'kill $(jobs -p)' EXIT\n{page}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rolled_out()
    return done.stdout


@pytest.fixture
def platform(own_cluster: OwnCluster | None, first_answer: str) -> Iterator[Platform]:
    """The platform as this machine reaches it: by a pod's address, which needs no API server, or through kubectl."""
    del first_answer
    (secret,) = found("secret", "thaw", "-n", NAMESPACE)
    key = base64.b64decode(secret["data"]["first-key"]).decode()
    with ExitStack() as stack:
        if own_cluster is None:
            url = stack.enter_context(forwarded("service/gateway", 3233))
        else:
            (pod,) = running("thaw-gateway")
            url = f"http://{pod['status']['podIP']}:3233"
        yield Platform(url, key)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def running(app: str) -> list[dict[str, Any]]:
    pods = found("pods", "-n", NAMESPACE, "-l", f"{APP_LABEL}={app}")
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def instances(*kinds: str) -> set[str]:
    """The pods that run functions, or those of some kinds.  A pod may answer before the kubelet reports that it runs."""
    return _in_role(INSTANCE, kinds)


def waiting(*kinds: str) -> set[str]:
    """The stem cells."""
    return _in_role(STEM_CELL, kinds)


def _in_role(role: str, kinds: tuple[str, ...]) -> set[str]:
    return {
        str(pod["metadata"]["name"])
        for pod in found("pods", "-A", "-l", f"{APP_LABEL}={APP},{ROLE}={role}")
        if pod["status"]["phase"] in ("Pending", "Running")
        and "deletionTimestamp" not in pod["metadata"]
        and (not kinds or pod["metadata"]["annotations"][KIND] in kinds)
    }


def pod_since(before: set[str]) -> str:
    """The one pod of a function that has begun since then."""
    (made,) = instances(KIND_PYTHON) - before
    return made


def node_of(pod: str) -> str:
    return str(found("pod", pod, "-n", NAMESPACE)[0]["spec"]["nodeName"])


def volumes() -> set[str]:
    """Return the platform's volumes that a cluster removes with their claims."""
    return {
        str(one["metadata"]["name"])
        for one in found("persistentvolumes")
        if one["spec"].get("claimRef", {}).get("namespace") == NAMESPACE
        and one["spec"]["persistentVolumeReclaimPolicy"] == "Delete"
    }


@pytest.mark.begins("overlay")
def test_the_page_leads_from_an_empty_cluster_to_a_models_answer(first_answer: str) -> None:
    assert FRANCE.text in first_answer
    assert len(instances()) == 1
    kubectl("-n", NAMESPACE, "wait", "--for=condition=Ready", "modelfunction/chat", "--timeout=60s")
    (chat,) = found("modelfunctions", "chat", "-n", NAMESPACE)
    conditions = {c["type"]: (c["status"], c["reason"]) for c in chat["status"]["conditions"]}
    assert conditions == {
        "Deployed": ("True", "Deployed"),
        "Ready": ("True", "Serving"),
        "InSync": ("True", "InSync"),
    }
    header, line = kubectl("-n", NAMESPACE, "get", "modelfunctions").splitlines()
    assert header.split()[:4] == ["NAME", "READY", "REASON", "INSTANCES"]
    assert line.split()[:4] == ["chat", "True", "Serving", "1"]
    assert chat["status"]["lastColdStart"]["timeToFirstToken"]


def test_a_function_answers_cold_and_then_warm_in_one_pod(platform: Platform) -> None:
    platform.deploy("cold", HELLO)
    before = instances(KIND_PYTHON)
    cold = platform.invoke("cold", name="cold")
    assert cold["response"]["result"] == {"greeting": "Hello cold"}
    lines = platform.call("GET", f"/activations/{cold['activationId']}/logs")["logs"]
    assert [line.partition(": ")[2] for line in lines] == ["hello"]
    made = pod_since(before)
    warm = platform.invoke("cold", name="warm")
    assert warm["response"]["result"] == {"greeting": "Hello warm"}
    assert pod_since(before) == made
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


def test_a_call_whose_pod_is_deleted_by_hand_fails_with_that_reason_and_the_next_one_starts_another(
    platform: Platform,
) -> None:
    platform.deploy("deleted", SLOW)
    before = instances(KIND_PYTHON)
    assert platform.invoke("deleted", s=0)["response"]["success"]
    pod = pod_since(before)
    lost = platform.begin("deleted", s=45)
    kubectl("-n", NAMESPACE, "delete", "pod", pod, "--grace-period=1")
    response = platform.record(lost)["response"]
    assert response["success"] is False
    assert "pod was deleted" in str(response["result"]), response
    assert platform.invoke("deleted", s=0)["response"]["success"]
    assert pod not in instances()


def test_a_model_answers_as_a_pipeline_of_two_nodes(platform: Platform) -> None:
    if len(names("nodes")) < 2:
        pytest.skip("this cluster has one node")
    before = instances(KIND_LLM)
    platform.deploy_model("pair", 2)
    assert platform.chat("pair", FRANCE.prompt) == FRANCE.text
    stages = instances(KIND_LLM) - before
    assert len(stages) == 2
    assert len({node_of(stage) for stage in stages}) == 2
    platform.call("DELETE", "/actions/pair")


def test_a_stream_goes_on_while_the_gateway_is_rolled_out(platform: Platform) -> None:
    stream = Stream(platform, 60)
    stream.wait_pieces(2)
    kubectl("-n", NAMESPACE, "rollout", "restart", "deployment/gateway")
    assert stream.wait_end() == "[DONE]"
    rolled_out()


def test_a_stream_goes_on_while_the_node_is_rolled_out_and_what_was_warm_is_warm_after_it(platform: Platform) -> None:
    before = instances(KIND_PYTHON)
    platform.deploy("kept", HELLO)
    assert platform.invoke("kept")["response"]["success"]
    kept, cells = pod_since(before), waiting(KIND_PYTHON)
    stream = Stream(platform, 60)
    stream.wait_pieces(2)
    models = instances(KIND_LLM)
    kubectl("-n", NAMESPACE, "rollout", "restart", "daemonset/node")
    assert stream.wait_end() == "[DONE]"
    rolled_out()
    record = platform.invoke("kept", name="again")
    assert record["response"]["result"] == {"greeting": "Hello again"}
    assert "initTime" not in {a["key"] for a in record["annotations"]}
    assert {kept} | models <= instances(), "no container was ended or made anew"
    assert cells <= waiting(KIND_PYTHON)
    assert platform.chat("chat", FRANCE.prompt)
    assert instances(KIND_LLM) == models


def test_a_node_whose_pod_is_killed_loses_its_calls_with_one_record_each_and_serves_again(platform: Platform) -> None:
    platform.deploy("killed", SLOW)
    before = instances(KIND_PYTHON)
    assert platform.invoke("killed", s=0)["response"]["success"]
    pod = pod_since(before)
    node = node_of(pod)
    lost = platform.begin("killed", s=45)
    (its_invoker,) = [each for each in running("thaw-node") if each["spec"]["nodeName"] == node]
    kubectl("-n", NAMESPACE, "delete", "pod", its_invoker["metadata"]["name"], "--grace-period=0", "--force")
    rolled_out()
    assert platform.invoke("killed", s=0)["response"]["success"]
    assert platform.record(lost)["activationId"] == lost
    records = platform.ask("GET", "/activations?name=killed&limit=50").json()
    assert [one["activationId"] for one in records].count(lost) == 1
    assert pod not in instances(), "nobody waited for its run any more"


def test_functions_run_on_without_the_api_server_and_starts_wait_for_it(
    own_cluster: OwnCluster | None, platform: Platform
) -> None:
    if own_cluster is None:
        pytest.skip("only the API server of a cluster of its own may be stopped")
    for name in ("hello", "waits"):
        platform.deploy(name, HELLO)
    platform.invoke("hello")
    own_cluster.run("api", "stop")
    try:
        back = time.monotonic() + AWAY_S
        waits = platform.begin("waits", name="late")
        while time.monotonic() < back:
            assert platform.invoke("hello")["response"]["success"]
        assert platform.ask("GET", f"/activations/{waits}").status_code == 404
    finally:
        own_cluster.run("api", "start")
    assert platform.record(waits)["response"]["result"] == {"greeting": "Hello late"}


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
    assert fitted.CRD not in names("crd")
    parts = "thaw-gateway, thaw-scheduler, thaw-node, thaw-state, thaw-relay, thaw-store, thaw-operator"
    assert found("pods", "-A", "-l", f"{APP_LABEL} in ({APP}, {parts})") == []
