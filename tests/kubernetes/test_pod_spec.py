"""The pods that are requested, and a cluster's reports on them, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from invoker.drivers.base import Spec
from invoker.drivers.confined import Limits
from invoker.drivers.kubernetes.client import _node_pod
from invoker.drivers.kubernetes.place import check_same_path
from invoker.drivers.kubernetes.seen import Ended, Seen, quantity_bytes, seen
from invoker.drivers.kubernetes.spec import Asked, Mounts, Owner, owner_label, pod, pulling_pod, resources, uid_of
from tests.kubernetes.kustomize import NO_RIGHTS
from tests.kubernetes.schema import problems
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.errors import PlatformError

DAEMON_SET = Owner("apps/v1", "DaemonSet", "thaw-node", "u-1")
MOUNTS = Mounts("/run/thaw/c/12/io", "/run/thaw/doors/i.sock", "/run/thaw/relays")
OWN = Mounts("/run/thaw/c/12/io", closed="/run/thaw/closed")
CONFINED = {**NO_RIGHTS, "privileged": False}


def made(spec: Spec, **other: Any) -> dict[str, Any]:
    asked = {"image": "thaw/python:1", "node": "n1", "owner_label": "h-1", "mounts": MOUNTS, "request_mb": 64}
    return pod(spec, Asked(**{"limits": Limits(4), **asked, **other}))


@pytest.mark.parametrize("kind", [KIND_PYTHON, KIND_LLM])
def test_every_pod_is_what_the_api_describes_and_hardened(kind: str) -> None:
    found = made(Spec("i", kind, descriptor_socket="/here"), owner=DAEMON_SET)
    assert problems(found, "V1Pod") == []
    own, container = found["spec"], found["spec"]["containers"][0]
    assert own["automountServiceAccountToken"] is False
    assert own["enableServiceLinks"] is False
    assert own["restartPolicy"] == "Never"
    assert own["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own["securityContext"]["runAsUser"] == own["securityContext"]["runAsGroup"] == uid_of("i") >= 1 << 20
    assert container["securityContext"] == CONFINED
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(own)


def test_a_pod_is_bound_to_its_node_by_the_clusters_scheduler() -> None:
    own = made(Spec("i", KIND_PYTHON))["spec"]
    assert "nodeName" not in own
    (term,) = own["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}


def test_only_its_own_directory_is_writable_and_relays_are_for_llm_pods() -> None:
    def mounts(kind: str) -> dict[str, bool]:
        found = made(Spec("i", kind, descriptor_socket="/here"))["spec"]["containers"][0]["volumeMounts"]
        return {m["mountPath"]: m.get("readOnly", False) for m in found}

    assert mounts(KIND_LLM) == {
        "/tmp": False,
        "/run/thaw/c/12/io": False,
        "/run/thaw/doors/i.sock": True,
        "/run/thaw/relays": True,
    }
    assert set(mounts(KIND_PYTHON)) == {"/tmp", "/run/thaw/c/12/io", "/run/thaw/doors/i.sock"}


def test_what_a_container_can_write_to_its_nodes_disk_is_bounded() -> None:
    container = made(Spec("i", KIND_PYTHON))["spec"]["containers"][0]
    assert container["resources"]["limits"]["ephemeral-storage"] == "1Gi"
    assert container["resources"]["requests"]["ephemeral-storage"] == "16Mi"  # else the limit, counted in full
    assert container["terminationMessagePath"].startswith("/root/")


def test_a_pod_is_deleted_with_what_made_the_invokers_pod_and_not_with_that_pod() -> None:
    (reference,) = made(Spec("i", KIND_PYTHON), owner=DAEMON_SET)["metadata"]["ownerReferences"]
    assert (reference["kind"], reference["name"], reference["uid"]) == ("DaemonSet", "thaw-node", "u-1")
    assert reference["controller"] is False
    own = invoker_pod(mounting(run="/run/thaw", c="/etc/thaw"))
    assert _node_pod(own).owner == Owner("v1", "Pod", "thaw-node-x", "u-2")
    assert _node_pod(own).host_paths == {"/run/thaw": "/run/thaw"}
    assert (_node_pod(own).name, _node_pod(own).uid) == ("thaw-node-x", "u-2")
    maker = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "thaw-node", "uid": "u-1", "controller": True}
    own["metadata"]["ownerReferences"] = [maker]
    assert _node_pod(own).owner == DAEMON_SET


def mounting(*env: str, **paths: str) -> dict[str, Any]:
    mounts = [{"name": name, "mountPath": path} for name, path in paths.items()]
    return {"env": [{"name": name} for name in env], "volumeMounts": mounts}


def invoker_pod(*containers: dict[str, Any]) -> dict[str, Any]:
    """The pod of the invoker, with a directory of the node and a ConfigMap as volumes."""
    volumes = [{"name": "run", "hostPath": {"path": "/run/thaw"}}, {"name": "c", "configMap": {"name": "c"}}]
    spec = {"volumes": volumes, "containers": list(containers)}
    return {"metadata": {"name": "thaw-node-x", "uid": "u-2"}, "spec": spec}


def test_what_another_container_of_the_invokers_pod_mounts_does_not_count() -> None:
    own = invoker_pod(mounting(run="/run/thaw"), mounting("THAW_POD_NAME", run="/elsewhere"))
    assert _node_pod(own).host_paths == {"/elsewhere": "/run/thaw"}


def test_a_directory_must_have_the_same_path_on_the_node() -> None:
    check_same_path("/run/thaw/h1", {"/run/thaw": "/run/thaw"})
    for mounts in ({}, {"/run/thaw": "/var/lib/thaw"}, {"/run/thaw": "/run/thaw", "/run/thaw/h1": "/elsewhere"}):
        with pytest.raises(PlatformError, match="is not mounted from the node under the same path"):
            check_same_path("/run/thaw/h1", mounts)


def test_limits_are_those_of_the_function_and_a_stem_cell_asks_for_little() -> None:
    limits = Limits(4, default_memory_mb=2048)
    assert resources(0.5, 256 << 20, limits, 64 << 20) == {
        "requests": {"cpu": "10m", "memory": str(256 << 20)},
        "limits": {"cpu": "2000m", "memory": str(256 << 20)},
    }
    cell = resources(1.0, 0, limits, 64 << 20)
    assert (cell["requests"]["memory"], cell["limits"]["memory"]) == (str(64 << 20), str(2048 << 20))
    assert resources(0.0001, 1 << 20, limits, 1)["limits"]["cpu"] == "10m"


def test_a_users_image_runs_its_own_program_without_a_path_of_the_node_and_another_container_has_the_socket() -> None:
    image = "docker.io/me/x@sha256:" + "d" * 64
    found = made(Spec("i", KIND_PYTHON, {"PORT": "8080"}, image=image), mounts=OWN)
    assert problems(found, "V1Pod") == []
    own, port = found["spec"]["containers"]
    assert (own["name"], own["image"], port["image"]) == ("function", image, "thaw/python:1")
    assert not {"command", "args", "workingDir"} & set(own)
    assert {e["name"] for e in own["env"]} == {"HOME", "USER", "TMPDIR", "PORT"}
    assert {"THAW_SOCKET", "PORT"} <= {e["name"] for e in port["env"]}
    assert own["volumeMounts"] == [
        {"name": "scratch", "mountPath": "/tmp"},
        {"name": "closed", "mountPath": "/run/thaw/closed", "readOnly": True},
    ]
    assert own["terminationMessagePath"] == "/run/thaw/closed/termination-log"
    assert [m["name"] for m in port["volumeMounts"]] == ["port-scratch", "io"]
    assert port["args"] == ["-m", "thaw_runtime.action.image_port"]
    uids = {found["spec"]["securityContext"]["runAsUser"], port["securityContext"]["runAsUser"]}
    assert len(uids) == 2
    for one in (own, port):
        assert one["securityContext"].items() >= CONFINED.items()
        assert one["resources"]["limits"]["ephemeral-storage"] == "1Gi"
    assert found["metadata"]["labels"]["app.kubernetes.io/name"] == "thaw-function"
    assert "shareProcessNamespace" not in found["spec"]


def test_a_pod_that_only_pulls_has_no_program_of_its_image() -> None:
    asked = Asked("thaw/python:1", "n1", "h-1", OWN, Limits(4), 64)
    found = pulling_pod(Spec("i", KIND_PYTHON, image="docker.io/me/x:1"), asked)
    assert problems(found, "V1Pod") == []
    (container,) = found["spec"]["containers"]
    assert (container["command"], container["imagePullPolicy"]) == (["/thaw-wants-the-digest-alone"], "Always")
    assert "args" not in container


def test_a_gpu_is_asked_for_by_an_llm_alone() -> None:
    def gpus(kind: str, device: str) -> Any:
        found = made(Spec("i", kind, device=device))["spec"]["containers"][0]["resources"]["limits"]
        return found.get("nvidia.com/gpu")

    assert gpus(KIND_LLM, "cuda:1") == "1"
    assert gpus(KIND_LLM, "cpu") is gpus(KIND_PYTHON, "cuda:1") is None


def test_a_hosts_name_becomes_a_label_that_is_allowed() -> None:
    label = owner_label("node/" + "x" * 80 + "-0f3a1b2c")
    assert len(label) <= 63
    assert label.endswith("-0f3a1b2c")
    assert owner_label("a b-1") == "a-b-1"


def reported(phase: str, spec: Spec | None = None, /, port: Any = None, why: Any = None, **state: Any) -> Seen:
    """A pod as a node reports it: the state of its container, and of the one beside a user's image."""
    plain = made(spec or Spec("i", KIND_PYTHON, memory_bytes=256 << 20), mounts=OWN if spec else MOUNTS)
    plain["metadata"] |= {"uid": "u", "resourceVersion": "7"}
    beside = [{"name": "port", "state": port}] if port else []
    own = [{"name": "function", "state": state}] if state else []
    return seen({**plain, "status": {"phase": phase, "containerStatuses": [*own, *beside], **(why or {})}})


@pytest.mark.parametrize(
    ("terminated", "ended"),
    [
        ({"exitCode": 1, "reason": "Error"}, Ended(1)),
        ({"exitCode": 137, "reason": "OOMKilled"}, Ended(137, "out of memory: its limit is 256 MiB", True)),
        ({"exitCode": 128, "reason": "StartError", "message": "no python"}, Ended(128, "StartError: no python")),
    ],
)
def test_an_end_says_what_the_node_knows(terminated: dict[str, Any], ended: Ended) -> None:
    assert reported("Failed", terminated=terminated).ended == ended


@pytest.mark.parametrize("reason", ["Evicted", "OutOfmemory"])
def test_an_evicted_pod_and_one_that_the_node_refused_say_why(reason: str) -> None:
    why = {"reason": reason, "message": "The node has too little memory"}
    assert reported("Failed", why=why).ended == Ended(None, f"{reason}: The node has too little memory")


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("ErrImagePull", "the node cannot pull the image thaw/python:1: no such host"),
        ("ImagePullBackOff", "the node cannot pull the image thaw/python:1: no such host"),
        ("ErrImageNeverPull", "the image thaw/python:1 is not on this node"),
        ("CreateContainerError", "the node cannot start the container: no such host"),
        ("ContainerCreating", ""),
    ],
)
def test_what_keeps_a_container_from_starting_is_a_sentence(reason: str, text: str) -> None:
    assert reported("Pending", waiting={"reason": reason, "message": "no such host"}).trouble == text


def test_the_container_beside_a_users_image_may_be_the_one_that_the_node_cannot_start() -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such host"}}
    found = reported("Pending", Spec("i", KIND_PYTHON, image="docker.io/me/x:1"), port=waiting, running={})
    assert found.trouble == "the node cannot pull the image thaw/python:1: no such host"
    assert found.no_image


def test_amounts_of_memory_are_read_as_the_cluster_writes_them() -> None:
    amounts = {"268435456": 256 << 20, "256Mi": 256 << 20, "2Gi": 2 << 30, "1M": 10**6, "": 0, "x": 0}
    assert {text: quantity_bytes(text) for text in amounts} == amounts
