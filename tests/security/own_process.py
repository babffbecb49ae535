"""The API's routes and document, read in a process of their own.

Flask's proxies stand in the modules that import it.  vLLM looks at every module of its process, and such a proxy raises
an error outside of a request, so no test may import these modules into the process in which others run an engine.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

from tests.gateway.conftest import ROOT

_TELL = """
import json
from gateway.api import openapi
from gateway.app import create_app
rules = create_app(None).url_map.iter_rules()
routes = [(rule.rule, method) for rule in rules for method in rule.methods or () if method not in ("HEAD", "OPTIONS")]
print(json.dumps([routes, openapi.document()]))
"""


@functools.cache
def _told() -> Any:
    done = subprocess.run(
        [sys.executable, "-c", _TELL], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout)


def routes() -> set[tuple[str, str]]:
    """Flask's rule and the method of each route."""
    return {(rule, method) for rule, method in _told()[0]}


def document() -> dict[str, Any]:
    found: dict[str, Any] = _told()[1]
    return found
