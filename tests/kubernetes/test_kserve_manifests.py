"""The component ``kserve``: a model port on each node, and the init container that KServe puts before a server."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from invoker.drivers.kubernetes.spec import APP
from invoker.model_port.settings import ModelPortSettings
from tests.kubernetes import kustomize
from tests.kubernetes.kustomize import NO_RIGHTS, ROOT, Manifest, as_kubectl_makes_it, build, invalid, named, variables
from tests.kubernetes.schema import problems
from thaw.kserve.initializer import pairs
from thaw.kserve.model_port import ModelPortClient
from thaw.kserve.settings import InitializerSettings

OF_KSERVE = "ClusterStorageContainer"


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    """An overlay with the component beside others that change the same DaemonSet."""
    return kustomize.overlay(tmp_path, ["deploy/base"], ["monitors", "kserve", "gpu"])


@pytest.fixture
def made(overlay: Path) -> list[Manifest]:
    return build(overlay)


def node_pod(made: list[Manifest]) -> dict[str, Any]:
    return dict(named(made, "DaemonSet", "node")["spec"]["template"]["spec"])


def port_container(made: list[Manifest]) -> dict[str, Any]:
    (found,) = [c for c in node_pod(made)["containers"] if c["name"] == "models"]
    return found


def init_container(made: list[Manifest]) -> dict[str, Any]:
    return named(made, OF_KSERVE)["spec"]["container"]


def test_a_manifest_is_what_the_api_describes(made: list[Manifest]) -> None:
    assert invalid(made, OF_KSERVE, "ServiceMonitor", "PodMonitor") == []
    assert problems(init_container(made), "V1Container", "container") == []


def test_kserve_finds_its_container_by_name_and_leaves_the_arguments_free(made: list[Manifest]) -> None:
    """KServe merges the container into its own, which has the URI and the directory as its arguments."""
    container, resource = init_container(made), named(made, OF_KSERVE)
    assert set(resource["spec"]) == {"workloadType", "supportedUriFormats", "container"}
    assert "namespace" not in resource["metadata"], "it is the cluster's"
    assert container["name"] == "storage-initializer"
    assert "args" not in container
    assert "volumeMounts" not in container
    (form,) = resource["spec"]["supportedUriFormats"]
    assert pairs([f"{form['prefix']}team/chat", "/mnt/models"]) == [("team/chat", Path("/mnt/models"))]
    assert (ROOT / f"{container['command'][-1].replace('.', '/')}.py").is_file()
    assert container["command"][:2] == ["python", "-m"]


def test_the_init_container_runs_with_the_rights_of_nobody(made: list[Manifest]) -> None:
    context = init_container(made)["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"], context["capabilities"]) == (True, 65534, {"drop": ["ALL"]})
    assert context["readOnlyRootFilesystem"] is True


def test_both_ends_are_told_settings_that_they_have(made: list[Manifest]) -> None:
    given = {e["name"] for e in port_container(made)["env"] if e["name"].startswith("THAW_")}
    assert given <= variables(ModelPortSettings)
    assert {e["name"] for e in init_container(made)["env"]} <= variables(InitializerSettings)


def test_the_init_container_reaches_the_port_of_its_own_node(made: list[Manifest]) -> None:
    service = named(made, "Service", "models")
    assert service["spec"]["internalTrafficPolicy"] == "Local"
    labels = named(made, "DaemonSet", "node")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    (port,) = service["spec"]["ports"]
    container = port_container(made)
    (listening,) = container["ports"]
    bind = {e["name"]: e.get("value") for e in container["env"]}["THAW_MODEL_PORT_BIND"]
    assert (port["targetPort"], bind) == (listening["name"], f"0.0.0.0:{listening['containerPort']}")
    url = {e["name"]: e.get("value") for e in init_container(made)["env"]}["THAW_MODEL_PORT_URL"]
    assert url == f"http://{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{port['port']}"
    ModelPortClient(url, "a:b")


def test_only_servers_of_kserve_may_connect_and_no_function(made: list[Manifest]) -> None:
    policy = named(made, "NetworkPolicy", "node-models")["spec"]
    (rule,) = policy["ingress"]
    (source,) = rule["from"]
    (selected,) = source["podSelector"]["matchExpressions"]
    assert (selected["key"], selected["operator"]) == ("serving.kserve.io/inferenceservice", "Exists")
    assert rule["ports"] == [{"port": "models"}]
    functions = named(made, "NetworkPolicy", "functions")["spec"]
    assert functions["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": APP}
    assert functions["policyTypes"] == ["Ingress", "Egress"]


def test_the_port_has_none_of_the_invokers_rights(made: list[Manifest]) -> None:
    """Its pod's service account may make pods, and its neighbour may open every container's socket."""
    container = port_container(made)
    assert container["securityContext"] == NO_RIGHTS
    assert "memory" in container["resources"]["limits"]
    mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
    token = mounts["/var/run/secrets/kubernetes.io/serviceaccount"]
    (volume,) = [v for v in node_pod(made)["volumes"] if v["name"] == token["name"]]
    assert set(volume) == {"name", "emptyDir"}, "the cluster mounts no token where something is mounted"
    assert mounts["/run/thaw"]["readOnly"] is True
    assert "secretRef" not in json.dumps(container["envFrom"]), "the store's credentials are fetchd's"
    assert "/var/log/pods" not in mounts


def test_images_have_the_version_of_the_others(made: list[Manifest]) -> None:
    others = {c["image"] for c in node_pod(made)["containers"]}
    assert {port_container(made)["image"], init_container(made)["image"]} <= others


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl to compare with")
def test_kubectl_makes_the_same_of_it(overlay: Path, made: list[Manifest]) -> None:
    assert as_kubectl_makes_it(overlay, made)


def test_nothing_that_runs_on_a_host_names_the_cluster() -> None:
    """The model port serves programs of a host, whoever started them."""
    paths = [*(ROOT / "invoker/model_port").rglob("*.py"), *(ROOT / "fetchd").rglob("*.py")]
    assert [p.name for p in paths if re.search(r"kserve|kubernetes", p.read_text(), re.I)] == []
