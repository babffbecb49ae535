"""``thaw action``: its requests, its output and its exit code."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cli.conftest import KEY, Run
from tests.cli.fake_gateway import HERE, FakeGateway

ACTION = f"PUT {HERE}/actions/hello"
CONFIG = {"kind": "llm:vllm", "model": {"uri": "s3://models/m"}}


def _accept(gateway: FakeGateway) -> None:
    gateway.answers[ACTION] = (200, {"name": "hello", "namespace": "guest", "version": "0.0.1"})


def test_create_sends_source_text_parameters_limits_and_the_key(at: Run, gateway: FakeGateway, tmp_path: Path) -> None:
    _accept(gateway)
    source = tmp_path / "hello.py"
    source.write_text("def main(args): return {}\n")
    done = at("action", "create", "hello", str(source), "-p", "name", "Ada", "-p", "n", "3", "-t", "1000", "-m", "256")
    assert (done.returncode, done.stdout) == (0, "ok: created action hello 0.0.1\n"), done.stderr
    asked = gateway.asked[0]
    assert asked.query == {"overwrite": "false"}
    assert asked.authorization == "Basic " + base64.b64encode(KEY.encode()).decode()
    assert asked.body == {
        "exec": {"kind": "python:3.11", "code": "def main(args): return {}\n", "binary": False},
        "parameters": [{"key": "name", "value": "Ada"}, {"key": "n", "value": 3}],
        "limits": {"timeout": 1000, "memory": 256},
    }


def test_create_sends_a_zip_as_base64(at: Run, gateway: FakeGateway, tmp_path: Path) -> None:
    _accept(gateway)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("__main__.py", "def main(args): return {}")
    (tmp_path / "hello.zip").write_bytes(packed.getvalue())
    assert at("action", "create", "hello", str(tmp_path / "hello.zip"), "--main", "other").returncode == 0
    assert gateway.asked[0].body["exec"] == {
        "kind": "python:3.11",
        "code": base64.b64encode(packed.getvalue()).decode(),
        "binary": True,
        "main": "other",
    }


def test_a_config_is_sent_with_the_forced_stages(at: Run, gateway: FakeGateway, tmp_path: Path) -> None:
    _accept(gateway)
    (tmp_path / "c.json").write_text(json.dumps(CONFIG))
    assert at("action", "create", "hello", "--config", str(tmp_path / "c.json"), "--stages", "2").returncode == 0
    body = gateway.asked[0].body
    assert body["config"] == CONFIG | {"scaling": {"stages": 2}}
    assert body["exec"]["kind"] == "llm:vllm"


MISTAKES = {
    "action create x": ("there is nothing to deploy", "thaw action create NAME FILE.py, or NAME --config FILE.json"),
    "action create x --copy": (
        "there is nothing to deploy",
        "thaw action create NAME FILE.py, or NAME --config FILE.json",
    ),
    "action create x no.py": ("no.py cannot be read: No such file or directory", "give the path of a .py or .zip file"),
    "action create x -p key": ("-p takes a key and a value", "write -p KEY VALUE"),
    "action create x c --stages 2": ("--stages is for LLM functions only", "give it together with --config FILE.json"),
    "action create x --docker me/i --kind python:3": (
        "--kind and --docker cannot be given together",
        "an image brings its own runtime",
    ),
    "action update x --web maybe": (
        "--web takes true, raw or false, not 'maybe'",
        "thaw action update NAME --web true",
    ),
    "package create x --shared perhaps": (
        "--shared takes yes or no, not 'perhaps'",
        "thaw package update NAME --shared yes",
    ),
    "activation get zz": ("'zz' is not an activation id", "an id has 32 hex digits: thaw activation list"),
    "activation get": ("no activation was named", "give its id, or --last"),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_on_the_line_is_one_line_a_hint_and_exit_code_144_before_anything_is_sent(
    at: Run, gateway: FakeGateway, words: str
) -> None:
    done = at(*words.split())
    error, hint = MISTAKES[words]
    assert done.stderr == f"error: {error}\nhint: {hint}\n"
    assert done.returncode == 144  # 400 - 256
    assert gateway.asked == []


def test_a_config_error_names_path_value_and_fix(at: Run, gateway: FakeGateway, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(CONFIG | {"scaling": {"max_batch": 0}}))
    done = at("action", "create", "hello", "--config", str(tmp_path / "c.json"))
    assert done.stderr == (
        "error: $.scaling.max_batch: value is less than the minimum of 1 (got 0)\n"
        "hint: requests one instance runs at once, 1 to 1024\n"
    )
    assert gateway.asked == []


@pytest.mark.parametrize(
    ("instances", "said"),
    [
        ([], ""),
        ([{"stages": 4, "becoming": 1}], ": pipeline of 4, becoming one worker"),
        ([{"stages": 4, "becoming": 2}], ": pipeline of 4, becoming 2 workers"),
        ([{"stages": 1}, {"stages": 4}, {"stages": 1}], ": 2 × one worker; pipeline of 4"),
        (
            [{"stages": 1, "modelVersion": "a" * 64}, {"stages": 1, "modelVersion": "b" * 64}],
            ": one worker, of version aaaaaaaaaaaaaaaa; one worker, of version bbbbbbbbbbbbbbbb",
        ),
        (None, ""),
    ],
)
def test_get_says_what_serves_a_model_and_what_that_becomes(
    at: Run, gateway: FakeGateway, instances: list[dict[str, object]] | None, said: str
) -> None:
    found = {"name": "chat", **({} if instances is None else {"instances": instances})}
    gateway.answers[f"GET {HERE}/actions/chat"] = (200, found)
    done = at("action", "get", "chat")
    assert done.stderr == f"ok: got action chat{said}\n"
    assert json.loads(done.stdout) == found


def test_an_answer_of_404_is_exit_code_148_as_wsk_has_it(at: Run) -> None:
    done = at("action", "get", "nothing")
    assert done.returncode == 148
    assert done.stderr.splitlines()[0] == "error: The requested resource does not exist."
    assert done.stderr.splitlines()[1].startswith("hint: ")


def test_a_gateway_that_is_away_is_named_without_a_traceback(thaw: Run) -> None:
    done = thaw("action", "list", "--apihost", "http://127.0.0.1:9", "--auth", KEY)
    assert done.stderr.splitlines()[0] == "error: http://127.0.0.1:9 does not answer: connection refused"
    assert done.returncode == 3


def test_without_a_key_the_hint_says_how_to_get_one(thaw: Run) -> None:
    done = thaw("action", "list")
    assert done.stderr.startswith("error: no API key is set\nhint: ")
    assert done.returncode == 145


def test_invoke_without_waiting_prints_the_id(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[f"POST {HERE}/actions/hello"] = (202, {"activationId": "b" * 32})
    done = at("action", "invoke", "hello", "-p", "name", "Ada")
    assert done.stdout == f"ok: invoked hello with id {'b' * 32}\n"
    assert gateway.asked[0].query == {"blocking": "false", "result": "false"}
    assert gateway.asked[0].body == {"name": "Ada"}


def test_invoke_with_result_prints_the_result_alone(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[f"POST {HERE}/actions/hello"] = (200, {"greeting": "Hello"})
    done = at("action", "invoke", "hello", "--result")
    assert json.loads(done.stdout) == {"greeting": "Hello"}
    assert gateway.asked[0].query == {"blocking": "true", "result": "true"}


def test_a_failed_run_prints_its_record_and_ends_with_wsk_s_code(at: Run, gateway: FakeGateway) -> None:
    record = {"activationId": "b" * 32, "response": {"success": False, "result": {"error": "boom"}}}
    gateway.answers[f"POST {HERE}/actions/hello"] = (502, record)
    done = at("action", "invoke", "hello", "--blocking")
    assert done.returncode == 246
    assert json.loads(done.stdout) == record
    assert done.stderr == f"ok: invoked hello with id {'b' * 32}\n"


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "[" * 100_000])
def test_a_value_that_is_no_json_is_sent_as_text(at: Run, gateway: FakeGateway, value: str) -> None:
    at("action", "invoke", "hello", "-p", "v", value)
    assert gateway.asked[-1].body == {"v": value}


@pytest.mark.parametrize("content", ['{"v": NaN}', '{"v": [1e999]}', "{" * 10, "[" * 100_000])
def test_a_file_with_a_number_that_json_has_not_is_refused_before_anybody_is_asked(
    at: Run, gateway: FakeGateway, tmp_path: Path, content: str
) -> None:
    file = tmp_path / "p.json"
    file.write_text(content)
    done = at("action", "invoke", "hello", "-P", str(file))
    assert done.returncode != 0
    assert f"{file} is not JSON" in done.stderr
    assert gateway.asked == []


@pytest.mark.parametrize("words", [("--auth", "é€:x", "action", "list"), ("action", "get", "a\udcff")])
def test_what_cannot_be_written_in_a_request_is_not_taken_for_a_server_that_is_away(
    thaw: Run, gateway: FakeGateway, words: tuple[str, ...]
) -> None:
    done = thaw("--apihost", gateway.url, *(() if words[0] == "--auth" else ("--auth", KEY)), *words)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "is the platform up" not in done.stderr
    assert [asked.path.rpartition("/")[2] for asked in gateway.asked] in ([], ["a%FF"])


def test_parameters_on_the_line_override_those_of_a_file(at: Run, gateway: FakeGateway, tmp_path: Path) -> None:
    gateway.answers[f"POST {HERE}/actions/hello"] = (202, {"activationId": "b" * 32})
    (tmp_path / "p.json").write_text('{"name": "Ada", "n": 1}')
    at("action", "invoke", "hello", "-P", str(tmp_path / "p.json"), "-p", "name", "Bob", "-p", "list", "[1, 2]")
    assert gateway.asked[0].body == {"name": "Bob", "n": 1, "list": [1, 2]}


def test_a_name_with_package_and_namespace_becomes_a_path(at: Run, gateway: FakeGateway) -> None:
    gateway.answers["DELETE /api/v1/namespaces/guest/actions/tools/say%20it"] = (200, {})
    done = at("action", "delete", "/guest/tools/say it")
    assert done.stdout == "ok: deleted action /guest/tools/say it\n", done.stderr


def test_list_shows_kind_and_limits(at: Run, gateway: FakeGateway) -> None:
    listed = {"namespace": "guest", "name": "chat", "version": "0.0.2", "updated": 1_700_000_000_000}
    more = {"annotations": [{"key": "exec", "value": "llm:vllm"}], "limits": {"timeout": 300000, "memory": 2048}}
    gateway.answers[f"GET {HERE}/actions"] = (200, [listed | more])
    line = next(x for x in at("action", "list").stdout.splitlines() if "chat" in x)
    assert line.split()[:5] == ["/guest/chat", "0.0.2", "llm:vllm", "300000", "ms"]


def test_help_is_there_before_anything_heavy_is_imported() -> None:
    code = "import sys; import thaw.cli.main; print([m for m in ('requests', 'rich', 'redis', 'botocore') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_last_output_of_ended_containers_is_printed_with_why_they_ended(at: Run, gateway: FakeGateway) -> None:
    one = {"instance_id": "a" * 32, "host_id": "h0", "stage": 1, "n_stages": 2, "ended_wall_ms": 0}
    found = {"outputs": [{**one, "reason": "it [broke]", "stderr": "Traceback\n[x]"}], "unanswered": ["h1"]}
    gateway.answers[f"GET {HERE}/logs/chat"] = (200, found)
    done = at("action", "logs", "chat")
    assert "aaaaaaaaaaaa on h0, stage 1 of 2, ended " in done.stdout
    assert done.stdout.endswith("it [broke]\nTraceback\n[x]\n")
    assert "h1 did not answer" in done.stderr
    gateway.answers[f"GET {HERE}/logs/chat"] = (200, {"outputs": [], "unanswered": []})
    assert "no container of it has ended" in at("action", "logs", "chat").stderr


def test_notes_of_a_deploy_go_to_stderr_and_force_to_the_api(at: Run, gateway: FakeGateway, tmp_path: Path) -> None:
    config = tmp_path / "c.json"
    config.write_text(json.dumps(CONFIG))
    made = {"name": "chat", "version": "0.0.1"}
    path = f"PUT {HERE}/actions/chat"
    gateway.answers[path] = (200, {**made, "preflight": {"checked": True, "notes": ["the context is short"]}})
    done = at("action", "create", "chat", "--config", str(config))
    assert (done.returncode, done.stderr) == (0, "note: the context is short\n")
    assert "force" not in gateway.asked[-1].query
    refusal = {"code": "ModelUnsupported", "message": "no", "hint": ""}
    gateway.answers[path] = (200, {**made, "preflight": {"checked": True, "refusal": refusal}})
    done = at("action", "create", "chat", "--config", str(config), "--force")
    assert done.stderr == "note: deployed although it would not start: no\n"
    assert gateway.asked[-1].query["force"] == "true"
    gateway.answers[path] = (200, {**made, "preflight": {"checked": False, "reason": "no host", "notes": []}})
    done = at("action", "update", "chat", "--config", str(config))
    assert done.stderr == "note: the engine was not asked whether it can run this model: no host\n"
    gateway.answers[path] = (200, {**made, "preflight": {"checked": False, "reason": "no host", "later": True}})
    done = at("action", "update", "chat", "--config", str(config))
    assert done.stderr.endswith("no host; a host looks at it as soon as it can, and thaw action get shows the answer\n")


def test_a_deploy_that_waits_for_an_engine_says_so(at: Run, gateway: FakeGateway, tmp_path: Path) -> None:
    config = tmp_path / "c.json"
    config.write_text(json.dumps(CONFIG))
    gateway.answers[f"GET {HERE}/limits"] = (200, {"preflightSeconds": 20.0})
    gateway.answers[f"PUT {HERE}/actions/chat"] = (200, {"name": "chat", "version": "0.0.1"})
    gateway.held_until[f"PUT {HERE}/actions/chat"] = f"GET {HERE}/limits"
    done = at("action", "create", "chat", "--config", str(config))
    said = "checking: waiting for a free engine on a host to say whether the model would start, at most 20 s …\n"
    assert (done.returncode, done.stderr) == (0, said)


def test_a_list_shows_which_models_no_engine_has_looked_at(at: Run, gateway: FakeGateway) -> None:
    def row(name: str, **notes: str) -> dict[str, object]:
        annotations = [{"key": k.replace("_", "-"), "value": v} for k, v in notes.items()]
        return {"namespace": "guest", "name": name, "version": "0.0.1", "annotations": annotations}

    gateway.answers[f"GET {HERE}/actions"] = (200, [row("fine", exec="llm:vllm")])
    assert "check" not in at("action", "list").stdout
    found = [row("a", thaw_unchecked="no [cell]"), row("b", thaw_refused="would not start: no"), row("fine")]
    gateway.answers[f"GET {HERE}/actions"] = (200, found)
    listed = at("action", "list").stdout
    assert "unchecked: no [cell]" in listed
    assert "would not start: no" in listed
