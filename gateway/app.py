"""The WSGI application: the routes over one Gateway."""

from __future__ import annotations

from flask import Flask

from gateway.api import http, openai, openapi, responses
from gateway.api.openwhisk import actions, activations, invoke, packages, rules, triggers, web_actions
from gateway.api.platform import (
    endings,
    host,
    last_output,
    operator,
    preflight,
    probes,
    scaling,
    standings,
    work,
)
from gateway.core import Gateway


def create_app(core: Gateway) -> Flask:
    app = Flask("thaw-gateway", static_folder=None)
    app.url_map.strict_slashes = False
    app.extensions["thaw"] = core
    http.install(app)
    probes.install(app)
    for module in (
        *(host, openapi, operator, openai, responses, actions, preflight, packages, triggers, rules, invoke),
        *(activations, endings, last_output, scaling, standings, work, web_actions),
    ):
        app.register_blueprint(module.blueprint)
    return app
