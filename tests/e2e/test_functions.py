"""Ordinary functions on a whole platform, as OpenWhisk's users deploy and call them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.machine import ROOT, Machine

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


def node(script: str, **environ: str) -> Any:
    """Run a script of tests/clients with node, and return the JSON that it prints."""
    packages = ROOT / ".venv" / "clients" / "node_modules"
    assert packages.is_dir(), "OpenWhisk's client is missing: apt-get install -y nodejs npm, then make setup-dev"
    env = {"PATH": os.environ["PATH"], "NODE_PATH": str(packages), **environ}
    program = ROOT / "tests" / "clients" / script
    done = subprocess.run(["node", program], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_openwhisks_own_client_deploys_calls_joins_and_deletes(machine: Machine) -> None:
    said = node("openwhisk_verbs.js", THAW_TEST_APIHOST=machine.api, THAW_TEST_AUTH=":".join(machine.auth()))
    assert said == {
        "namespaces": ["guest"],
        "created": "0.0.1",
        "again": [409, '"resource already exists"'],
        "updated": "0.0.2",
        "result": {"bound": 2, "a": 1},
        "limits": {"timeout": 9000, "memory": 256, "logs": 1, "concurrency": 1},
        "missing": [404, '"The requested resource does not exist."'],
        "failed": [502, '"no such luck"'],
        "later": {"bound": 2, "later": True},
        "logs": [],
        "listed": ["js"],
        "bound": {"from": "package", "bound": "too"},
        "packages": ["jsbound", "jspkg"],
        "package": ["act"],
        "sequence": {"bound": 2, "a": 2, "from": "package"},
        "unheard": "",
        "disabled": "inactive",
        "fired": {"bound": 2, "from": "trigger", "b": 3},
        "notEmpty": [409, '"Package not empty (contains 1 entity). Set force param or delete package contents."'],
        "feed": {"event": "CREATE", "trigger": "/_/jst", "cron": "*"},
        "left": [[], [], []],
    }
