"""The WSGI application: the routes over one Gateway."""

from __future__ import annotations

from flask import Flask

from gateway.api import (
    actions,
    activations,
    endings,
    host,
    http,
    invoke,
    last_output,
    models,
    openai,
    openapi,
    operator,
    packages,
    probes,
    responses,
    rules,
    scaling,
    standings,
    triggers,
    web,
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
        *(host, openapi, operator, openai, responses, actions, models, packages, triggers, rules, invoke),
        *(activations, endings, last_output, scaling, standings, work, web),
    ):
        app.register_blueprint(module.blueprint)
    return app
