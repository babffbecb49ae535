"""…/work: what runs, starts and waits, of a namespace and for operators of all of them."""

from __future__ import annotations

from flask import Blueprint, Response, request

from gateway.api.held import wait_s
from gateway.api.http import gateway, json_response, namespace
from thaw import wire
from thaw.clock import wall_ms
from thaw.ids import Namespace

blueprint = Blueprint("work", __name__, url_prefix="/api/v1/namespaces/<ns>")


@blueprint.get("/work")
def work(ns: str) -> Response:
    return held_work(namespace(ns))


def held_work(of: Namespace | None) -> Response:
    """With ``known``, the ``mark`` of an earlier answer, the request is held up to ``wait_s`` until that is out of
    date."""
    mark, found = gateway().work.wait(of, request.args.get("known"), wait_s())
    return json_response({"mark": mark, "now_ms": wall_ms(), **wire.to_plain(found)})
