"""Web actions over a real socket: the rights to call them, the function's arguments, and the answer."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests

from tests.conftest import ValkeyServer
from tests.gateway.conftest import CODE, KEY, GatewayProcess, pairs
from tests.security.slow import connect, head, module_gateway, read_answer

Ask = Callable[..., requests.Response]
PACKED = base64.b64encode(b"\x89PNG").decode()


@pytest.fixture(scope="module")
def gateway(_shared_valkey: ValkeyServer) -> Iterator[GatewayProcess]:
    """Serves actions of several kinds; each returns its arguments unless a test says otherwise."""
    kinds: dict[str, dict[str, Any]] = {
        "web": {},
        "raw": {"raw-http": True},
        "own": {"web-custom-options": True},
        "locked": {"require-whisk-auth": "open sesame"},
        "whisk": {"require-whisk-auth": True},
        "number": {"require-whisk-auth": 1.5},
        "final": {"final": True},
        "private": {"web-export": "true"},
    }
    with module_gateway(_shared_valkey.url) as process:
        for name, given in kinds.items():
            annotations = pairs(**{"web-export": True, **given})
            process.put_python(name, annotations=annotations, parameters=pairs(bound=1))
        process.serve(*kinds)
        yield process


@pytest.fixture
def ask(gateway: GatewayProcess) -> Ask:
    """Call a web action as a stranger; ``returns`` is the function's result instead of its arguments."""

    def call(method: str, name: str, *, returns: Any = None, **more: Any) -> requests.Response:
        gateway.invoker.function = lambda value: (200, value if returns is None else returns)
        return requests.request(method, f"{gateway.url}/api/v1/web/guest/default/{name}", timeout=30, **more)

    return call


def test_an_exported_action_is_called_without_a_key_and_gets_the_request(ask: Ask) -> None:
    reply = ask("POST", "web.json/a%20b/c?x=1&y=2&x=3", json={"y": 5}, headers={"X-Own": "z"})
    assert (reply.status_code, reply.headers["Content-Type"]) == (200, "application/json")
    assert len(reply.headers["X-Openwhisk-Activation-Id"]) == 32
    given = reply.json()
    assert given.items() >= {"bound": 1, "x": "3", "y": 5, "__ow_method": "post", "__ow_path": "/a%20b/c"}.items()
    assert given["__ow_headers"]["x-own"] == "z"
    assert "__ow_user" not in given


@pytest.mark.parametrize("name", ["private.json", "nothing.json"])
def test_what_is_not_exported_is_not_there(ask: Ask, name: str) -> None:
    reply = ask("GET", name)
    assert (reply.status_code, reply.json()["error"]) == (404, "The requested resource does not exist.")


def test_a_page_of_a_web_action_is_none_of_the_apis_origin(gateway: GatewayProcess, ask: Ask) -> None:
    """A browser runs its scripts without what it keeps for the API, whatever policy the function asks for."""
    own = {"Content-Security-Policy": "default-src 'self'", "Content-Type": "text/html"}
    answers = [
        ask("GET", "web.html", returns={"html": "<script>1</script>"}),
        ask("GET", "own.http", returns={"body": "<p>", "headers": own}),
        ask("OPTIONS", "web"),
        ask("GET", "missing"),
    ]
    for reply in answers:
        assert "sandbox allow-downloads" in reply.headers["Content-Security-Policy"]
        assert "allow-same-origin" not in reply.headers["Content-Security-Policy"]
    assert "default-src 'self'" in answers[1].headers["Content-Security-Policy"]
    assert "Content-Security-Policy" not in gateway.call("GET", "/api/v1/namespaces").headers


def test_another_namespaces_actions_are_not_reached_by_its_name(gateway: GatewayProcess, ask: Ask) -> None:
    for path in ("_/default/web", "other/default/web", "guest/nopkg/web", "guest/web", "guest/default/web%2Fx"):
        assert requests.get(f"{gateway.url}/api/v1/web/{path}", timeout=30).status_code == 404, path


@pytest.mark.parametrize("path", ["guest%2Fdefault/web", "a%2Fb%2Fc", "guest/default%2Fweb", "guest/", "//["])
def test_an_escaped_slash_parts_no_path(gateway: GatewayProcess, path: str) -> None:
    with connect(gateway) as sock:
        sock.sendall(head("GET", f"/api/v1/web/{path}", "Connection: close", auth=""))
        assert read_answer(sock)[0] == 404


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD"])
def test_every_method_reaches_the_function(ask: Ask, gateway: GatewayProcess, method: str) -> None:
    gateway.invoker.runs.clear()
    assert ask(method, "web.json").status_code == 200
    assert gateway.invoker.runs[0]["value"]["__ow_method"] == method.lower()


@pytest.mark.parametrize(
    ("data", "content_type", "given"),
    [
        (b"a=1&b=x+y", "application/x-www-form-urlencoded", {"a": "1", "b": "x y"}),
        (b'{"a": [1]}', "application/json; charset=utf-8", {"a": [1]}),
        (b'{"a": 1}', "application/vnd.x+json", {"a": 1}),
        (b"[1, 2]", "application/json", {"__ow_body": [1, 2]}),
        ("grüße".encode(), "text/plain", {"__ow_body": "grüße"}),
        (b"\x89PNG", "image/png", {"__ow_body": PACKED}),
        (b"\x89PNG", "multipart/form-data; boundary=x", {"__ow_body": PACKED}),
        (b"", "application/json", {}),
    ],
)
def test_a_body_is_read_by_its_type(ask: Ask, data: bytes, content_type: str, given: dict[str, Any]) -> None:
    got = ask("POST", "web.json", data=data, headers={"Content-Type": content_type}).json()
    assert {k: v for k, v in got.items() if k not in ("bound", "__ow_method", "__ow_headers", "__ow_path")} == given


def test_a_raw_action_gets_query_and_body_as_they_were_sent(ask: Ask) -> None:
    headers = {"Content-Type": "application/json"}
    got = ask("POST", "raw.json?x=1&__ow_path=2", data=b'{"name":"Jane"}', headers=headers).json()
    assert (got["__ow_query"], got["__ow_body"]) == ("x=1&__ow_path=2", "eyJuYW1lIjoiSmFuZSJ9")
    assert "x" not in got
    assert ask("POST", "raw.json", data=b"plain", headers={"Content-Type": "text/plain"}).json()["__ow_body"] == "plain"
    assert ask("GET", "raw.json").json()["__ow_body"] == ""


@pytest.mark.parametrize("name", ["__ow_method", "__ow_headers", "__ow_path", "__ow_user", "__ow_query", "__ow_body"])
def test_a_reserved_name_is_refused_in_query_and_body(ask: Ask, name: str) -> None:
    for reply in (ask("GET", f"web.json?{name}=x"), ask("POST", "web.json", json={name: 1})):
        assert reply.status_code == 400
        assert reply.json()["error"].startswith("Request defines parameters that are not allowed")


def test_a_bound_parameter_is_replaced_unless_the_action_is_final(ask: Ask) -> None:
    assert ask("GET", "web.json?bound=2").json()["bound"] == "2"
    assert ask("GET", "final.json?bound=2").status_code == 400
    assert ask("GET", "final.json?other=2").json()["other"] == "2"


def test_a_secret_or_a_key_opens_an_action_that_requires_it(ask: Ask) -> None:
    assert ask("GET", "locked.json").status_code == 401
    assert ask("GET", "locked.json", headers={"X-Require-Whisk-Auth": "wrong"}).status_code == 401
    assert ask("GET", "locked.json", headers={"X-Require-Whisk-Auth": "open sesame"}).status_code == 200
    assert ask("GET", "whisk.json").status_code == 401
    user, _, secret = KEY.partition(":")
    opened = ask("GET", "whisk.json", auth=(user, secret))
    assert (opened.status_code, opened.json()["__ow_user"]) == (200, "guest")
    assert "authorization" not in opened.json()["__ow_headers"], "a key is not for a function"
    theirs = ask("GET", "web.json", auth=("ada", "of the function's own users")).json()
    assert "authorization" in theirs["__ow_headers"]
    assert "__ow_user" not in theirs


def test_a_number_is_a_secret_and_what_is_none_is_refused_when_it_is_written(ask: Ask, gateway: GatewayProcess) -> None:
    assert ask("GET", "number.json").status_code == 401
    assert ask("GET", "number.json", headers={"X-Require-Whisk-Auth": "1.5"}).status_code == 200
    for wanted in ([], {}, None, ["secret"]):
        notes = pairs(**{"web-export": True, "require-whisk-auth": wanted})
        refused = gateway.put("actions/never", 400, exec=CODE, annotations=notes)
        assert "require-whisk-auth must be true, false, a string or a number" in refused["error"], wanted


def test_options_are_answered_here_unless_the_action_wants_them(ask: Ask, gateway: GatewayProcess) -> None:
    gateway.invoker.runs.clear()
    preflight = ask("OPTIONS", "web.json", headers={"Access-Control-Request-Headers": "x-own"})
    assert (preflight.status_code, gateway.invoker.runs) == (200, [])
    assert preflight.headers["Access-Control-Allow-Headers"] == "x-own"
    assert preflight.headers["Access-Control-Allow-Methods"] == "OPTIONS, GET, DELETE, POST, PUT, HEAD, PATCH"
    returns = {"statusCode": 299, "headers": {"Access-Control-Allow-Origin": "https://a.example"}}
    own = ask("OPTIONS", "own", returns=returns)
    assert (own.status_code, own.headers["Access-Control-Allow-Origin"]) == (299, "https://a.example")
    assert "Access-Control-Allow-Methods" not in own.headers
    assert ask("GET", "web", returns=returns).headers["Access-Control-Allow-Origin"] == "https://a.example"
    assert ask("GET", "web").headers["Access-Control-Allow-Origin"] == "*"


HTTP = "Response is not valid 'message/http'."
FRAMING = {"Content-Length": "999", "Transfer-Encoding": "chunked"}
OTHER_TYPE = "Response type in header did not match generated content type."
NO_TYPE = "Response did not specify a known content-type."


@pytest.mark.parametrize(
    ("name", "returns", "status", "content_type", "body"),
    [
        ("web", {"body": "hi"}, 200, "text/html; charset=UTF-8", "hi"),
        ("web.http", {"statusCode": 201, "body": {"a": 1}}, 201, "application/json", '{"a":1}'),
        ("web", {"body": [1], "headers": {"content-type": "application/x+json"}}, 200, "application/x+json", "[1]"),
        ("web", {"body": PACKED, "headers": {"Content-Type": "image/png"}}, 200, "image/png", "\x89PNG"),
        ("web", {"body": "<svg/>", "headers": {"Content-Type": "text/xml"}}, 200, "text/xml; charset=UTF-8", "<svg/>"),
        ("web", {}, 204, None, ""),
        ("web", {"body": "", "statusCode": "404"}, 404, None, ""),
        ("web", {"statusCode": 302, "headers": {"location": "/x"}}, 302, None, ""),
        ("web", {"error": {"statusCode": 418, "body": "tea"}}, 418, "text/html; charset=UTF-8", "tea"),
        ("web", {"error": "boom"}, 400, "application/json", HTTP),
        ("web", {"statusCode": 1000}, 400, "application/json", HTTP),
        ("web", {"statusCode": 100}, 400, "application/json", HTTP),
        ("web", {"statusCode": "9" * 5000}, 400, "application/json", HTTP),
        ("web", {"statusCode": 10**400}, 400, "application/json", HTTP),
        ("web", {"statusCode": 200.5}, 400, "application/json", HTTP),
        ("web", {"headers": {"a b": "c"}}, 400, "application/json", HTTP),
        ("web", {"headers": {"a": "b\r\nSet-Cookie: c"}}, 400, "application/json", HTTP),
        ("web", {"headers": FRAMING, "body": "hi"}, 200, "text/html; charset=UTF-8", "hi"),
        ("web", {"body": "%", "headers": {"Content-Type": "image/png"}}, 400, "application/json", OTHER_TYPE),
        ("web", {"body": {}, "headers": {"Content-Type": "text/html"}}, 400, "application/json", OTHER_TYPE),
        ("web", {"body": "x", "headers": {"Content-Type": "nonsense"}}, 400, "application/json", NO_TYPE),
        ("web.json", [1, {"a": 2}], 200, "application/json", '[1,{"a":2}]'),
        ("web.json", {"error": {"code": 7}}, 200, "application/json", '{"code":7}'),
        ("web.json", {"error": "boom"}, 400, "application/json", "Response is not valid 'application/json'."),
        ("web.html", {"html": "<b>"}, 200, "text/html; charset=UTF-8", "<b>"),
        ("web.html", {"body": 5}, 400, "application/json", "Response is not valid 'text/html'."),
        ("web.svg", {"svg": "<svg/>"}, 200, "image/svg+xml; charset=UTF-8", "<svg/>"),
        ("web.text", {"text": "hi"}, 200, "text/plain; charset=UTF-8", "hi"),
        ("web.text", {"body": True}, 200, "text/plain; charset=UTF-8", "true"),
        ("web.text", {"other": 1}, 404, "application/json", "Response does not include requested property."),
    ],
)
def test_a_result_becomes_what_the_extension_says(
    ask: Ask, name: str, returns: Any, status: int, content_type: str | None, body: str
) -> None:
    reply = ask("GET", name, returns=returns, allow_redirects=False)
    text = reply.json()["error"] if "error" in reply.text else reply.content.decode("latin-1")
    assert (reply.status_code, reply.headers.get("Content-Type"), text) == (status, content_type, body)


def test_a_list_of_values_is_several_headers(ask: Ask) -> None:
    reply = ask("GET", "web", returns={"headers": {"Set-Cookie": ["a=1", "b=2"], "X-N": 3, "X-B": True}})
    assert reply.raw.headers.getlist("Set-Cookie") == ["a=1", "b=2"]
    assert (reply.headers["X-N"], reply.headers["X-B"]) == ("3", "true")


def test_an_answer_has_the_gateway_s_date_and_server_once(ask: Ask) -> None:
    theirs = {"Date": "Thu, 01 Jan 1970 00:00:00 GMT", "server": "mine"}
    headers = ask("GET", "web", returns={"headers": theirs, "body": "hi"}).raw.headers
    for name, text in theirs.items():
        (one,) = headers.getlist(name)
        assert one != text


def test_an_error_of_the_developer_is_a_400_and_the_record_says_why(ask: Ask, gateway: GatewayProcess) -> None:
    ask("GET", "web")
    gateway.invoker.function = lambda value: (502, {"error": "secret reason"})
    reply = requests.get(f"{gateway.url}/api/v1/web/guest/default/web", timeout=30)
    assert (reply.status_code, reply.json()["error"]) == (400, "There was an error processing your request.")
    record = gateway.record(reply)
    assert record["response"]["result"] == {"error": "secret reason"}
    assert record["namespace"] == "guest"


def test_a_body_beyond_the_limit_is_413_before_it_is_sent(ask: Ask) -> None:
    reply = ask("POST", "web.json", data=b"x" * 1_100_000)
    assert reply.status_code == 413


def test_a_long_body_of_a_stranger_reaches_the_function(ask: Ask) -> None:
    text = "x" * 300_000
    assert ask("POST", "web.json", data=text, headers={"Content-Type": "text/plain"}).json()["__ow_body"] == text
    missing = ask("POST", "nothing.json", data=text, headers={"Content-Type": "text/plain"})
    assert missing.status_code == 404
