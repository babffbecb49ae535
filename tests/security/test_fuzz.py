"""The API's own document, and requests made from it: valid ones and others.  None is a 500, and every answer is JSON."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from jsonschema import Draft4Validator
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import response_schema_conformance

from gateway.api import embeddings_body, openai_body, responses_body
from tests.conftest import ValkeyServer
from tests.gateway.conftest import KEY, GatewayProcess
from tests.gateway.fake_invoker import FakeInvoker
from tests.security.own_process import document, routes
from tests.security.slow import WAIT_S, assert_serves, module_gateway, status_of, worker_pid

N_LONG: Final = int(os.environ.get("THAW_FUZZ_REQUESTS", "1000000"))
N_AGREE: Final = int(os.environ.get("THAW_FUZZ_AGREE", "15"))
DEPENDS: Final = {
    *("stream_options", "max_tokens", "max_completion_tokens", "max_output_tokens", "echo", "return_token_ids"),
    "suffix",
    *("prompt_logprobs", "best_of", "prompt", "top_logprobs", "continue_final_message", "tools", "tool_choice"),
    *("response_format", "text", "add_generation_prompt", "chat_template_kwargs", "stream", "min_tokens", "messages"),
}
"""Parameters that a 400 may name although each of them is as described: they depend on others."""


def test_the_document_names_every_route_and_no_other() -> None:
    known = {(re.sub(r"<(?:path:)?(\w+)>", r"{\1}", rule), method.lower()) for rule, method in routes()}
    described = {(path, method) for path, item in document()["paths"].items() for method in item}
    assert described == known


@pytest.fixture(scope="module")
def gateway(_shared_valkey: ValkeyServer) -> Iterator[GatewayProcess]:
    with module_gateway(_shared_valkey.url, THAW_BLOCKING_S="0.05") as process:
        invoker = FakeInvoker(_shared_valkey.url)
        process.put_python()
        process.put_llm(limits={"timeout": 500})  # of a request that waits for a start
        process.put_llm("patient")
        invoker.ready("guest/hello")
        invoker.ready("guest/chat", instance="i1", group="b" * 32)
        invoker.ready("guest/patient", instance="i2", group="c" * 32)
        process.wait_for_routes(3)
        yield process
        invoker.stop()


def test_the_document_is_served(gateway: GatewayProcess) -> None:
    for path in ("/openapi.json", "/api/v1/api-docs"):
        assert requests.get(f"{gateway.url}{path}", timeout=WAIT_S).json() == document()


def test_no_request_that_the_document_describes_or_forbids_is_a_500(gateway: GatewayProcess) -> None:
    fuzz(gateway, random.randrange(2**32), 12)


def test_the_document_names_every_parameter_of_v1_and_no_other() -> None:
    known = {"chat/completions": openai_body.known("chat"), "completions": openai_body.known("completions")}
    for path, names in {**known, "responses": responses_body.KNOWN, "embeddings": embeddings_body.KNOWN}.items():
        body = document()["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(body["properties"]) == set(names), path


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"]
)
def test_what_the_document_describes_is_accepted_and_what_it_does_not_is_refused(
    gateway: GatewayProcess, path: str
) -> None:
    schema: Any = schemathesis.openapi.from_dict(document())
    operation, number = schema[path]["POST"], random.randrange(2**32)
    body = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    described = Draft4Validator(as_json_schema(body))
    print(f"seed {number}")
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
        agree(gateway, operation.as_strategy(generation_mode=mode), number, N_AGREE, described)


def examples(number: int, n: int) -> Callable[[Any], Any]:
    """Try ``n`` examples, of which the number decides which they are, and no shorter ones when one fails."""
    found = {"phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}
    return lambda test: seed(number)(settings(max_examples=n, deadline=None, database=None, **found)(test))


def agree(
    gateway: GatewayProcess, strategy: st.SearchStrategy[Any], number: int, n: int, described: Draft4Validator
) -> None:
    @examples(number, n)
    @given(case=strategy)
    def one(case: Any) -> None:
        if not isinstance(case.body, dict):
            return
        if isinstance(case.body.get("model"), str):
            case.body["model"] = "patient"
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if type(case.body.get(name)) is int:  # the model writes as many as it is told
                case.body[name] = min(case.body[name], 8)
        auth = tuple(KEY.split(":"))
        reply = case.call(base_url=gateway.url, session=gateway.session, auth=auth, timeout=WAIT_S)
        problem = next(described.iter_errors(case.body), None)
        what = (json.dumps(case.body), reply.text[:500], problem and problem.message)
        if problem is not None or reply.status_code != 200:
            assert reply.status_code == 400, what
            case.validate_response(reply, checks=[response_schema_conformance])
        if problem is None and reply.status_code != 200:
            assert re.split(r"[.[]", reply.json()["error"]["param"])[0] in DEPENDS, what

    one()


def as_json_schema(schema: Any) -> Any:
    """OpenAPI 3.0 has two words of its own."""
    if isinstance(schema, list):
        return [as_json_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: as_json_schema(value) for name, value in schema.items() if name != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


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
    assert_serves(gateway)


def send(gateway: GatewayProcess, strategy: st.SearchStrategy[Any], number: int, n: int) -> None:
    @examples(number, n)
    @given(case=strategy, good_name=st.booleans())
    def one(case: Any, good_name: bool) -> None:
        if good_name and case.path_parameters and "name" in case.path_parameters:
            known = "chat" if case.path.startswith("/v1") else "hello"
            case.path_parameters["name"] = known if case.method != "PUT" else "changed"
        elif case.path.endswith("/warm/{name}"):
            case.path_parameters["name"] += "-unknown"  # one that was made before waits for a host, which never comes
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
