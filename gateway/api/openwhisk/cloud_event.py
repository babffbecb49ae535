"""CloudEvents 1.0 in HTTP: an event becomes a function's arguments, and a result that has ``__ce`` an event.  Pure.

::

    binary       the attributes are headers (ce-id, ce-type, ...), the data is the body, its type is Content-Type
    structured   the body is the event in the JSON format, its type is application/cloudevents+json

Specifications: CloudEvents 1.0.2, its HTTP protocol binding and its JSON event format.
"""

from __future__ import annotations

import base64
import binascii
import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, unquote_to_bytes

from gateway.api import bounded_json
from gateway.api.openwhisk.web_answer import is_json, is_text
from thaw import wire
from thaw.errors import BadRequest, UnsupportedType

FIELD: Final = "__ce"
"""The argument that holds the attributes of an event."""

_STRUCTURED: Final = "application/cloudevents+json"
_FAMILY: Final = "application/cloudevents"
_NAME: Final = re.compile(r"\A[a-z0-9]{1,64}\Z")
_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f]")
_MEDIA_TYPE: Final = re.compile(r"\A[\w!#$&^.+-]{1,64}/[\w!#$&^.+-]{1,64}(?:;[\x20-\x7e]{0,128})?\Z", re.ASCII)
_REQUIRED: Final = ("id", "source", "specversion", "type")
_DATA: Final = ("data", "data_base64")
_MOST_ATTRIBUTES: Final = 64
_MOST_CHARACTERS: Final = 16_384
"""The most characters of all attributes of an answer together: proxies refuse longer heads."""
_AS_THEY_ARE: Final = "".join(chr(c) for c in range(0x21, 0x7F) if chr(c) not in '"%')
"""A header's value has the other characters percent-encoded (HTTP binding, 3.1.3.2)."""

Attribute = str | bool | int


class Mode(enum.Enum):
    BINARY = enum.auto()
    STRUCTURED = enum.auto()


@dataclass(frozen=True, slots=True)
class Data:
    """A JSON value or a text; ``is_binary``: bytes in base64."""

    value: Any
    is_binary: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """``data``: None where the event has none."""

    mode: Mode
    attributes: Mapping[str, Attribute]
    data: Data | None


@dataclass(frozen=True, slots=True)
class EventAnswer:
    """An event as an HTTP answer.  ``content_type`` is empty where there is no body."""

    body: bytes
    content_type: str
    headers: tuple[tuple[str, str], ...]


def mode_of(media_type: str, *, has_version: bool) -> Mode | None:
    """Return how the request carries an event; None if it carries none.  ``media_type`` is in lower case and has no
    parameters; ``has_version``: there is a header ce-specversion.  Raises UnsupportedType for batches and for event
    formats other than JSON."""
    if media_type == _STRUCTURED:
        return Mode.STRUCTURED
    if media_type.startswith(_FAMILY):
        raise UnsupportedType(
            f"{media_type:.64} is not read here: send one event, as {_STRUCTURED} or with ce- headers."
        )
    return Mode.BINARY if has_version else None


def from_binary(headers: Iterable[tuple[str, str]], content_type: str, body: bytes) -> Event:
    """``headers``: as WSGI has them, in Latin-1.  Raises BadRequest."""
    attributes: dict[str, Attribute] = {}
    for name, value in headers:
        if name.lower().startswith("ce-"):
            attributes[name.lower()[3:]] = _decoded(name, value)
    if "datacontenttype" in attributes:
        raise _bad("datacontenttype is the header Content-Type, and not ce-datacontenttype")
    if content_type:
        attributes["datacontenttype"] = content_type
    _check(attributes)
    return Event(Mode.BINARY, attributes, _from_bytes(content_type, body))


def from_structured(body: bytes) -> Event:
    """Raises BadRequest, TooLarge."""
    plain = bounded_json.parse(body)
    if not isinstance(plain, dict):
        raise _bad("the body must be a JSON object")
    attributes = {name: value for name, value in plain.items() if name not in _DATA and value is not None}
    _check(attributes)
    return Event(Mode.STRUCTURED, attributes, _data_of(plain, str(attributes.get("datacontenttype", ""))))


def arguments(event: Event) -> dict[str, Any]:
    """Return the fields of the data if it is an object, and the attributes under ``__ce``.  Other data is in ``__ce``,
    too, as the JSON format has it.  Raises BadRequest."""
    attributes: dict[str, Any] = dict(event.attributes)
    if event.data is None:
        return {FIELD: attributes}
    if event.data.is_binary:
        return {FIELD: {**attributes, "data_base64": event.data.value}}
    if not isinstance(event.data.value, dict):
        return {FIELD: {**attributes, "data": event.data.value}}
    if FIELD in event.data.value:
        raise _bad(f"its data must not have a field {FIELD}")
    return {**event.data.value, FIELD: attributes}


def body_of(event: Event) -> dict[str, Any]:
    """Return the data alone, for a model, whose requests have no other fields.  Raises BadRequest."""
    if event.data is None or not isinstance(event.data.value, dict):
        raise _bad("a model takes an event whose data is a JSON object with messages or a prompt")
    return dict(event.data.value)


def answer(result: Any, mode: Mode, *, event_id: str, source: str) -> EventAnswer | None:
    """Return the event that a function answered with, in the mode of the event that it got; None if it answered with
    none.  ``event_id`` and ``source`` are for an event that names none itself.  Raises BadRequest if it is no valid
    event."""
    if not isinstance(result, dict) or FIELD not in result:
        return None
    told = result[FIELD]
    if not isinstance(told, dict):
        raise _bad(f"{FIELD} must be an object with the attributes of the event")
    attributes: dict[str, Attribute] = {"specversion": "1.0", "id": event_id, "source": source}
    attributes.update({name: value for name, value in told.items() if name not in _DATA and value is not None})
    _check(attributes)
    if sum(len(name) + len(str(value)) for name, value in attributes.items()) > _MOST_CHARACTERS:
        raise _bad(f"its attributes may have {_MOST_CHARACTERS} characters in all")
    data = _told_data(result, told, str(attributes.get("datacontenttype", "")))
    return _structured(attributes, data) if mode is Mode.STRUCTURED else _binary(attributes, data)


def _told_data(result: dict[str, Any], told: dict[str, Any], content_type: str) -> Data | None:
    fields = {name: value for name, value in result.items() if name != FIELD}
    data = _data_of(told, content_type)
    if data is not None and fields:
        raise _bad(f"its data is under {FIELD} or in the other fields of the result, and not in both")
    return Data(fields) if fields else data


def _structured(attributes: dict[str, Attribute], data: Data | None) -> EventAnswer:
    plain: dict[str, Any] = dict(attributes)
    if data is not None:
        plain["data_base64" if data.is_binary else "data"] = data.value
    return EventAnswer(wire.encode(plain), _STRUCTURED, ())


def _binary(attributes: dict[str, Attribute], data: Data | None) -> EventAnswer:
    content_type = str(attributes.pop("datacontenttype", ""))
    headers = tuple((f"ce-{name}", _encoded(value)) for name, value in attributes.items())
    if data is None:
        return EventAnswer(b"", "", headers)
    if data.is_binary:
        return EventAnswer(base64.b64decode(data.value), content_type or "application/octet-stream", headers)
    if not content_type or is_json(_media_type(content_type)):
        return EventAnswer(wire.encode(data.value), content_type or "application/json", headers)
    if not isinstance(data.value, str):
        raise _bad(f"data of the type {content_type} must be a string")
    return EventAnswer(data.value.encode("utf-8", "replace"), content_type, headers)


def _check(attributes: Mapping[str, Any]) -> None:
    """Raises BadRequest."""
    if len(attributes) > _MOST_ATTRIBUTES:
        raise _bad(f"an event may have {_MOST_ATTRIBUTES} attributes, not {len(attributes)}")
    for name, value in attributes.items():
        if not _NAME.match(name) or name in _DATA:
            raise _bad(f"'{name:.64}' is no name of an attribute: a-z and 0-9, at most 64 characters")
        if not isinstance(value, str | bool) and not (isinstance(value, int) and -(2**31) <= value < 2**31):
            raise _bad(f"{name} must be a string, true, false, or a whole number of 32 bits")
        if isinstance(value, str) and _CONTROLS.search(value):
            raise _bad(f"{name} must not have control characters")
    for name in _REQUIRED:
        if not isinstance(attributes.get(name), str) or not attributes[name]:
            raise _bad(f"an event needs the attribute {name}, a string that is not empty")
    if attributes["specversion"] != "1.0":
        raise _bad(f"specversion must be 1.0, not {attributes['specversion']:.16}")
    content_type = attributes.get("datacontenttype", "text/plain")
    if not isinstance(content_type, str) or not _MEDIA_TYPE.match(content_type):
        raise _bad("datacontenttype must be a media type, such as application/json")


def _data_of(plain: Mapping[str, Any], content_type: str) -> Data | None:
    if "data_base64" not in plain or plain["data_base64"] is None:
        return Data(plain["data"]) if "data" in plain else None
    if "data" in plain:
        raise _bad("it has data or data_base64, and not both")
    try:
        data = base64.b64decode(plain["data_base64"], validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise _bad("data_base64 must be a string of base64") from None
    return _from_bytes(content_type, data) or Data("", is_binary=True)


def _from_bytes(content_type: str, data: bytes) -> Data | None:
    """Data of this type: a JSON value, a text, else base64.  None for no bytes.  Raises BadRequest, TooLarge."""
    media_type = _media_type(content_type)
    if not data:
        return None
    if is_json(media_type):
        return Data(bounded_json.parse(data))
    if is_text(media_type):
        try:
            return Data(data.decode())
        except UnicodeDecodeError:
            pass  # another charset: the function gets its bytes
    return Data(base64.b64encode(data).decode(), is_binary=True)


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _decoded(name: str, value: str) -> str:
    """HTTP binding, 3.1.3.2: quotes are taken off, then percent-encoded octets are UTF-8."""
    value = value.strip()
    if len(value) >= 2 and value[0] == value[-1] == '"':
        value = re.sub(r"\\(.)", r"\1", value[1:-1])
    try:
        return unquote_to_bytes(value.encode("latin-1")).decode()
    except ValueError:
        raise _bad(f"the header {name:.64} must be percent-encoded UTF-8") from None


def _encoded(value: Attribute) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return quote(text, safe=_AS_THEY_ARE, errors="replace")


def _bad(message: str) -> BadRequest:
    return BadRequest(f"This is no valid CloudEvent: {message}.")
