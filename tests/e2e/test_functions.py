"""Ordinary functions on a whole platform, as OpenWhisk's users deploy and call them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.machine import Machine

HERE = "/api/v1/namespaces/_"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A running platform without a model."""
    made = Machine(tmp_path_factory.mktemp("functions"), dict(os.environ))
    try:
        made.up()
        yield made
    finally:
        made.down()
    assert made.leftovers() == []


def deploy(machine: Machine, name: str, code: str, **body: Any) -> None:
    plain = {"exec": {"kind": "python:3.11", "code": code}, **body}
    reply = machine.request("PUT", f"{HERE}/actions/{name}?overwrite=true", json=plain)
    assert reply.status_code == 200, reply.text


def invoke(machine: Machine, name: str, **body: Any) -> dict[str, Any]:
    return dict(machine.request("POST", f"{HERE}/actions/{name}?blocking=true", json=body).json())


def test_the_logs_of_a_function_that_does_not_load_have_what_it_printed(machine: Machine) -> None:
    deploy(
        machine, "broken", "print('loading')\nimport sys\nprint('warned', file=sys.stderr)\nraise ValueError('so')\n"
    )
    for _ in range(2):  # the second request finds a version that is known to be broken
        record = invoke(machine, "broken")
        assert record["response"]["status"] == "action developer error"
        error = record["response"]["result"]["error"]
        assert error == "The action failed to generate or locate a binary. See logs for details."
        logs = machine.thaw("activation", "logs", record["activationId"]).stdout
        said = [line.partition("Z ")[2] for line in logs.splitlines()]
        assert said[:2] == ["stdout: loading", "stderr: warned"]
        assert said[-1] == "stderr: ValueError: so"


def test_a_function_reaches_the_api_with_the_host_and_the_key_that_it_is_given(machine: Machine) -> None:
    code = (
        "import base64, json, os, urllib.request\n"
        "HOST = os.environ['__OW_API_HOST']\n"
        "def main(args):\n"
        "    key = base64.b64encode(os.environ['__OW_API_KEY'].encode()).decode()\n"
        "    headers = {'Authorization': 'Basic ' + key}\n"
        "    asked = urllib.request.Request(HOST + '/api/v1/namespaces', headers=headers)\n"
        "    return {'namespaces': json.load(urllib.request.urlopen(asked)), 'me': os.environ['__OW_ACTION_NAME']}\n"
    )
    deploy(machine, "asks", code, annotations=[{"key": "provide-api-key", "value": True}])
    assert invoke(machine, "asks")["response"]["result"] == {"namespaces": ["guest"], "me": "/guest/asks"}
    deploy(machine, "asks", code, annotations=[{"key": "provide-api-key", "value": False}])
    assert invoke(machine, "asks")["response"]["result"] == {"error": "'__OW_API_KEY'"}
