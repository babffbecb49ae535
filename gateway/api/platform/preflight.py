"""…/preflight: would a model start here?  ``thaw model push`` asks before it lets a name mean a new version."""

from __future__ import annotations

from flask import Blueprint, Response

from gateway.api.http import gateway, json_object, json_response, namespace
from gateway.api.openwhisk import render
from thaw.config import parse_llm_config

blueprint = Blueprint("models", __name__, url_prefix="/api/v1/namespaces/<ns>")
_MOST_BYTES = 64 * 1024


@blueprint.post("/preflight")
def preflight(ns: str) -> Response:
    """Nothing is deployed.  The memory of a config that names none is not checked.  Raises ConfigError,
    Forbidden."""
    core, own = gateway(), namespace(ns)
    plain = json_object(_MOST_BYTES).get("config")
    config = parse_llm_config(plain)
    for uri in filter(None, (config.model.uri, config.model.adapter)):
        core.models.check_uri(own, uri)
    memory = isinstance(plain, dict) and "resources" in plain
    return json_response(render.preflight(core.preflight.check(config, own, memory=memory)))
