"""A tenant runs a model that is not its own, or has the platform's credentials sent where they do not belong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests

from relay.protocol.messages import InspectModel, Start, StartFailed
from relay.state.allowed_models import AllowedModels
from tests.fetchd.harness import Fetchd, write_model
from tests.gateway.conftest import OPERATOR_KEY, ROOT, GatewayProcess, gateway, start_gateway
from tests.scheduler.conftest import Platform, platform
from thaw.errors import BadRequest, Forbidden, ModelNotFound
from thaw.ids import GroupId, Namespace
from thaw.model_uri import ModelUri, policy_of
from thaw.settings import SettingError

__all__ = ["gateway", "platform", "start_gateway"]

ACTIONS = "/api/v1/namespaces/_/actions"
POLICY = policy_of("s3://models, https://Store.Example:443/a, file:///srv/models/, https://v6.example:8443")
MAY = [
    *("s3://models/x", "s3://models/x/", "S3://models/x", "s3://models/a%20b/c"),
    *("https://store.example/a/b", "HTTPS://STORE.EXAMPLE:443/a", "https://store.example./a", "file:///srv/models/x"),
    "https://v6.example:8443/x",
]
MAY_NOT = [
    *("s3://models-evil/x", "s3://model/x", "s3://MODELS/x", "s3://other/models", "https://store.example:444/a"),
    *("https://store.example/ab", "https://store.example/", "https://store.example.evil/a", "http://store.example/a"),
    *("https://store.exampl/a", "file:///srv/models-evil", "file:///srv"),
    *("zip:///srv/models/x", "ftp://models/x", "https://v6.example/x", "s3://xn--models/x"),
]
NO_URI = [
    *("s3://models", "s3://models/", "file:///", "file:////srv/models/x", "s3://models//x", "s3://models/x//y"),
    *("s3://models/../other/x", "s3://models/%2e%2e/x", "s3://models/%2E./x", "s3://models/.", "s3:///x"),
    *("s3://a@models/x", "s3://models:80/x", "s3://models/x?y", "s3://models/x#y", "s3://models\\evil/x"),
    *("s3://models%2f/x", "s3://models/x%2f..%2fy", "s3://models/x%5cy", "s3://models/%zz", "s3://models/%00"),
    *("s3://models/%c0%ae%c0%ae", "s3://../x", "s3://.models/x", "https://evil@store.example/a"),
    *("https://u:p@store.example/a", "https:///a", "https://store.example:/a", "https://store.example:999999/a"),
    *("http://[bad", "file://host/srv/models", "nonsense", "models/x", "https://store.exämple/a"),
    *("file:///srv/models/../x", " s3://models/x", "s3://models/x\n", "s3://mo\tdels/x"),
]


@pytest.mark.parametrize("uri", MAY)
def test_what_is_below_a_prefix_may_be_run_however_it_is_written(uri: str) -> None:
    POLICY.check("guest", uri, ())


@pytest.mark.parametrize("uri", MAY_NOT)
def test_what_only_looks_as_if_it_were_below_a_prefix_may_not_be_run(uri: str) -> None:
    with pytest.raises(Forbidden):
        POLICY.check("guest", uri, ())


@pytest.mark.parametrize("uri", NO_URI)
def test_what_a_store_could_read_in_another_way_is_no_uri(uri: str) -> None:
    with pytest.raises(BadRequest):
        POLICY.check("guest", uri, ("s3://", "file://", "https://", "http://"))


def test_a_prefix_without_a_place_allows_every_place_of_its_scheme_and_no_other() -> None:
    policy = policy_of("s3://")
    policy.check("guest", "s3://any-bucket/x", ())
    for uri in ("file:///x", "https://any.example/x"):
        with pytest.raises(Forbidden):
            policy.check("guest", uri, ())
    with pytest.raises(Forbidden, match="what is below nothing .THAW_MODELS"):
        policy_of("").check("guest", "s3://models/x", ())


@pytest.mark.parametrize(
    ("prefix", "may", "may_not"),
    [
        ("hf://org", ["hf://org/a", "hf://org/a@v1", "HF://org/a@refs/pr/1"], ["hf://org-evil/a", "hf://ORG/a"]),
        ("hf://org/a/", ["hf://org/a", "hf://org/%61%40v1"], ["hf://org/ab", "hf://org/b", "hf://a/org"]),
        ("hf://org/a@main", ["hf://org/a", "hf://org/a@main"], ["hf://org/a@v1", "hf://org/a@main2"]),
        ("hf://", ["hf://any/model"], ["s3://any/model"]),
    ],
)
def test_a_prefix_of_a_hub_is_an_organisation_a_model_or_a_revision(
    prefix: str, may: list[str], may_not: list[str]
) -> None:
    policy = policy_of(prefix)
    for uri in may:
        policy.check("guest", uri, ())
    for uri in may_not:
        with pytest.raises(Forbidden):
            policy.check("guest", uri, ())
    for rest in ("org", "/a", "org/a/b", "org/a@", "org/@v1", "org/a@v1@v2", "org/a@-x"):
        with pytest.raises(BadRequest):
            policy.check("guest", f"hf://{rest}", ())


@pytest.mark.parametrize("text", ["models", "s3://a/../b", "s3://models; file:///x y?", "https://u@h/"])
def test_a_prefix_that_cannot_be_read_stops_the_start_with_the_settings_name(text: str) -> None:
    with pytest.raises(SettingError, match="THAW_MODELS"):
        policy_of(text)


@pytest.mark.parametrize("module", ["gateway.main", "gateway.scheduler.loop"])
def test_a_gateway_and_a_scheduler_with_such_a_setting_do_not_start(module: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "THAW_MODELS": "models", "THAW_STATE_URL": "redis://127.0.0.1:1/0"}
    done = subprocess.run([sys.executable, "-m", module], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "THAW_MODELS: 'models' is not a model's uri" in done.stderr
    assert module != "gateway.main" or "Traceback" not in done.stderr


# deploying -------------------------------------------------------------------------------------------------------------


def config(uri: str) -> dict[str, Any]:
    return {"kind": "llm:vllm", "model": {"uri": uri}}


def deploy(gateway: GatewayProcess, uri: str, name: str = "m", overwrite: bool = True) -> requests.Response:
    return gateway.call("PUT", f"{ACTIONS}/{name}?overwrite={str(overwrite).lower()}", json={"config": config(uri)})


def as_operator(gateway: GatewayProcess, method: str, namespace: str, **body: Any) -> requests.Response:
    path = f"{gateway.url}/api/v1/thaw/namespaces/{namespace}/models"
    headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
    return requests.request(method, path, headers=headers, json=body or None, timeout=30)


FOREIGN = ["s3://models-evil/x", "s3://team-b/x", "file:///etc", "http://127.0.0.1:6379/", "https://public.example/m"]


def test_a_model_that_nobody_allowed_is_refused_when_it_is_deployed(gateway: GatewayProcess) -> None:
    for uri in FOREIGN:
        refused = deploy(gateway, uri)
        assert refused.status_code == 403, refused.text
        assert uri in refused.json()["error"]
        assert "THAW_MODELS" in refused.json()["hint"]
        assert "thaw namespace allow-models guest" in refused.json()["hint"]
    for uri in ("s3://models/../team-b/x", "s3://models/%2e%2e/team-b", "file:///srv/../etc"):
        assert deploy(gateway, uri).status_code == 400
    assert gateway.call("GET", ACTIONS).json() == []


def test_neither_an_update_nor_the_config_as_code_leads_past_it(gateway: GatewayProcess) -> None:
    assert deploy(gateway, "s3://models/x").status_code == 200
    assert deploy(gateway, "s3://team-b/x").status_code == 403
    as_code = {"exec": {"kind": "llm:vllm", "code": json.dumps(config("s3://team-b/x"))}}
    for name in ("m", "n"):
        assert gateway.call("PUT", f"{ACTIONS}/{name}?overwrite=true", json=as_code).status_code == 403
    found = gateway.call("GET", f"{ACTIONS}/m").json()
    assert (found["config"]["model"]["uri"], found["version"]) == ("s3://models/x", "0.0.1")


def test_an_operator_allows_one_namespace_more_and_takes_it_back(gateway: GatewayProcess) -> None:
    added = as_operator(gateway, "PUT", "guest", prefixes=["s3://team-a/", "s3://team-a/", "https://store.example"])
    assert added.json() == {
        "namespace": "guest",
        "for_all": ["s3://models"],
        "own": ["s3://team-a/", "https://store.example"],
    }
    assert deploy(gateway, "s3://team-a/x").status_code == 200
    assert deploy(gateway, "s3://team-a-evil/x").status_code == 403
    assert as_operator(gateway, "GET", "other").json()["own"] == []
    assert as_operator(gateway, "DELETE", "guest", prefixes=["s3://team-a/"]).json()["own"] == ["https://store.example"]
    changed = gateway.call("PUT", f"{ACTIONS}/m?overwrite=true", json={"annotations": []})
    assert changed.status_code == 403, "an action with a model that is not allowed any more cannot be changed either"
    for prefixes in ([], "s3://x", [1], ["models"], ["s3://a/../b"], ["s3://a,file://"]):
        assert as_operator(gateway, "PUT", "guest", prefixes=prefixes).status_code == 400


# starting --------------------------------------------------------------------------------------------------------------


def test_a_start_does_not_use_what_was_taken_back(
    platform: Platform, start_gateway: Callable[..., GatewayProcess]
) -> None:
    """The model was allowed when it was deployed, and it ran.  The same holds for a scheduler that starts later."""
    gateway = start_gateway()
    assert as_operator(gateway, "PUT", "guest", prefixes=["s3://team-a"]).status_code == 200
    host = platform.host()
    platform.scheduler(THAW_MODELS="s3://models")
    assert deploy(gateway, "s3://team-a/x", "chat").status_code == 200
    served = platform.ask("guest/chat")
    host.commands.wait(Start)
    platform.served(served, "guest/chat")
    looks = len(host.commands.of(InspectModel))
    assert as_operator(gateway, "DELETE", "guest", prefixes=["s3://team-a"]).status_code == 200
    host.lose_all()
    platform.ask("guest/chat")
    (failed,) = platform.events.wait(StartFailed)
    assert failed.error.code == "Forbidden"
    assert "s3://models (THAW_MODELS)" in failed.error.message
    assert "thaw namespace allow-models guest" in failed.error.hint
    platform.schedulers[0].kill()
    platform.schedulers[0].wait(60)
    platform.scheduler(THAW_MODELS="s3://models")
    platform.ask("guest/chat")
    assert platform.events.wait(StartFailed, 2)[1].error.code == "Forbidden"
    assert len(host.commands.of(Start)) == 1
    assert len(host.commands.of(InspectModel)) == looks, "nobody even looks at it"
    assert as_operator(gateway, "PUT", "guest", prefixes=["s3://team-a"]).status_code == 200
    platform.ask("guest/chat")
    host.commands.wait(Start, 2)


def test_who_takes_a_prefix_back_and_ends_right_after_has_taken_it_back(platform: Platform) -> None:
    """The gateway writes the change and tells the schedulers in one step, so it cannot die in between."""
    allowed = AllowedModels(platform.client)
    allowed.add(Namespace("guest"), ["file:///m"])
    host = platform.host()
    platform.scheduler(THAW_MODELS="")
    platform.llm()
    served = platform.ask("guest/chat")
    host.commands.wait(Start)
    platform.served(served, "guest/chat")
    allowed.remove(Namespace("guest"), ["file:///m"])
    host.lose_all()
    platform.ask("guest/chat")
    (failed,) = platform.events.wait(StartFailed)
    assert failed.error.code == "Forbidden"
    allowed.add(Namespace("guest"), ["file:///m"])
    platform.ask("guest/chat")
    host.commands.wait(Start, 2)


# files -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A directory of models, and secrets beside it."""
    for name in ("models/good", "models-evil/m", "models/half", "secret"):
        write_model(tmp_path / name)
    models, secret = tmp_path / "models", tmp_path / "secret"
    for name, target in (
        ("link", secret),
        ("up", ".."),
        ("inside", "good"),
        ("half/tokenizer.json", secret / "tokenizer.json"),
        ("half/model.safetensors", "../../secret/model.safetensors"),
    ):
        (models / name).unlink(missing_ok=True)
        (models / name).symlink_to(target)
    return tmp_path


def test_files_are_read_below_the_roots_only_whatever_links_there_are(shelf: Path) -> None:
    with Fetchd(shelf, THAW_FETCHD_FILE_ROOTS=f"{shelf}/nothing:{shelf}/models") as fetchd:
        for name in ("models/good", "models/inside", "models/good/"):
            assert fetchd.client.inspect(f"file://{shelf}/{name}").n_layers == 3
        outside = ("models-evil/m", "secret", "models/link", "models/up/secret", "models/half", "no/such/thing")
        for name in (*outside, "models/../secret", "models/%2e%2e/secret", "models/up/models/../../secret"):
            with pytest.raises(ModelNotFound) as told:
                fetchd.client.inspect(f"file://{shelf}/{name}")
            if name in ("secret", "models/link", "no/such/thing"):
                assert told.value.message == f"file://{shelf}/{name}: this host serves no model there"
                assert "THAW_FETCHD_FILE_ROOTS" in told.value.hint


def test_no_file_is_read_without_a_root(shelf: Path) -> None:
    with Fetchd(shelf, THAW_FETCHD_FILE_ROOTS="") as fetchd, pytest.raises(ModelNotFound, match="no model there"):
        fetchd.client.inspect(f"file://{shelf}/models/good")


def test_a_link_that_is_changed_after_the_inspection_leads_nowhere(shelf: Path) -> None:
    with Fetchd(shelf, THAW_FETCHD_FILE_ROOTS=f"{shelf}/models") as fetchd:
        facts = fetchd.client.inspect(f"file://{shelf}/models/good")
        weights = shelf / "models" / "good" / "model.safetensors"
        weights.unlink()
        weights.symlink_to(shelf / "secret" / "model.safetensors")
        fetchd.start(facts)
        with pytest.raises(ModelNotFound, match="this host serves no model there"):
            fetchd.client.wait(GroupId("g"), 0, deadline_s=20)


# credentials -----------------------------------------------------------------------------------------------------------


class Recording:
    """A store without models that notes the key with which each request was signed."""

    def __init__(self) -> None:
        self.signed_by: list[str] = []
        recording = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                sent = self.headers.get("Authorization", "")
                recording.signed_by.append(sent.partition("Credential=")[2].partition("/")[0] or sent)
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_HEAD

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self) -> set[str]:
        found, self.signed_by = set(self.signed_by), []
        return found


OWN = {
    "AWS_ACCESS_KEY_ID": "PLATFORM",
    "AWS_SECRET_ACCESS_KEY": "s",
    "AWS_SESSION_TOKEN": "",
    "AWS_REGION": "us-east-1",
}


def test_credentials_go_where_their_prefix_says_and_nowhere_else(tmp_path: Path) -> None:
    own, theirs = Recording(), Recording()
    table = [
        {"prefix": "s3://team-a", "endpoint": theirs.url, "key_id": "TEAM-A", "secret": "s"},
        {"prefix": "s3://models/team-b", "key_id": "TEAM-B", "secret": "s"},
        {"prefix": "s3://models/public", "anonymous": True},
    ]
    (tmp_path / "table").write_text(json.dumps(table))
    settings = {"THAW_FETCHD_CREDENTIALS": tmp_path / "table", "THAW_FETCHD_OWN_STORE": "s3://models", **OWN}
    with closing(own), closing(theirs), Fetchd(tmp_path, THAW_S3_ENDPOINT=own.url, **settings) as fetchd:
        for uri, at_own, at_theirs in (
            ("s3://models/m", {"PLATFORM"}, set()),
            ("s3://models-evil/m", {""}, set()),
            ("s3://somebody-elses/m", {""}, set()),
            ("s3://models/team-b/m", {"TEAM-B"}, set()),
            ("s3://models/team-bc/m", {"PLATFORM"}, set()),
            ("s3://models/public/m", {""}, set()),
            ("s3://team-a/m", set(), {"TEAM-A"}),
            ("s3://team-ab/m", {""}, set()),
            (f"{theirs.url}/models/m", set(), {""}),
            (f"{own.url}/models/m", {""}, set()),
            ("s3://models/../m", set(), set()),
        ):
            with pytest.raises(ModelNotFound):
                fetchd.client.inspect(uri)
            assert (own.take(), theirs.take()) == (at_own, at_theirs), uri
        assert not any(secret in str(fetchd.events) for secret in ("TEAM-A", "PLATFORM"))


@pytest.mark.parametrize(
    "table",
    [
        "nonsense",
        '{"prefix": "s3://a"}',
        '[{"prefix": "s3://a"}]',
        '[{"prefix": "s3://a", "key_id": "SECRET-1"}]',
        '[{"prefix": "s3://a", "key_id": "SECRET-1", "secret": "SECRET-2", "anonymous": true}]',
        '[{"prefix": "https://h/", "key_id": "SECRET-1", "secret": "SECRET-2"}]',
        '[{"prefix": "s3://a/../b", "profile": "p"}]',
        '[{"prefix": "s3://a", "key_id": "SECRET-1", "secret": 7}]',
    ],
)
def test_a_table_of_credentials_that_is_wrong_stops_the_start_and_is_not_repeated(tmp_path: Path, table: str) -> None:
    (tmp_path / "table").write_text(table)
    with Fetchd(tmp_path, THAW_FETCHD_CREDENTIALS=tmp_path / "table") as fetchd:
        assert fetchd.events[-1]["event"] == "start_failed"
        assert "THAW_FETCHD_CREDENTIALS" in fetchd.events[-1]["error"]
        assert "SECRET" not in str(fetchd.events)


def test_a_uri_is_compared_by_its_parts() -> None:
    assert ModelUri.parse("HTTPS://A.example.:443/a%20b/c//") == ModelUri("https", "a.example", ("a b", "c"))
