"""…/work: the running, starting and waiting work of a namespace, or for operators of all namespaces."""

from __future__ import annotations

from contextlib import nullcontext

from flask import Blueprint, Response, request

from gateway.api.held import client_watched, wait_s
from gateway.api.http import caller, gateway, json_response, namespace
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
    core, longest_s, known = gateway(), wait_s(), request.args.get("known")
    with client_watched() as hangup:
        mark, found = core.held.until_news(
            caller().namespace,
            hangup,
            longest_s,
            lambda: nullcontext(core.work.bell),
            lambda: core.work.look(of),
            lambda seen: seen[0] != known,
        )
    return json_response({"mark": mark, "now_ms": wall_ms(), **wire.to_plain(found)})
