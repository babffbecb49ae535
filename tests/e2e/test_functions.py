"""Ordinary functions on a whole platform, as OpenWhisk's users deploy and call them."""

from __future__ import annotations

import base64
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.machine import Machine
from tests.e2e.node_clients import node
from tests.wheels import add_wheel

HERE = "/api/v1/namespaces/_"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A running platform without a model."""
    made = Machine(tmp_path_factory.mktemp("functions"), dict(os.environ))
    with tempfile.TemporaryDirectory(prefix="thaw-index-", dir="/tmp") as index:
        Path(index).chmod(0o755)  # the installer's own user reads it
        add_wheel(Path(index), "greeting", "1.0", {"greeting.py": "WORD = 'hello'"})
        made.env["THAW_PACKAGE_INDEX"] = Path(index).as_uri()
        try:
            made.up("--stem-cells", "off")  # no engine is imported for functions
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


def zipped(files: dict[str, str]) -> str:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return base64.b64encode(data.getvalue()).decode()


def test_what_a_requirements_txt_asks_for_is_installed_when_a_function_is_deployed(machine: Machine) -> None:
    main = "import greeting\ndef main(args): return {'said': greeting.WORD}\n"
    code = zipped({"__main__.py": main, "requirements.txt": "greeting>=1\n"})
    deploy(machine, "greets", code, annotations=[])
    shown = machine.request("GET", f"{HERE}/actions/greets?code=false").json()["exec"]["packages"]
    assert shown == ["greeting==1.0"]
    assert invoke(machine, "greets")["response"]["result"] == {"said": "hello"}
    code = zipped({"__main__.py": main, "requirements.txt": "greeting\nunheard-of\n"})
    reply = machine.request("PUT", f"{HERE}/actions/lost", json={"exec": {"kind": "python:3.11", "code": code}})
    assert reply.status_code == 400
    assert "unheard-of" in reply.json()["error"]
    assert machine.request("GET", f"{HERE}/actions/lost").status_code == 404


def test_a_platform_whose_hosts_run_no_images_says_so_at_the_deploy(machine: Machine) -> None:
    done = machine.thaw("action", "create", "boxed", "--docker", "me/image", check=False)
    assert done.returncode == 144
    assert "No host of this platform runs images: kind 'blackbox' needs hosts with THAW_DRIVER=docker or" in done.stderr
    assert "\nhint: deploy the code as kind python:3.11, or start the platform with thaw dev up" in done.stderr


def test_openwhisks_own_client_deploys_calls_joins_and_deletes(machine: Machine) -> None:
    said = node("openwhisk_verbs.js", THAW_TEST_APIHOST=machine.url, THAW_TEST_AUTH=":".join(machine.auth()))
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


def test_the_command_line_builds_a_feed_a_trigger_a_rule_a_sequence_and_a_web_action(
    machine: Machine, tmp_path: Path
) -> None:
    """The feed fires its trigger with the key that it is given, as one that listens to a queue would."""
    (tmp_path / "feed.py").write_text(
        "import base64, json, os, urllib.request\n"
        "def main(args):\n"
        "    if args['lifecycleEvent'] != 'CREATE':\n"
        "        return {'event': args['lifecycleEvent']}\n"
        "    _, namespace, name = args['triggerName'].split('/')\n"
        "    url = f\"{os.environ['__OW_API_HOST']}/api/v1/namespaces/{namespace}/triggers/{name}\"\n"
        "    key = base64.b64encode(args['authKey'].encode()).decode()\n"
        "    body = json.dumps({'said': args['say']}).encode()\n"
        "    asked = urllib.request.Request(url, body, {'Authorization': 'Basic ' + key})\n"
        "    return {'fired': urllib.request.urlopen(asked).status}\n"
    )
    (tmp_path / "shout.py").write_text("def main(args):\n    return {'body': args['said'].upper()}\n")
    for line in (
        "package create cli -p language en",
        f"action create cli/feed {tmp_path}/feed.py -a feed true",
        f"action create cli/shout {tmp_path}/shout.py --web true",
        "action create cliseq cli/shout --sequence",
    ):
        machine.thaw(*line.split())
    url = machine.thaw("action", "get", "cli/shout", "--url").stdout.strip()
    assert requests.get(f"{url}?said=hi", timeout=60).text == "HI"
    machine.thaw("trigger", "create", "cliquiet", "--feed", "cli/feed", "-p", "say", "too early")
    machine.thaw("trigger", "create", "clit")
    machine.thaw("rule", "create", "clir", "clit", "cliseq")
    fired = machine.thaw("trigger", "fire", "clit", "-p", "said", "hello").stdout.split()[-1]
    record = json.loads(machine.thaw("activation", "get", fired, "--wait", "60").stdout)
    called = json.loads(record["logs"][0])["activationId"]
    assert json.loads(machine.thaw("activation", "get", called, "--wait", "60").stdout)["name"] == "cliseq"
    assert json.loads(machine.thaw("activation", "result", called).stdout) == {"body": "HELLO"}
    assert json.loads(machine.thaw("trigger", "get", "cliquiet").stdout) == {"event": "READ"}
    for line in ("rule delete clir", "trigger delete clit", "trigger delete cliquiet", "package delete cli --force"):
        machine.thaw(*line.split())
    assert "cli" not in machine.thaw("package", "list").stdout
