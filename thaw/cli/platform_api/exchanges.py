"""The output of ``-v`` and ``-d`` on stderr: each request with its answer, in wsk's form and without the API key."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import requests

_HIDDEN = "authorization"


def tell(response: requests.Response, is_stream: bool) -> None:
    """``is_stream``: the answer's body has not arrived yet."""
    request = response.request
    lines = ["REQUEST:", f"[{request.method}]\t{request.url}", "Req Headers", _headers(request.headers)]
    if request.body:
        lines += ["Req Body", _text(request.body)]
    lines += [f"RESPONSE:Got response with code {response.status_code}", "Resp Headers", _headers(response.headers)]
    if not is_stream:
        lines += [f"Response body size is {len(response.content)} bytes", "Response body received:", response.text]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _headers(headers: Mapping[str, str]) -> str:
    shown = {name: [value if name.lower() != _HIDDEN else "(not shown)"] for name, value in headers.items()}
    return json.dumps(shown, indent=2)


def _text(body: object) -> str:
    return body.decode(errors="replace") if isinstance(body, bytes) else str(body)
