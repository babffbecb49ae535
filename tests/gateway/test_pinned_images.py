"""The image of a function is pinned by a host that runs images, and a host's refusal reaches the user with its hint."""

from __future__ import annotations

from typing import Any

import pytest

from relay.protocol.data_port_messages import ImageFound
from tests.gateway.conftest import GatewayProcess
from thaw import wire
from thaw.errors import InitFailed

PATH = "/api/v1/namespaces/_/actions/own"
BODY = {"exec": {"kind": "blackbox", "image": "me/server:1"}}
DIGEST = "sha256:" + "d" * 64


@pytest.mark.parametrize("driver", ["docker", "kubernetes"])
def test_an_image_is_pinned_by_a_host_that_runs_images(gateway: GatewayProcess, driver: str) -> None:
    asked = []

    def found(image: str) -> tuple[int, Any]:
        asked.append(image)
        return 200, wire.to_plain(ImageFound(f"docker.io/me/server@{DIGEST}"))

    gateway.invoker.image = found
    gateway.invoker.report(driver=driver)
    assert gateway.put("actions/own", **BODY)["exec"]["image"] == f"docker.io/me/server@{DIGEST}"
    assert asked == ["docker.io/me/server:1"]


def test_hosts_that_run_none_are_not_asked(gateway: GatewayProcess) -> None:
    gateway.invoker.report(driver="process")
    reply = gateway.call("PUT", PATH, json=BODY)
    assert reply.status_code == 400
    assert reply.json()["error"].startswith("No host of this platform runs images:")
    assert reply.json()["hint"].startswith("deploy the code as kind python:3.11")


def test_a_pull_that_fails_is_said_with_what_to_do_next(gateway: GatewayProcess) -> None:
    said = InitFailed("The image docker.io/me/server:1 cannot be pulled: not found", hint="look whether it exists")
    gateway.invoker.image = lambda image: (502, {"error": said.message, "info": wire.to_plain(said.info())})
    gateway.invoker.report(driver="kubernetes")
    reply = gateway.call("PUT", PATH, json=BODY)
    assert reply.status_code == 400
    assert (reply.json()["error"], reply.json()["hint"]) == (said.message, said.hint)
