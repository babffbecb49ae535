"""…/logs/NAME: what an action's containers wrote to stderr before they ended, for an hour afterwards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from flask import Blueprint, Response

from gateway.api.http import action_name, gateway, json_response
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
    more.  What a function with an adapter shares with others is told under its own name."""
    core, full_name = gateway(), action_name(ns, name)
    wanted = OutputWanted(_served_by(full_name))

    def ask(host: HostReport) -> tuple[EndedOutput, ...] | None:
        try:
            return core.pool.output(host.address, wanted, timeout_s=_ASK_S).outputs
        except ThawError as e:
            core.log.event("output_not_read", host_id=host.host_id, error=e.message)
            return None

    hosts = core.registry.live_hosts()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(ask, hosts))
    found = sorted((o for a in answers if a is not None for o in a), key=lambda o: o.ended_wall_ms)[-_MOST:]
    unanswered = [h.host_id for h, a in zip(hosts, answers, strict=True) if a is None]
    outputs = [wire.to_plain(replace(o, action=full_name)) for o in found]
    return json_response({"outputs": outputs, "unanswered": unanswered})


def _served_by(name: ActionName) -> ActionName:
    """Whose containers run it; its own name, if it does not exist."""
    try:
        return gateway().actions.get(name).served_by
    except NotFound:
        return name
