"""Where packages come from: the operator's setting, or pip's own configuration.

uv does not read pip's configuration, so it is given the same by its environment.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

OFF: Final = "off"
_PIP_S: Final = 30.0
_KEPT: Final = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE")
_UV_NAME: Final = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
_SEPARATOR: Final = {"UV_FIND_LINKS": ","}


def index_environment(setting: str) -> Mapping[str, str]:
    """uv's variables for the index, and the machine's way to it."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    if setting:
        return {**kept, "UV_DEFAULT_INDEX": setting}
    found = {**from_pip(_pip_config()), **kept}
    if "UV_INDEX" in found:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip's rule: the best version of all its indexes
    return found


def from_pip(config: str) -> Mapping[str, str]:
    """uv's variables for the output of ``pip config list``.  Lines of the environment come after those of files, and
    have precedence."""
    found: dict[str, str] = {}
    for line in config.splitlines():
        key, _, value = line.partition("=")
        variable = _UV_NAME.get(key.rpartition(".")[2])
        if variable is None:
            continue
        try:
            plain = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            continue
        found[variable] = _SEPARATOR.get(variable, " ").join(str(plain).split())
    return found


def _pip_config() -> str:
    """Empty where there is no pip: uv then asks PyPI."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
