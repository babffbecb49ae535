"""Images of users as pods: pinned by the node's report, reached through the container beside them, and their troubles."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest

from invoker.drivers.activation_logs import last_lines
from invoker.drivers.base import Spec
from invoker.drivers.kubernetes.driver import KubernetesDriver
from tests.conftest import free_port
from tests.container_ends import Ends
from tests.docker.inside import ask, post
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.helpers import WAIT_S
from thaw.action import KIND_PYTHON
from thaw.errors import InitFailed, Unavailable, WorkerLost

DIGEST = "sha256:" + "d" * 64
IMAGE = f"docker.io/me/server@{DIGEST}"
SERVER = """
import http.server, json, os
class Program(http.server.BaseHTTPRequestHandler):
    def do_PATCH(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        print("patched", flush=True)
        data = json.dumps({"path": self.path, "body": body.decode(), "names": sorted(os.environ)}).encode()
        self.send_response(201)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Program).serve_forever()
"""


def of_image(container_id: str = "own") -> Spec:
    env = {"PORT": str(free_port()), "K_SERVICE": "server"}
    return Spec(container_id, KIND_PYTHON, env, labels={"role": "instance"}, memory_bytes=256 << 20, image=IMAGE)


def test_an_images_server_is_reached_and_its_output_is_the_functions(
    cluster: FakeCluster, driver: KubernetesDriver
) -> None:
    cluster.kubelet.images[IMAGE] = [sys.executable, "-c", SERVER]
    wanted = of_image()
    handle = driver.connect(driver.start(driver.create(wanted), wanted), deadline_s=WAIT_S)
    assert post(handle, "/init", {"http": True}) == (200, {"ok": True})
    sent = {"__ow_method": "patch", "__ow_path": "/any", "__ow_body": base64.b64encode(b"text").decode()}
    answer = ask(handle, **sent)
    assert answer["statusCode"] == 201
    said = json.loads(answer["body"])
    assert (said["path"], said["body"]) == ("/any", "text")
    assert "K_SERVICE" in said["names"]
    assert not [name for name in said["names"] if name.startswith("THAW_")]
    assert driver.more_logs(handle, (0, 0), WAIT_S)
    assert driver.logs(handle, "stdout", 0).data == b"patched\n"
    assert [owned.handle.container_id for owned in driver.list_owned()] == ["own"]
    driver.remove(handle)
    assert not cluster.api.left()


def test_an_image_is_pinned_by_the_digest_that_its_node_reports_and_nothing_of_it_runs(
    cluster: FakeCluster, driver: KubernetesDriver
) -> None:
    cluster.kubelet.digests = {
        "docker.io/me/server:1": IMAGE,
        "docker.io/me/old:1": f"docker-pullable://me/old@{DIGEST}",
    }
    assert driver.pin("docker.io/me/server:1", deadline_s=WAIT_S) == IMAGE
    assert driver.pin("docker.io/me/old:1", deadline_s=WAIT_S) == f"docker.io/me/old@{DIGEST}"
    made = [r for r in cluster.api.requests if r.method == "POST"]
    policies = [c["imagePullPolicy"] for r in made for c in r.body["spec"]["containers"]]
    assert policies == ["Always", "Always"]
    assert driver.pin(IMAGE, deadline_s=WAIT_S) == IMAGE
    assert len([r for r in cluster.api.requests if r.method == "POST"]) == 2, "a digest needs no question"
    assert not cluster.api.left()


def test_an_image_without_a_digest_cannot_be_pinned(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    cluster.kubelet.digests = {"docker.io/me/server:1": DIGEST}
    with pytest.raises(InitFailed, match="without the digest of a registry") as refused:
        driver.pin("docker.io/me/server:1", deadline_s=WAIT_S)
    assert "push it to a registry" in refused.value.hint
    assert not cluster.api.left()


@pytest.mark.parametrize(
    ("reason", "message", "said"),
    [
        ("ErrImagePull", "rpc error: code = NotFound desc = r/x:1: not found", "cannot be pulled: r/x:1: not found"),
        (
            "ErrImagePull",
            "Head https://r: dial tcp 10.1.2.3:443: i/o",
            "cannot be pulled: its registry does not answer",
        ),
        ("ImagePullBackOff", "no basic auth credentials", "and this host has none; .* one .imagePullSecrets."),
        ("ErrImagePull", "401 Unauthorized", "its registry takes no credential of this host"),
        ("ErrImageNeverPull", "", "is not on this host"),
    ],
)
def test_an_image_that_cannot_be_pulled_says_why_at_the_deploy_and_at_a_start(
    cluster: FakeCluster, driver: KubernetesDriver, reason: str, message: str, said: str
) -> None:
    """At the start the container beside it is there already, and its socket is not taken for the image's."""
    cluster.kubelet.trouble = {"reason": reason, "message": message}
    with pytest.raises(InitFailed, match=f"The image docker.io/me/server:1 .*{said}"):
        driver.pin("docker.io/me/server:1", deadline_s=WAIT_S)
    wanted = of_image()
    handle = driver.create(wanted)
    with pytest.raises(InitFailed, match=f"The image {IMAGE} .*{said}"):
        driver.start(handle, wanted)
    driver.remove(handle)


def test_a_pull_that_takes_too_long_is_told_from_one_that_fails(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    cluster.kubelet.trouble = {"reason": "ContainerCreating", "message": ""}
    with pytest.raises(Unavailable, match="has not started the pod thaw-pin-.* in time"):
        driver.pin("docker.io/me/server:1", deadline_s=1.0)


def test_an_image_whose_program_ends_at_once_says_how(cluster: FakeCluster, driver: KubernetesDriver) -> None:
    cluster.kubelet.images[IMAGE] = [sys.executable, "-c", "import sys; print('cannot', file=sys.stderr); sys.exit(3)"]
    ends = Ends(driver)
    wanted = of_image()
    handle = driver.start(driver.create(wanted), wanted)
    end = ends.wait("own")
    assert end.status == 3
    assert last_lines(handle) == "cannot"
    with pytest.raises(WorkerLost):
        driver.connect(handle, deadline_s=WAIT_S)
    driver.remove(handle)
    assert not cluster.api.left()


def test_what_a_start_pulls_is_the_image_that_the_deploy_pinned(
    cluster: FakeCluster, driver: KubernetesDriver, run_dir: Path
) -> None:
    cluster.kubelet.images[IMAGE] = [sys.executable, "-c", SERVER]
    wanted = of_image()
    handle = driver.start(driver.create(wanted), wanted)
    (request,) = [r for r in cluster.api.requests if r.method == "POST"]
    own, port = request.body["spec"]["containers"]
    assert (own["image"], port["image"]) == (IMAGE, "thaw/python:test")
    assert (run_dir / "closed").stat().st_mode & 0o777 == 0o700
    driver.remove(handle)
