"""The API's own document, and requests made from it: valid ones and others.  None is a 500, and every answer is JSON."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.conftest import ValkeyServer
from tests.gateway.conftest import KEY, GatewayProcess
from tests.gateway.fake_invoker import FakeInvoker
from tests.security.own_process import document, routes
from tests.security.slow import module_gateway, status_of, worker_pid

N_LONG: Final = int(os.environ.get("THAW_FUZZ_REQUESTS", "1000000"))
WAIT_S: Final = 30.0


def test_the_document_names_every_route_and_no_other() -> None:
    known = set()
    for rule, method in routes():
        path = re.sub(r"<(?:path:)?(\w+)>", r"{\1}", rule)
        known.add((path, method.lower()))
    described = {(path, method) for path, item in document()["paths"].items() for method in item}
    assert described == known


@pytest.fixture(scope="module")
def gateway(_shared_valkey: ValkeyServer) -> Iterator[GatewayProcess]:
    with module_gateway(_shared_valkey.url, THAW_BLOCKING_S="0.05") as process:
        invoker = FakeInvoker(_shared_valkey.url)
        process.put_python()
        process.put_llm(limits={"timeout": 500})
        invoker.ready("guest/hello")
        invoker.ready("guest/chat", instance="i1", group="b" * 32)
        process.wait_for_routes(2)
        yield process
        invoker.stop()


def test_the_document_is_served(gateway: GatewayProcess) -> None:
    reply = requests.get(f"{gateway.url}/api/v1/api-docs", timeout=WAIT_S)
    assert reply.json() == document()


def test_no_request_that_the_document_describes_or_forbids_is_a_500(gateway: GatewayProcess) -> None:
    fuzz(gateway, random.randrange(2**32), 12)


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
def test_no_request_of_very_many_is_a_500(gateway: GatewayProcess) -> None:
    """THAW_FUZZ_REQUESTS says how many."""
    n_operations = sum(len(item) for item in document()["paths"].values())
    fuzz(gateway, random.randrange(2**32), 50)
    rss = status_of(worker_pid(gateway), "VmRSS")
    fuzz(gateway, random.randrange(2**32), max(1, N_LONG // n_operations // 2))
    assert status_of(worker_pid(gateway), "VmRSS") < rss + 50 * 1024


def fuzz(gateway: GatewayProcess, number: int, n_each: int) -> None:
    print(f"seed {number}")
    pid = worker_pid(gateway)
    schema: Any = schemathesis.openapi.from_dict(document())
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.method == "delete":
            continue  # the others need the actions
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.POSITIVE or operation.query or operation.body:
                send(gateway, operation.as_strategy(generation_mode=mode), number, n_each)
    assert worker_pid(gateway) == pid
    assert requests.get(f"{gateway.url}/health", timeout=WAIT_S).status_code == 200


def send(gateway: GatewayProcess, strategy: st.SearchStrategy[Any], number: int, n: int) -> None:
    @seed(number)
    @settings(
        max_examples=n, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(case=strategy, good_name=st.booleans())
    def one(case: Any, good_name: bool) -> None:
        if good_name and case.path_parameters and "name" in case.path_parameters:
            known = "chat" if case.path.startswith("/v1") else "hello"
            case.path_parameters["name"] = known if case.method != "PUT" else "changed"
        if case.query and str(case.query.get("timeout", "")).isdigit():
            case.query["timeout"] = min(int(case.query["timeout"]), 50)
        if good_name and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "chat"
        if case.path_parameters and "ns" in case.path_parameters:
            case.path_parameters["ns"] = "_"
        auth = tuple(KEY.split(":"))
        response = case.call(base_url=gateway.url, session=gateway.session, auth=auth, timeout=WAIT_S)
        assert response.status_code not in (500, 503), (case.as_curl_command(), response.content)
        kind = response.headers.get("Content-Type", "")
        if kind.startswith("application/json") and response.content:
            json.loads(response.content, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    one()
