"""Probes that a header identifies: they need no key, and on no path do they run or start a function."""

from __future__ import annotations

from typing import Any

import pytest
import requests

from tests.conftest import ValkeyServer
from tests.gateway.conftest import GatewayProcess, Start, pairs

NODE = {"User-Agent": "kube-probe/1.31"}
WEB = "/api/v1/web/guest/default/site"
PATHS = (WEB, "/", "/v1/models", "/nothing/here", "/api/v1/namespaces/_/actions/site")


def ask(gateway: GatewayProcess, path: str, **headers: str) -> requests.Response:
    """Send the request without a key."""
    return requests.get(gateway.url + path, headers=headers, timeout=10)


@pytest.fixture
def site(gateway: GatewayProcess) -> list[Any]:
    """The calls of a web action that has an instance."""
    calls: list[Any] = []
    gateway.invoker.function = lambda value: (200, calls.append(value) or {"body": "the site"})
    gateway.serve_python("site", annotations=pairs(**{"web-export": True}))
    return calls


def test_a_probe_of_a_node_gets_the_gateways_health_and_calls_no_function(
    gateway: GatewayProcess, site: list[Any]
) -> None:
    for headers in (NODE, {"K-Kubelet-Probe": "queue"}):
        for path in PATHS:
            reply = ask(gateway, path, **headers)
            assert (reply.status_code, reply.json()["status"]) == (200, "ok")
    assert site == []
    assert ask(gateway, WEB).text == "the site"
    assert len(site) == 1


def test_a_probe_of_a_function_without_an_instance_starts_none(gateway: GatewayProcess) -> None:
    gateway.put_python("site", annotations=pairs(**{"web-export": True}))
    for headers in (NODE, {"K-Network-Probe": "queue"}):
        assert ask(gateway, WEB, **headers).status_code == 200
    assert "thaw_gateway_waiting_requests 0.0" in gateway.call("GET", "/metrics").text
    assert gateway.read("activations") == []
    assert gateway.invoker.client.keys("*demand*") == []


def test_a_network_probe_reads_its_own_word_again_and_is_refused_with_another(
    gateway: GatewayProcess, site: list[Any]
) -> None:
    reply = ask(gateway, WEB, **{"K-Network-Probe": "probe", "K-Network-Hash": "3f0c9a"})
    assert (reply.status_code, reply.headers["K-Network-Hash"], reply.text) == (200, "3f0c9a", "")
    for who in ("queue", "activator"):
        reply = ask(gateway, WEB, **{"K-Network-Probe": who})
        assert (reply.status_code, reply.text) == (200, who)
    for who in ("probe", "somebody"):
        reply = ask(gateway, WEB, **{"K-Network-Probe": who})
        assert (reply.status_code, "This is no probe: K-Network-Probe is" in reply.json()["error"]) == (400, True)
    assert site == []


def test_a_gateway_without_its_state_server_is_not_ready_and_alive(
    own_valkey: ValkeyServer, start_gateway: Start
) -> None:
    gateway = start_gateway(own_valkey.url, THAW_GATEWAY_HEARTBEAT_S="0.2")
    gateway.invoker.client.config_set("min-replicas-to-write", 1)
    gateway.wait_for_event("heartbeat_missed")
    assert ask(gateway, WEB, **NODE).status_code == 503
    assert ask(gateway, WEB, **{"K-Network-Probe": "queue"}).status_code == 503
    for headers in (NODE, {"K-Network-Probe": "queue"}, {"K-Network-Probe": "probe"}):  # here the path decides
        for path in ("/live", "/live/", "//live"):
            assert ask(gateway, path, **headers).status_code == 200
        assert ask(gateway, "/health", **headers).json()["gateway"]
        assert ask(gateway, "/health", **headers).status_code == 503
