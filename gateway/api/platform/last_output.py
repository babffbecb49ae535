"""…/logs/NAME: the last stderr output of an action's containers that have ended, for an hour afterwards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from flask import Blueprint, Response

from gateway.api.http import action_name, gateway, json_response
from gateway.core import Gateway
from relay.protocol.data_port_messages import EndedOutput, OutputWanted
from thaw import wire
from thaw.errors import NotFound, ThawError
from thaw.host import HostReport
from thaw.ids import ActionName

blueprint = Blueprint("last_output", __name__, url_prefix="/api/v1/namespaces/<ns>")
_ASK_S: Final = 3.0
_AT_ONCE: Final = 8
_MOST: Final = 20


@blueprint.get("/logs/<path:name>")
def last_output(ns: str, name: str) -> Response:
    """The newest ones, oldest first.  The action itself may have been deleted.  ``unanswered`` are hosts that may have
    more."""
    core, named = gateway(), action_name(ns, name)
    wanted = OutputWanted(_served_by(core, named))

    def ask(host: HostReport) -> tuple[EndedOutput, ...] | None:
        try:
            return core.pool.output(host.address, wanted, timeout_s=_ASK_S).outputs
        except ThawError as e:
            core.log.event("output_not_read", host_id=host.host_id, error=e.message)
            return None

    hosts = core.registry.live_hosts()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(ask, hosts))
    found = sorted(
        (replace(o, action=named) for a in answers if a is not None for o in a), key=lambda o: o.ended_wall_ms
    )[-_MOST:]
    unanswered = [h.host_id for h, a in zip(hosts, answers, strict=True) if a is None]
    return json_response({"outputs": wire.to_plain(found), "unanswered": unanswered})


def _served_by(core: Gateway, name: ActionName) -> ActionName:
    """Return the name under which the hosts keep the output.  For a function that shares its instances, it is its
    pool's."""
    try:
        return core.actions.get(name).served_by
    except NotFound:
        return name
