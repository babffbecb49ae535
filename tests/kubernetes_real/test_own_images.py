"""Images of users on a real node: its kubelet pulls them, says their digests, and confines them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from invoker.drivers.base import Spec
from invoker.drivers.confined import Limits
from invoker.drivers.kubernetes.client import Cluster
from invoker.drivers.kubernetes.driver import KubernetesDriver
from invoker.drivers.kubernetes.place import Place
from tests.docker.inside import WAIT_S, ask, post
from tests.kubernetes_real.kubectl import delete, kubectl, names, wait_gone
from tests.kubernetes_real.node_registry import ADDRESS, archive, push, registry
from tests.kubernetes_real.own_cluster import OwnCluster
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.errors import InitFailed
from thaw.logs import Log

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1800)]

NODE = "node1"
PLACE = "thaw-images"
ANSWER = rb"""#!/bin/busybox sh
read -r method path version || exit 0
while read -r line && [ "$line" != "$(printf '\r')" ]; do :; done
tried() { if echo x 2>/dev/null >>"$1"; then echo yes; else echo no; fi; }
log=$(while read -r _ at _; do case $at in */termination-log) echo "$at";; esac; done </proc/mounts)
found="uid=$(/bin/busybox id -u) root=$(tried /x) open=$(tried /open/x) tmp=$(tried /tmp/x) log=$(tried "$log")"
echo "ran $K_SERVICE" >&3
body="{\"found\": \"$found\"}"
printf 'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s' ${#body} "$body"
"""
SERVE = ["/bin/busybox", "sh", "-c", "exec 3>&1; exec /bin/busybox nc -ll -p $PORT -e /bin/answer"]


@pytest.fixture
def cluster(own_cluster: OwnCluster | None) -> Iterator[OwnCluster]:
    if own_cluster is None:
        pytest.skip("only a node of a cluster of its own may be entered")
    kubectl("create", "namespace", PLACE)
    yield own_cluster
    delete("namespace", PLACE)


@pytest.fixture
def driver(cluster: OwnCluster) -> Iterator[KubernetesDriver]:
    """A driver outside of the cluster: the node has the same files in /tmp."""
    pod_logs = Path(cluster.home) / NODE / "log/pods"
    images = {KIND_PYTHON: "docker.io/thaw/python:0.1.0", KIND_LLM: "none"}
    place = Place(PLACE, NODE, images, {KIND_PYTHON: 64, KIND_LLM: 64}, pod_logs, start_s=120.0)
    with tempfile.TemporaryDirectory(prefix="thaw-", dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        credentials = str(Path(cluster.home) / "admin.conf")
        made = KubernetesDriver(Cluster(PLACE, credentials), Path(directory), "host-t", place, Limits(2), Log("test"))
        yield made
        made.close()


def test_a_users_image_is_pinned_pulled_confined_and_answers(
    cluster: OwnCluster, driver: KubernetesDriver, tmp_path: Path
) -> None:
    busybox = shutil.which("busybox")
    assert busybox is not None
    files = {"bin/busybox": Path(busybox).read_bytes(), "bin/answer": ANSWER}
    with registry(cluster, NODE, tmp_path):
        image = push(cluster, NODE, archive(tmp_path, "me/own:1", files, SERVE), "me/own:1")
        pinned = driver.pin(image, deadline_s=120.0)
        assert pinned.startswith(f"{ADDRESS}/me/own@sha256:")
        with pytest.raises(InitFailed, match=f"The image {ADDRESS}/me/none:1 cannot be pulled: .*not found"):
            driver.pin(f"{ADDRESS}/me/none:1", deadline_s=120.0)

        env = {"PORT": "8080", "K_SERVICE": "own"}
        spec = Spec("own", KIND_PYTHON, env, {"role": "instance"}, memory_bytes=128 << 20, image=pinned)
        handle = driver.connect(driver.start(driver.create(spec), spec), deadline_s=WAIT_S)
        assert post(handle, "/init", {"code": ""}) == (200, {"ok": True})
        found = dict(word.split("=") for word in ask(handle)["found"].split())
        assert int(found.pop("uid")) >= 1 << 20
        assert found == {"root": "no", "open": "no", "tmp": "yes", "log": "no"}
        assert driver.more_logs(handle, (0, 0), WAIT_S)
        assert b"ran own\n" in driver.logs(handle, "stdout", 0).data
        driver.remove(handle)

        lost = Spec("lost", KIND_PYTHON, env, {"role": "instance"}, image=f"{ADDRESS}/me/own@sha256:{'d' * 64}")
        with pytest.raises(InitFailed, match="cannot be pulled: .*not found"):
            driver.start(driver.create(lost), lost)
        driver.remove(driver.create(lost))
    wait_gone("pods", lambda: names("pods", "-n", PLACE))
