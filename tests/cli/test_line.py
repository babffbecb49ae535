"""The line itself: options that stand anywhere, unknown commands, wrong API hosts, tables and JSON, completion."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import KEY, Run
from tests.cli.fake_gateway import HERE, FakeGateway
from tests.invoker.test_relay_socket import certificate
from thaw.cli.platform_api.property_file import normal_apihost

ONE = {"name": "b", "namespace": "guest", "version": "0.0.1", "annotations": [], "limits": {}}
TWO = {**ONE, "name": "a"}


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[FakeGateway]:
    """An https server that lists one namespace.  Its certificate, ``relay.pem``, is signed by its own key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate(tmp_path))
    with FakeGateway({"GET /api/v1/namespaces": (200, ["guest"])}, tls=context) as served:
        yield served


def test_a_private_certificate_is_taken_with_its_signer_or_with_i(thaw: Run, tls: FakeGateway, tmp_path: Path) -> None:
    words = ("namespace", "list", "--apihost", tls.url, "--auth", KEY)
    refused = thaw(*words)
    assert refused.returncode == 3
    assert "SSL_CERT_FILE=ca.pem" in refused.stderr
    assert thaw(*words, env={"SSL_CERT_FILE": str(tmp_path / "relay.pem")}).stdout == "namespaces\nguest\n"
    taken = thaw("-i", *words)
    assert (taken.stdout, taken.stderr) == ("namespaces\nguest\n", "")


def test_a_wrong_scheme_is_told_with_the_right_one(thaw: Run, tls: FakeGateway, gateway: FakeGateway) -> None:
    bare = gateway.url.partition("://")[2]
    done = thaw("namespace", "list", "--apihost", f"https://{bare}", "--auth", KEY)
    assert (done.returncode, done.stderr) == (
        3,
        f"error: https://{bare} does not speak https\nhint: thaw property set --apihost http://{bare}\n",
    )
    done = thaw("namespace", "list", "--apihost", tls.url.replace("https", "http"), "--auth", KEY)
    assert done.returncode == 3
    assert f"if it speaks https: thaw property set --apihost {tls.url}" in done.stderr


@pytest.mark.parametrize("path", ["/api/v1", "/api/v1/", "/api", "/v1", ""])
def test_the_path_of_the_api_is_no_part_of_the_host(path: str) -> None:
    assert normal_apihost(f"https://a.example/thaw{path}") == "https://a.example/thaw"


def test_a_page_that_is_no_api_is_said_to_be_none(at: Run, gateway: FakeGateway) -> None:
    gateway.answers["GET /api/v1/namespaces"] = (200, b"<html>hello</html>")
    done = at("namespace", "list")
    assert done.returncode == 3
    assert "but not as the API of a platform" in done.stderr


def test_options_of_the_line_may_stand_anywhere_but_in_a_parameter_s_value(thaw: Run, gateway: FakeGateway) -> None:
    gateway.answers[f"POST {HERE}/actions/x"] = (202, {"activationId": "b" * 32})
    line = ["-i", "--apihost", gateway.url, "action", "invoke", "x", "-p", "flag", "-v", "-u", KEY, "-p", "-d", "1"]
    done = thaw(*line)
    assert (done.returncode, done.stderr) == (0, "")
    assert gateway.asked[-1].body == {"flag": "-v", "-d": 1}


@pytest.mark.parametrize("option", ["-v", "--verbose", "-d"])
def test_requests_and_answers_are_told_on_stderr_without_the_key(at: Run, gateway: FakeGateway, option: str) -> None:
    gateway.answers["GET /api/v1/namespaces"] = (200, ["guest"])
    done = at("namespace", "list", option)
    assert done.stdout == "namespaces\nguest\n"
    assert f"[GET]\t{gateway.url}/api/v1/namespaces\n" in done.stderr
    assert "RESPONSE:Got response with code 200\n" in done.stderr
    assert '["guest"]' in done.stderr
    assert KEY not in done.stderr
    assert "Basic" not in done.stderr


def test_debug_says_where_an_error_comes_from(at: Run) -> None:
    assert "Traceback" in at("action", "get", "x", "-d").stderr
    assert "Traceback" not in at("action", "get", "x", "-v").stderr


@pytest.mark.parametrize(
    ("words", "called"),
    [
        ("api create /hello get hello", "there is no API gateway here"),
        ("project deploy", "thaw action update NAME FILE.py"),
        ("sdk install bashauto", "thaw completion bash"),
        ("acton list", "did you mean thaw action?"),
        ("action lst", "did you mean thaw action list?"),
        ("action ls", "thaw action list"),
        ("package refresh", "thaw package bind"),
        ("xyzzy", "thaw --help lists what there is"),
    ],
)
def test_an_unknown_command_says_what_it_is_called_here(thaw: Run, words: str, called: str) -> None:
    done = thaw(*words.split())
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no command thaw ")
    assert called in done.stderr.splitlines()[1]


def test_a_call_that_outlasts_its_patience_ends_with_wsk_s_code(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[f"POST {HERE}/actions/x"] = (202, {"activationId": "b" * 32})
    done = at("action", "invoke", "x", "--blocking")
    assert done.stdout == f"ok: invoked x, but the request has not yet finished, with id {'b' * 32}\n"
    assert done.returncode == 202


def test_lists_are_tables_or_json_and_sorted_by_name_if_asked(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[f"GET {HERE}/actions"] = (200, [ONE, TWO])
    assert json.loads(at("action", "list", "--json").stdout) == [ONE, TWO]
    assert json.loads(at("--json", "action", "list", "--name-sort").stdout) == [TWO, ONE]
    table = at("action", "list", "-n").stdout
    assert table.index("/guest/a") < table.index("/guest/b")


def test_a_table_of_numbers_from_several_answers_is_json_by_its_columns(at: Run, gateway: FakeGateway) -> None:
    row = {"namespace": "guest", "keys": 1, "actions": 2, "activations": 3, "instances": 4}
    gateway.answers["GET /api/v1/thaw/namespaces"] = (200, {"namespaces": [row]})
    assert json.loads(at("namespace", "usage", "--json").stdout) == [{name: str(row[name]) for name in row}]
    assert ["guest", "1", "2", "3", "4"] in [line.split() for line in at("namespace", "usage").stdout.splitlines()]


def test_a_namespace_s_entities_are_listed_kind_by_kind(at: Run, gateway: FakeGateway) -> None:
    for kind, found in (("packages", []), ("actions", [ONE, TWO]), ("triggers", []), ("rules", [])):
        gateway.answers[f"GET {HERE}/{kind}"] = (200, found)
    expected = "Entities in namespace: default\npackages\nactions\n/guest/b\n/guest/a\ntriggers\nrules\n"
    assert at("namespace", "get").stdout == expected
    assert at("list").stdout == expected
    assert {a.query["limit"] for a in gateway.asked} == {"0"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_s_script_completes_commands_and_options(thaw: Run, shell: str) -> None:
    assert "_THAW_COMPLETE" in thaw("completion", shell).stdout
    asked = {"_THAW_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    line = {"COMP_WORDS": "thaw action up", "COMP_CWORD": "2", "_TYPER_COMPLETE_ARGS": "thaw action up"}
    assert "update" in thaw(env=asked | line).stdout


def test_an_unknown_shell_is_named(thaw: Run) -> None:
    assert "there is no completion for 'cmd'" in thaw("completion", "cmd").stderr


def test_values_of_parameters_are_no_options_whatever_they_look_like(at: Run, gateway: FakeGateway) -> None:
    gateway.answers[f"POST {HERE}/actions/x"] = (202, {"activationId": "a" * 32})
    words = ("-p", "flag", "--key=abc", "-p", "--auth", "me", "-p", "--cert", "--", "-p", "-v", "-iv")
    assert at("action", "invoke", "x", *words).returncode == 0
    assert gateway.asked[-1].body == {"flag": "--key=abc", "--auth": "me", "--cert": "--", "-v": "-iv"}
    assert gateway.asked[-1].authorization.startswith("Basic ")


@pytest.mark.parametrize(
    "words", [("-iv", "action", "list"), ("action", "list", "-vi"), ("-vu", KEY, "action", "list")]
)
def test_several_letters_in_one_word_are_all_taken(at: Run, gateway: FakeGateway, words: tuple[str, ...]) -> None:
    gateway.answers[f"GET {HERE}/actions"] = (200, [])
    done = at(*words)
    assert done.returncode == 0
    assert "REQUEST:" in done.stderr
