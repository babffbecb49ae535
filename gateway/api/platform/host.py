"""Answers about the installation: the host root, the API root, namespaces, limits; health and metrics."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, request

from gateway import metrics
from gateway.api.http import caller, gateway, json_response, namespace
from gateway.api.openwhisk.action_body import LLM_LIMITS, PYTHON_LIMITS
from thaw import __version__
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.bearer import is_bearer
from thaw.errors import Unauthorized
from thaw.process import lasting

blueprint = Blueprint("host", __name__)
_MB = 1024 * 1024
"""A caller that waits for a drain holds one of the gateway's threads, and asks again after this."""


@blueprint.get("/")
def host() -> Response:
    settings = gateway().settings
    shortest, longest = PYTHON_LIMITS["timeout"]
    limits = {
        "actions_per_minute": settings.per_minute,
        "triggers_per_minute": settings.per_minute,
        "concurrent_actions": settings.concurrent,
        "sequence_length": settings.sequence_length,
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
        "firesPerMinute": settings.per_minute,
        "maxPayloadSize": settings.payload_bytes,
        "maxLlmPayloadSize": settings.llm_payload_bytes,
        "maxCodeSize": settings.code_bytes,
        "maxParameterSize": settings.parameters_bytes,
        "preflightSeconds": settings.preflight_s,
    }
    names = {"memory": "Memory", "logs": "Logs", "timeout": "Timeout", "concurrency": "Concurrency"}
    for prefix, table in (("", PYTHON_LIMITS), ("Llm", LLM_LIMITS)):
        for key, name in names.items():
            low, high = table[key]
            values |= {f"min{prefix}Action{name}": low, f"max{prefix}Action{name}": high}
    return json_response(values)


@blueprint.get("/health")
def health() -> Response:
    """Ready to serve: the state server reads and writes, and every thread that must last is alive."""
    status, plain = lasting.health(*gateway().problems(), gateway=gateway().gateway_id)
    return json_response(plain, status)


@blueprint.get("/live")
def live() -> Response:
    """Not to be started again: every thread that must last is alive, and this one answers.  A supervisor asks this, and
    a load balancer /health: another process would find the state server away as well."""
    status, plain = lasting.health(gateway=gateway().gateway_id)
    return json_response(plain, status)


@blueprint.get("/metrics")
def prometheus() -> Response:
    """A gateway that others reach tells its metrics only to holders of a token."""
    settings = gateway().settings
    is_open = settings.is_on_loopback and not settings.metrics_token
    if not is_open and not is_bearer(request.headers.get("Authorization", ""), *gateway().scrapers):
        raise Unauthorized("Metrics need a bearer token here.", hint="set THAW_METRICS_TOKEN and send it")
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
