"""Answers about the installation: the host root, the API root, namespaces, limits; health, metrics and hosts."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, request

from gateway import metrics
from gateway.api.action_body import LLM_LIMITS, PYTHON_LIMITS
from gateway.api.http import caller, gateway, json_response, namespace
from thaw import __version__, lasting, wire
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.clock import wall_ms
from thaw.errors import BadRequest, ProtocolError
from thaw.host import HostLeft
from thaw.ids import HostId

blueprint = Blueprint("host", __name__)
_MB = 1024 * 1024
_LONGEST_WAIT_S = 30.0
"""A caller that waits for a drain holds one of the gateway's threads, and asks again after this."""


@blueprint.get("/")
def host() -> Response:
    settings = gateway().settings
    shortest, longest = PYTHON_LIMITS["timeout"]
    limits = {
        "actions_per_minute": settings.per_minute,
        "triggers_per_minute": 0,
        "concurrent_actions": settings.concurrent,
        "sequence_length": 0,
        "min_action_duration": shortest,
        "max_action_duration": longest,
        "min_action_memory": PYTHON_LIMITS["memory"][0] * _MB,
        "max_action_memory": PYTHON_LIMITS["memory"][1] * _MB,
        "min_action_logs": PYTHON_LIMITS["logs"][0] * _MB,
        "max_action_logs": PYTHON_LIMITS["logs"][1] * _MB,
    }
    runtimes = {"python": [_runtime(KIND_PYTHON)], "llm": [_runtime(KIND_LLM)]}
    support = {"github": "", "slack": ""}
    return json_response(
        {
            "description": "Thaw",
            "support": support,
            "api_paths": ["/api/v1", "/v1"],
            "limits": limits,
            "runtimes": runtimes,
        }
    )


@blueprint.get("/api/v1")
def api() -> Response:
    return json_response(
        {
            "description": "Thaw API",
            "api_version": "1.0.0",
            "api_version_path": "v1",
            "build": __version__,
            "buildno": __version__,
            "swagger_paths": {},
        }
    )


@blueprint.get("/api/v1/namespaces")
def namespaces() -> Response:
    return json_response([caller().namespace])


@blueprint.get("/api/v1/namespaces/<ns>/limits")
def limits(ns: str) -> Response:
    namespace(ns)
    settings = gateway().settings
    values: dict[str, Any] = {
        "invocationsPerMinute": settings.per_minute,
        "concurrentInvocations": settings.held_per_namespace,
        "firesPerMinute": 0,
        "maxPayloadSize": settings.payload_bytes,
        "maxLlmPayloadSize": settings.llm_payload_bytes,
        "maxCodeSize": settings.code_bytes,
        "maxParameterSize": settings.parameters_bytes,
    }
    names = {"memory": "Memory", "logs": "Logs", "timeout": "Timeout", "concurrency": "Concurrency"}
    for prefix, table in (("", PYTHON_LIMITS), ("Llm", LLM_LIMITS)):
        for key, name in names.items():
            low, high = table[key]
            values |= {f"min{prefix}Action{name}": low, f"max{prefix}Action{name}": high}
    return json_response(values)


@blueprint.get("/api/v1/thaw/hosts")
def hosts() -> Response:
    """Every host's last report, for ``thaw host list``."""
    caller()
    core = gateway()
    live = {r.host_id for r in core.registry.live_hosts()}
    found = [{**wire.to_plain(r), "live": r.host_id in live} for r in core.registry.hosts()]
    return json_response({"hosts": found, "now_wall_ms": wall_ms()})


@blueprint.get("/api/v1/thaw/hosts/<host_id>/drain")
def drained(host_id: str) -> Response:
    """What is left on the host.  ``known`` is what the caller knows, as this call answered it: then the answer comes
    when something else is true, or after ``wait_s``."""
    caller()
    known = _known(request.args.get("known"))
    left = gateway().host_drains.wait(HostId(host_id), known, _wait_s(request.args.get("wait_s")))
    return json_response({"host": host_id, **wire.to_plain(left)})


def _known(text: str | None) -> HostLeft | None:
    try:
        return None if text is None else wire.loads(HostLeft, text.encode())
    except ProtocolError as e:
        raise BadRequest(f"known: {e.message}", hint="give back what the last call answered") from e


def _wait_s(text: str | None) -> float:
    try:
        wait_s = float(text or 0)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= _LONGEST_WAIT_S:
        raise BadRequest(f"wait_s must be a number of seconds, at most {_LONGEST_WAIT_S:g}")
    return wait_s


@blueprint.route("/api/v1/thaw/hosts/<host_id>/drain", methods=["PUT", "DELETE"])
def drain(host_id: str) -> Response:
    """PUT: the host takes no new work, and what runs there moves or ends.  DELETE: the host takes work again."""
    caller()
    wanted = request.method == "PUT"
    gateway().registry.drain_host(HostId(host_id), drain=wanted)
    return json_response({"host": host_id, "draining": wanted})


@blueprint.get("/health")
def health() -> Response:
    """Ready to serve: the state server reads and writes, and every thread that must last is alive."""
    status, plain = lasting.health(*gateway().problems(), gateway=gateway().gateway_id)
    return json_response(plain, status)


@blueprint.get("/metrics")
def prometheus() -> Response:
    body, content_type = metrics.page(gateway().room.counts, gateway().streams.n_absent)
    return Response(body, content_type=content_type)


def _runtime(kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "image": "",
        "default": True,
        "deprecated": False,
        "requireMain": False,
        "attached": False,
        "stemCells": [],
    }
