"""…/standings: the state of each model of a namespace, for clients that show it elsewhere."""

from __future__ import annotations

import time

from flask import Blueprint, Response, request

from gateway.api.held import client_watched, wait_s
from gateway.api.http import caller, gateway, json_response, namespace
from thaw import wire

blueprint = Blueprint("standings", __name__, url_prefix="/api/v1/namespaces/<ns>")


@blueprint.get("/standings")
def standings(ns: str) -> Response:
    """With ``known``, the ``mark`` of an earlier answer, the request is held up to ``wait_s`` until that is out of
    date.  A caller that has written reads what it wrote."""
    core, own, longest_s, known = gateway(), namespace(ns), wait_s(), request.args.get("known")
    since_s = time.monotonic()
    with client_watched() as hangup:
        found = core.held.until_news(
            caller().namespace,
            hangup,
            longest_s if known else 0.0,
            lambda: core.standings.listening(own),
            lambda: core.standings.look(own, since_s),
            lambda seen: seen.mark != known,
        )
    return json_response(wire.to_plain(found))
