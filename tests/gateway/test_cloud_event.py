"""CloudEvents: the requests that are events, the function's arguments for them, and the answers that are events."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.openwhisk.cloud_event import (
    FIELD,
    Event,
    EventAnswer,
    Mode,
    answer,
    arguments,
    body_of,
    from_binary,
    from_structured,
    mode_of,
)
from thaw.errors import BadRequest, UnsupportedType

NEEDED = {"specversion": "1.0", "id": "7", "source": "/tests", "type": "order.made"}
HEADERS = [(f"Ce-{name.title()}", value) for name, value in NEEDED.items()]


def structured(**fields: Any) -> Event:
    return from_structured(json.dumps({**NEEDED, **fields}).encode())


def binary(body: bytes = b"", content_type: str = "", **attributes: str) -> Event:
    headers = [("Host", "x"), *HEADERS, *((f"ce-{name}", value) for name, value in attributes.items())]
    return from_binary(headers, content_type, body)


def answered(mode: Mode, result: Any) -> EventAnswer:
    made = answer(result, mode, event_id="a1", source="/guest/f")
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("media_type", "has_version", "mode"),
    [
        ("application/cloudevents+json", False, Mode.STRUCTURED),
        ("application/cloudevents+json", True, Mode.STRUCTURED),
        ("application/json", True, Mode.BINARY),
        ("", True, Mode.BINARY),
        ("application/json", False, None),
        ("application/x-cloudevents", False, None),
    ],
)
def test_an_event_is_known_by_its_type_or_its_version(media_type: str, has_version: bool, mode: Mode | None) -> None:
    assert mode_of(media_type, has_version=has_version) is mode


@pytest.mark.parametrize("media_type", ["application/cloudevents-batch+json", "application/cloudevents+avro"])
def test_a_batch_and_another_format_are_refused(media_type: str) -> None:
    with pytest.raises(UnsupportedType, match="send one event"):
        mode_of(media_type, has_version=True)


def test_a_function_gets_the_fields_of_the_data_and_the_attributes_apart() -> None:
    event = binary(b'{"n": 1}', "application/json", subject="a", myext="b")
    attributes = {**NEEDED, "subject": "a", "myext": "b", "datacontenttype": "application/json"}
    assert arguments(event) == {"n": 1, FIELD: attributes}
    same = structured(data={"n": 1}, subject="a", myext="b", datacontenttype="application/json")
    assert arguments(same) == arguments(event)
    assert body_of(event) == {"n": 1}


@pytest.mark.parametrize(
    ("event", "more"),
    [
        (binary(), {}),
        (binary(b"[1]", "application/json; charset=utf-8"), {"data": [1]}),
        (binary(b"null", "text/json+json"), {"data": None}),
        (binary("grüße".encode(), "text/plain"), {"data": "grüße"}),
        (binary(b"\xff", "text/plain; charset=latin-1"), {"data_base64": "/w=="}),
        (binary(b"\x00\x01", "image/png"), {"data_base64": "AAE="}),
        (binary(b"\x00\x01"), {"data_base64": "AAE="}),
        (structured(), {}),
        (structured(data=[1]), {"data": [1]}),
        (structured(data=None), {"data": None}),
        (structured(data="x", datacontenttype="text/plain"), {"data": "x"}),
        (structured(data_base64="AAE=", datacontenttype="image/png"), {"data_base64": "AAE="}),
        (structured(data_base64="AAE="), {"data_base64": "AAE="}),
        (structured(data_base64="WzFd", datacontenttype="application/json"), {"data": [1]}),
        (structured(data_base64=""), {"data_base64": ""}),
        (structured(data_base64=None, data=1, empty=None), {"data": 1}),
    ],
)
def test_data_that_is_no_object_stands_with_the_attributes(event: Event, more: dict[str, Any]) -> None:
    kind = event.attributes.get("datacontenttype")
    assert arguments(event) == {FIELD: {**NEEDED, **({"datacontenttype": kind} if kind else {}), **more}}
    with pytest.raises(BadRequest, match="a JSON object with messages or a prompt"):
        body_of(event)


def test_numbers_and_flags_keep_their_type_in_the_json_format() -> None:
    assert arguments(structured(priority=-3, urgent=True))[FIELD] == {**NEEDED, "priority": -3, "urgent": True}


@pytest.mark.parametrize(
    ("sent", "value"),
    [
        ("Euro%20%E2%82%AC", "Euro €"),
        ('"a \\"b\\" %41"', 'a "b" A'),
        ("100%", "100%"),
        (" x ", "x"),
        ("%e2%82%ac", "€"),
    ],
)
def test_a_header_is_decoded(sent: str, value: str) -> None:
    assert binary(b"", subject=sent).attributes["subject"] == value


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"id": ""}, "needs the attribute id"),
        ({"id": None}, "needs the attribute id"),
        ({"source": 5}, "needs the attribute source"),
        ({"specversion": "0.3"}, "specversion must be 1.0, not 0.3"),
        ({"Upper": "x"}, "'Upper' is no name of an attribute"),
        ({"a-b": "x"}, "'a-b' is no name"),
        ({"x" * 65: "x"}, "is no name of an attribute"),
        ({"ext": 1.5}, "ext must be a string"),
        ({"ext": 2**31}, "whole number of 32 bits"),
        ({"ext": {"a": 1}}, "ext must be a string"),
        ({"ext": "a\nb"}, "control characters"),
        ({f"e{i}": "" for i in range(61)}, "may have 64 attributes, not 65"),
        ({"datacontenttype": "text"}, "must be a media type"),
        ({"datacontenttype": 5}, "must be a media type"),
        ({"data": 1, "data_base64": "AAE="}, "data or data_base64, and not both"),
        ({"data_base64": "%"}, "must be a string of base64"),
        ({"data_base64": 5}, "must be a string of base64"),
        ({"data_base64": "ew==", "datacontenttype": "application/json"}, "malformed"),
    ],
)
def test_what_is_no_event_is_refused_with_the_reason(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        structured(**fields)


@pytest.mark.parametrize("body", [b"", b"[]", b'"x"', b"{", b"[" * 1000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        from_structured(body)


def test_wrong_headers_are_refused() -> None:
    with pytest.raises(BadRequest, match="percent-encoded UTF-8"):
        binary(b"", subject="%ff")
    with pytest.raises(BadRequest, match="the header Content-Type, and not"):
        binary(b"", datacontenttype="text/plain")
    with pytest.raises(BadRequest, match="'a-b' is no name"):
        from_binary([*HEADERS, ("ce-a-b", "x")], "", b"")
    with pytest.raises(BadRequest, match="no name"):
        binary(b"", data="x")
    with pytest.raises(BadRequest, match=f"must not have a field {FIELD}"):
        arguments(binary(b'{"__ce": 1}', "application/json"))


def test_a_result_without_attributes_is_no_event() -> None:
    for result in ({"n": 1}, [1], None, "x"):
        assert answer(result, Mode.BINARY, event_id="a1", source="/guest/f") is None


def test_an_answer_names_itself_unless_the_function_does() -> None:
    made = answered(Mode.STRUCTURED, {"n": 1, FIELD: {"type": "t"}})
    assert (made.content_type, made.headers) == ("application/cloudevents+json", ())
    named = {"specversion": "1.0", "id": "a1", "source": "/guest/f", "type": "t"}
    assert json.loads(made.body) == {**named, "data": {"n": 1}}
    own = {"type": "t", "id": "mine", "source": "urn:x", "time": None}
    made = answered(Mode.STRUCTURED, {FIELD: own})
    assert json.loads(made.body) == {"specversion": "1.0", "id": "mine", "source": "urn:x", "type": "t"}


@pytest.mark.parametrize(
    ("told", "body", "content_type"),
    [
        ({}, b"", ""),
        ({"data": [1]}, b"[1]", "application/json"),
        ({"data": "x"}, b'"x"', "application/json"),
        ({"data": "x", "datacontenttype": "text/plain"}, b"x", "text/plain"),
        ({"data_base64": "AAE="}, b"\x00\x01", "application/octet-stream"),
        ({"data_base64": "AAE=", "datacontenttype": "image/png"}, b"\x00\x01", "image/png"),
    ],
)
def test_an_answer_in_binary_mode_has_headers_and_the_data_as_its_body(
    told: dict[str, Any], body: bytes, content_type: str
) -> None:
    made = answered(Mode.BINARY, {FIELD: {"type": "t", "flag": True, "count": 3, **told}})
    assert (made.body, made.content_type) == (body, content_type)
    named = {"specversion": "1.0", "id": "a1", "source": "/guest/f", "type": "t", "flag": "true", "count": "3"}
    assert dict(made.headers) == {f"ce-{name}": value for name, value in named.items()}


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ({FIELD: "t"}, "must be an object"),
        ({FIELD: {}}, "needs the attribute type"),
        ({FIELD: {"type": "t", "Bad": "x"}}, "is no name"),
        ({FIELD: {"type": "t", "data": 1}, "n": 1}, "and not in both"),
        ({FIELD: {"type": "t", "data": {}, "datacontenttype": "text/plain"}}, "must be a string"),
        ({FIELD: {"type": "t", "datacontenttype": "text/plain\r\nSet-Cookie: x"}}, "control characters"),
        ({FIELD: {"type": "t" * 16_384}}, "16384 characters in all"),
    ],
)
def test_an_answer_that_is_no_event_is_refused(result: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        answered(Mode.BINARY, result)


texts = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=40)
values = st.one_of(texts, st.booleans(), st.integers(-(2**31), 2**31 - 1))
data = st.one_of(st.none(), st.dictionaries(texts, st.integers(), min_size=1), st.binary(min_size=1))


@given(st.dictionaries(st.from_regex(r"\A[a-z0-9]{1,20}\Z"), values, max_size=8), data, st.sampled_from(Mode))
def test_an_answer_is_read_back_as_the_event_that_it_is(extra: dict[str, Any], content: Any, mode: Mode) -> None:
    own = {k: v for k, v in extra.items() if k not in (*NEEDED, "data", "data_base64", "datacontenttype")}
    told = {**own, **NEEDED}
    if isinstance(content, bytes):
        told["data_base64"] = base64.b64encode(content).decode()
    fields = content if isinstance(content, dict) else {}
    if FIELD in fields:
        return
    made = answered(mode, {**fields, FIELD: told})
    if mode is Mode.STRUCTURED:
        assert arguments(from_structured(made.body)) == {**fields, FIELD: told}
        return
    for _, value in made.headers:
        assert value.isascii()
        assert value.isprintable()
        assert " " not in value
    event = from_binary(made.headers, made.content_type, made.body)
    as_text = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in told.items()}
    # white space around a header's value is percent-encoded, too, so it comes back
    expected = {**fields, FIELD: {**as_text, **({"datacontenttype": made.content_type} if made.content_type else {})}}
    assert arguments(event) == expected
