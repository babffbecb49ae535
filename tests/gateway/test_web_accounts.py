"""Web requests in the accounts of the action's namespace, and those that take long."""

from __future__ import annotations

import threading

import requests

from tests.gateway.conftest import GatewayProcess, Start, pairs

ACTIONS = "/api/v1/namespaces/_/actions"


def test_a_strangers_requests_count_by_the_actions_namespace_and_leave_it_its_api(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_CALLS_PER_MINUTE="6")
    gateway.put_python("own", annotations=pairs(**dict.fromkeys(("web-export", "web-custom-options"), True)))
    url = f"{gateway.url}/api/v1/web/guest/default/own.json?__ow_body=refused"
    statuses = [requests.get(url, timeout=30).status_code for _ in range(13)]
    assert statuses[:6] == [400] * 6
    assert 429 in statuses, "a minute may end in between, and then twelve are answered"
    assert gateway.call("GET", ACTIONS).status_code == 200


def test_what_is_refused_and_what_is_answered_here_uses_up_nothing(start_gateway: Start) -> None:
    """Otherwise a client without the secret could keep clients that have it from the action."""
    gateway = start_gateway(THAW_CALLS_PER_MINUTE="6")
    notes = {"web-export": True, "require-whisk-auth": "secret"}
    gateway.put_python("locked", annotations=pairs(**notes))
    url = f"{gateway.url}/api/v1/web/guest/default/locked.json?__ow_body=refused"
    assert {requests.get(url, timeout=30).status_code for _ in range(8)} == {401}
    assert {requests.post(url, data=b"x" * 300_000, timeout=30).status_code for _ in range(8)} == {401}
    assert {requests.options(url, timeout=30).status_code for _ in range(8)} == {200}
    assert requests.get(url, timeout=30, headers={"X-Require-Whisk-Auth": "secret"}).status_code == 400
    assert gateway.call("GET", ACTIONS).status_code == 200


def test_a_result_that_takes_long_is_a_202_and_the_record_has_it(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_BLOCKING_S="0.2")
    gateway.serve_python("web", annotations=pairs(**{"web-export": True}))
    gateway.invoker.pace = threading.Semaphore(0)
    reply = requests.get(f"{gateway.url}/api/v1/web/guest/default/web.json", timeout=30)
    assert (reply.status_code, reply.json()["error"]) == (202, "Response not yet ready.")
    gateway.invoker.pace.release()
    assert gateway.ended(reply.headers["X-Openwhisk-Activation-Id"]).status == 0


def test_a_model_is_a_web_action(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    gateway.put("actions/chat?overwrite=true", annotations=pairs(**{"web-export": True}))
    gateway.serve("chat", version="0.0.2")
    url = f"{gateway.url}/api/v1/web/guest/default/chat.json"
    reply = requests.post(url, json={"prompt": "hi", "max_tokens": 3}, timeout=30)
    assert (reply.status_code, reply.json()["object"]) == (200, "text_completion")
    assert requests.post(url, json={"max_tokens": 3}, timeout=30).status_code == 400
