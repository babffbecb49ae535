"""Images of users as pods: pinned by the node's report, reached through the container beside them, and their troubles."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest

from invoker.drivers.activation_logs import last_lines
from invoker.drivers.base import Spec
from tests.conftest import free_port
from tests.docker.inside import ask, post
from tests.kubernetes.api_server import Request
from tests.kubernetes.cluster import WAIT_S, FakeCluster, Node
from thaw.action import KIND_PYTHON
from thaw.errors import InitFailed, Unavailable, WorkerLost

DIGEST = "sha256:" + "d" * 64
NAME = "docker.io/me/server:1"
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


@pytest.fixture
def wanted() -> Spec:
    env = {"PORT": str(free_port()), "K_SERVICE": "server"}
    return Spec("own", KIND_PYTHON, env, labels={"role": "instance"}, memory_bytes=256 << 20, image=IMAGE)


def made(cluster: FakeCluster) -> list[Request]:
    return [r for r in cluster.api.requests if r.method == "POST"]


def test_an_images_server_is_reached_and_its_output_is_the_functions(node: Node, wanted: Spec, run_dir: Path) -> None:
    """A start pulls the image that the deploy pinned."""
    node.kubelet.images[IMAGE] = [sys.executable, "-c", SERVER]
    handle = node.up(wanted)
    (request,) = made(node.cluster)
    assert [c["image"] for c in request.body["spec"]["containers"]] == [IMAGE, "thaw/python:test"]
    assert (run_dir / "closed").stat().st_mode & 0o777 == 0o700
    assert post(handle, "/init", {"http": True}) == (200, {"ok": True})
    sent = {"__ow_method": "patch", "__ow_path": "/any", "__ow_body": base64.b64encode(b"text").decode()}
    answer = ask(handle, **sent)
    assert answer["statusCode"] == 201
    said = json.loads(answer["body"])
    assert (said["path"], said["body"]) == ("/any", "text")
    assert "K_SERVICE" in said["names"]
    assert not [name for name in said["names"] if name.startswith("THAW_")]
    assert node.driver.more_logs(handle, (0, 0), WAIT_S)
    assert node.driver.logs(handle, "stdout", 0).data == b"patched\n"
    assert [owned.handle.container_id for owned in node.driver.list_owned()] == ["own"]
    node.driver.remove(handle)
    assert not node.api.left()


def test_an_image_is_pinned_by_the_digest_that_its_node_reports_and_nothing_of_it_runs(node: Node) -> None:
    node.kubelet.digests = {NAME: IMAGE, "docker.io/me/old:1": f"docker-pullable://me/old@{DIGEST}"}
    assert node.driver.pin(NAME, deadline_s=WAIT_S) == IMAGE
    assert node.driver.pin("docker.io/me/old:1", deadline_s=WAIT_S) == f"docker.io/me/old@{DIGEST}"
    policies = [c["imagePullPolicy"] for r in made(node.cluster) for c in r.body["spec"]["containers"]]
    assert policies == ["Always", "Always"]
    assert node.driver.pin(IMAGE, deadline_s=WAIT_S) == IMAGE
    assert len(made(node.cluster)) == 2, "a digest needs no question"
    assert not node.api.left()


def test_an_image_without_a_digest_cannot_be_pinned(node: Node) -> None:
    node.kubelet.digests = {NAME: DIGEST}
    with pytest.raises(InitFailed, match="without the digest of a registry") as failed:
        node.driver.pin(NAME, deadline_s=WAIT_S)
    assert "push it to a registry" in failed.value.hint
    assert not node.api.left()


@pytest.mark.parametrize(
    ("reason", "message", "said"),
    [
        ("ErrImagePull", "rpc error: code = NotFound desc = r/x:1: not found", "cannot be pulled: r/x:1: not found"),
        ("ErrImagePull", "Head https://r: dial tcp 10.1.2.3:443: i/o", "be pulled: its registry does not answer"),
        ("ImagePullBackOff", "no basic auth credentials", "and this host has none; .* one .imagePullSecrets."),
        ("ErrImagePull", "401 Unauthorized", "its registry takes no credential of this host"),
        ("ErrImageNeverPull", "", "is not on this host"),
    ],
)
def test_an_image_that_cannot_be_pulled_says_why_at_the_deploy_and_at_a_start(
    node: Node, wanted: Spec, reason: str, message: str, said: str
) -> None:
    """At the start the container beside it is there already, and its socket is not taken for the image's."""
    node.kubelet.trouble = {"reason": reason, "message": message}
    with pytest.raises(InitFailed, match=f"The image {NAME} .*{said}"):
        node.driver.pin(NAME, deadline_s=WAIT_S)
    node.refused(f"The image {IMAGE} .*{said}", InitFailed, wanted)


def test_a_pull_that_takes_too_long_is_told_from_one_that_fails(node: Node) -> None:
    node.kubelet.trouble = {"reason": "ContainerCreating", "message": ""}
    with pytest.raises(Unavailable, match="has not started the pod thaw-pin-.* in time"):
        node.driver.pin(NAME, deadline_s=1.0)


def test_an_image_whose_program_ends_at_once_says_how(node: Node, wanted: Spec) -> None:
    node.kubelet.images[IMAGE] = [sys.executable, "-c", "import sys; print('cannot', file=sys.stderr); sys.exit(3)"]
    handle = node.driver.start(node.driver.create(wanted), wanted)
    end = node.ends.wait("own")
    assert end.status == 3
    assert last_lines(handle) == "cannot"
    with pytest.raises(WorkerLost):
        node.driver.connect(handle, deadline_s=WAIT_S)
    node.driver.remove(handle)
    assert not node.api.left()
