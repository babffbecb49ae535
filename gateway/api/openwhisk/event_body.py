"""Reads a request's arguments: those of an event (cloud_event.py), or else those of a JSON object."""

from __future__ import annotations

from typing import Any

from flask import request

from gateway.api.http import json_object, read_body
from gateway.api.openwhisk import cloud_event
from gateway.api.openwhisk.cloud_event import Event, Mode
from thaw.action import Action


def sent_event(max_bytes: int) -> Event | None:
    """The event that the request carries.  Raises TooLarge, BadRequest, UnsupportedType."""
    has_version = "HTTP_CE_SPECVERSION" in request.environ
    if not has_version and "cloudevents" not in request.environ.get("CONTENT_TYPE", "").lower():
        return None
    mode = cloud_event.mode_of(request.mimetype, has_version=has_version)
    if mode is None:
        return None
    data = read_body(max_bytes)
    if mode is Mode.STRUCTURED:
        return cloud_event.from_structured(data)
    return cloud_event.from_binary(request.headers.items(), request.headers.get("Content-Type", ""), data)


def sent_arguments(action: Action, max_bytes: int) -> tuple[dict[str, Any], Mode | None]:
    """Return the arguments of an invocation, and their mode if they came as an event.  Raises TooLarge, BadRequest,
    UnsupportedType."""
    event = sent_event(max_bytes)
    if event is None:
        return json_object(max_bytes, optional=True), None
    return event_arguments(action, event), event.mode


def event_arguments(action: Action, event: Event) -> dict[str, Any]:
    """Raises BadRequest."""
    return cloud_event.body_of(event) if action.is_llm else cloud_event.arguments(event)
