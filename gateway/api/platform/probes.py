"""Recognises probes by a header and not by a path: a probe needs no key and starts nothing, on any path.

A node that probes names itself ``kube-probe`` and may be told any path, that of a web action too; it gets the answer of
/health.  Knative's ingress asks until the answer repeats its own token, to learn that its newest routes lead here.  A
proxy of Knative before a function names itself in the header.  Headers: knative.dev/networking, pkg/http/header.
"""

from __future__ import annotations

from typing import Final

from flask import Flask, Response, request

from gateway.api.platform import host
from thaw.errors import BadRequest

_PROBE: Final = "K-Network-Probe"
_HASH: Final = "K-Network-Hash"
_NODE: Final = "K-Kubelet-Probe"
_AGENT: Final = "kube-probe/"
_PARTS: Final = ("queue", "activator")
"""Knative's parts that ask whether the container behind them is ready.  Each expects its own name as the answer."""
_OWN: Final = ("host.health", "host.live")
"""The paths that keep their meaning for every prober, however the path is written."""
_READY: Final = 200


def install(app: Flask) -> None:
    """Call this after http.install(): a probe's answer has its headers, too."""

    @app.before_request
    def answer() -> Response | None:
        if request.endpoint in _OWN:
            return None
        asked = request.headers.get(_PROBE)
        if asked is not None:
            return _knative(asked)
        agent = request.headers.get("User-Agent", "")
        if agent.startswith(_AGENT) or _NODE in request.headers:
            return host.health()
        return None


def _knative(asked: str) -> Response:
    """Raises BadRequest for a probe that is none."""
    word = request.headers.get(_HASH, "")
    if asked == "probe" and word:
        return Response(headers={_HASH: word})
    if asked in _PARTS:
        health = host.health()
        return Response(asked, content_type="text/plain") if health.status_code == _READY else health
    raise BadRequest(f"This is no probe: {_PROBE} is '{asked:.40}' and {_HASH} is '{word:.40}'.")
