"""``get`` prints an entity, a summary or a field of it, or an activation's logs, and saves code to a file."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.fake_gateway import HERE, FakeGateway

ID = "b" * 32
SOURCE = "def main(args):\n    return {}\n"


def _action(gateway: FakeGateway, **more: object) -> None:
    code = {"kind": "python:3.11", "code": SOURCE, "binary": False}
    gateway.answers[f"GET {HERE}/actions/x"] = (200, {"name": "x", "namespace": "guest", "exec": code, **more})


def test_save_writes_the_code_to_a_file_of_the_action_s_name(
    at: Run, gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _action(gateway)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    done = at("action", "get", "x", "--save")
    assert done.stdout == f"ok: saved action code to {tmp_path / 'x.py'}\n", done.stderr
    assert (tmp_path / "x.py").read_text() == SOURCE
    again = at("action", "get", "x", "--save")
    assert (again.returncode, (tmp_path / "x.py").read_text()) == (153, SOURCE), "no file is replaced"
    assert "--save-as FILE" in again.stderr


def test_save_as_writes_a_zip_as_it_was_deployed(at: Run, gateway: FakeGateway, tmp_path: Path) -> None:
    packed = b"PK\x03\x04 and the rest"
    code = {"kind": "python:3.11", "code": base64.b64encode(packed).decode(), "binary": True}
    _action(gateway, exec=code)
    assert at("action", "get", "x", "--save-as", str(tmp_path / "mine.zip")).returncode == 0
    assert (tmp_path / "mine.zip").read_bytes() == packed
    assert gateway.asked[-1].query == {"code": "true"}


def test_a_sequence_has_no_code_to_save(at: Run, gateway: FakeGateway, tmp_path: Path) -> None:
    _action(gateway, exec={"kind": "sequence", "components": ["/_/a"]})
    done = at("action", "get", "x", "--save-as", str(tmp_path / "mine"))
    assert (done.returncode, "x has no code" in done.stderr, (tmp_path / "mine").exists()) == (144, True, False)


def test_a_summary_names_parameters_with_stars_where_they_are_bound(at: Run, gateway: FakeGateway) -> None:
    notes = [
        {"key": "description", "value": "says hello"},
        {"key": "parameters", "value": [{"name": "name"}, {"name": "place"}]},
    ]
    _action(gateway, annotations=notes, parameters=[{"key": "place", "value": "here"}])
    expected = "action /guest/x: says hello\n   (parameters: name, *place)\n"
    assert at("action", "get", "x", "--summary").stdout == expected
    _action(gateway, annotations=[*notes, {"key": "final", "value": True}], parameters=[{"key": "place"}])
    assert "(parameters: name, **place)" in at("action", "get", "x", "-s").stdout


def test_a_package_s_summary_has_its_actions(at: Run, gateway: FakeGateway) -> None:
    inner = {"name": "say", "version": "0.0.1", "annotations": [], "parameters": []}
    package = {"name": "p", "namespace": "guest", "annotations": [], "parameters": [], "actions": [inner], "feeds": []}
    gateway.answers[f"GET {HERE}/packages/p"] = (200, package)
    assert at("package", "get", "p", "--summary").stdout == (
        "package /guest/p\n   (parameters: none defined)\n action /guest/p/say\n    (parameters: none defined)\n"
    )


@pytest.mark.parametrize(("kind", "field"), [("package", "publish"), ("trigger", "rules"), ("rule", "status")])
def test_one_field_of_any_entity_is_printed_alone(at: Run, gateway: FakeGateway, kind: str, field: str) -> None:
    gateway.answers[f"GET {HERE}/{kind}s/x"] = (200, {"name": "x", "namespace": "guest", field: "told"})
    assert at(kind, "get", "x", field).stdout == '"told"\n'


def test_an_activation_is_shown_by_its_field_its_summary_and_its_bare_logs(at: Run, gateway: FakeGateway) -> None:
    lines = ["2026-01-01T00:00:00.0Z stdout: hello: you", "2026-01-01T00:00:00.1Z stderr: "]
    record = {
        "activationId": ID,
        "name": "x",
        "namespace": "guest",
        "start": 0,
        "logs": lines,
        "response": {"status": "success", "result": {"n": 1}},
    }
    gateway.answers[f"GET {HERE}/activations/{ID}"] = (200, record)
    gateway.answers[f"GET {HERE}/activations/{ID}/logs"] = (200, {"logs": lines})
    gateway.answers[f"GET {HERE}/activations"] = (200, [record])
    assert json.loads(at("activation", "get", ID, "response").stdout) == record["response"]
    assert json.loads(at("activation", "get", "--last", "response").stdout) == record["response"]
    summary = at("activation", "get", ID, "--summary").stdout
    assert summary.startswith("activation result for '/guest/x' (success at ")
    assert summary.endswith('{\n    "n": 1\n}\n')
    assert at("activation", "get", ID, "--logs").stdout == "hello: you\n\n"
    assert at("activation", "logs", ID, "--strip").stdout == "hello: you\n\n"
    assert at("activation", "logs", ID).stdout == "\n".join(lines) + "\n"


def test_whole_records_are_listed_as_json(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[f"GET {HERE}/activations"] = (200, [{"activationId": ID}])
    assert json.loads(at("activation", "list", "--full").stdout) == [{"activationId": ID}]
    assert gateway.asked[-1].query["docs"] == "true"
