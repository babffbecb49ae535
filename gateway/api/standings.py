"""…/standings: how each model of a namespace stands, for whoever shows it elsewhere."""

from __future__ import annotations

from flask import Blueprint, Response, request

from gateway.api.http import gateway, json_response, namespace, query_seconds
from thaw import wire

blueprint = Blueprint("standings", __name__, url_prefix="/api/v1/namespaces/<ns>")


@blueprint.get("/standings")
def standings(ns: str) -> Response:
    """With ``known``, an earlier answer's token, the call waits up to ``wait_s`` until there is another one."""
    own, known = namespace(ns), request.args.get("known", "")
    return json_response(wire.to_plain(gateway().standings.wait(own, known, query_seconds("wait_s"))))
