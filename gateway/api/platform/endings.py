"""…/endings: the records of a namespace in the order in which its calls ended, for clients that follow them."""

from __future__ import annotations

from typing import Any, Final

from flask import Blueprint, Response, request

from gateway.api.held import client_watched, wait_s
from gateway.api.http import gateway, json_response, namespace
from gateway.api.openwhisk import render
from gateway.api.openwhisk.listing import page
from gateway.serving.held.following import Following
from relay.state.endings import cursor_of
from thaw import wire

blueprint = Blueprint("endings", __name__, url_prefix="/api/v1/namespaces/<ns>/endings")
_ANSWER_BYTES: Final = 4 << 20
"""A longer answer ends with the record that is over it, and its cursor says so."""


@blueprint.get("")
def endings(ns: str) -> Response:
    """With ``after``, the cursor of an earlier answer, the request is held up to ``wait_s`` until a call has ended
    since; without it the answer is the cursor of now."""
    core, own, longest_s, (limit, _) = gateway(), namespace(ns), wait_s(), page()
    after = request.args.get("after")
    if after is None:
        return json_response({"cursor": str(core.followers.now(own)), "passed_over": 0, "activations": []})
    following = Following(core.followers, own, cursor_of(after), request.args.get("name", ""), limit)
    with client_watched() as hangup:
        core.held.until_news(
            own, hangup, longest_s, lambda: core.endings.listening(own), following.look, lambda f: f.has_news
        )
    return json_response(_read(following))


def _read(following: Following) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    cursor, n_bytes, n_missed = following.cursor, 0, following.n_missed
    for ending in following.found:
        record = gateway().records.activation(ending.activation_id)
        if record is None:  # it has been removed for newer ones since
            n_missed += 1
            continue
        found.append(render.activation(record))
        n_bytes += len(wire.encode(found[-1]))
        if n_bytes >= _ANSWER_BYTES:
            cursor = ending.cursor
            break
    return {"cursor": str(cursor), "passed_over": n_missed, "activations": found}
