"""wsk's property file: ``NAME=value`` lines.

The commands read the file that WSK_CONFIG_FILE names, else ~/.wskprops, else the dev platform's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from thaw.errors import BadRequest, Unauthorized

NAMES = ("APIHOST", "AUTH", "NAMESPACE", "APIVERSION", "CERT", "KEY")
_DEFAULT_APIHOST = "http://127.0.0.1:3233"
_API_PATH = re.compile(r"(/api(/v1)?|/v1)\Z")


@dataclass(frozen=True, slots=True)
class Target:
    """The platform that the CLI uses, and the key for it."""

    apihost: str
    auth: str
    source: str  # the file, for messages
    cert: str = ""  # a client's certificate (PEM), and its key
    key: str = ""

    def require_auth(self) -> str:
        if not self.auth:
            raise Unauthorized("no API key is set", hint="thaw dev up starts a platform; thaw property set --auth KEY")
        return self.auth


def read_properties(path: Path) -> dict[str, str]:
    """The properties in a file; empty if the file does not exist.  Like wsk, it skips comments and lines without =."""
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    pairs = (line.partition("=") for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {name.strip().upper(): value.strip() for name, equals, value in pairs if equals}


def write_properties(path: Path, properties: Mapping[str, str]) -> None:
    from thaw.dev.layout import write_private

    write_private(path, "".join(f"{name}={value}\n" for name, value in properties.items()).encode())


def user_file() -> Path:
    """The file that ``property set`` writes."""
    override = os.environ.get("WSK_CONFIG_FILE")
    return Path(override) if override else Path.home() / ".wskprops"


def effective_file() -> Path:
    path = user_file()
    if path.exists() or "WSK_CONFIG_FILE" in os.environ:
        return path
    from thaw.dev.layout import default_layout

    dev = default_layout().wskprops
    return dev if dev.exists() else path


def resolve(apihost: str | None, auth: str | None, cert: str | None = None, key: str | None = None) -> Target:
    """Options have precedence over the file, and the file over the default."""
    path = effective_file()
    found = read_properties(path)
    return Target(
        normal_apihost(apihost or found.get("APIHOST") or _DEFAULT_APIHOST),
        auth or found.get("AUTH", ""),
        str(path),
        cert or found.get("CERT", ""),
        key or found.get("KEY", ""),
    )


def normal_apihost(text: str) -> str:
    """The URL for ``host[:port]`` or a URL.  The default scheme is https, as in wsk; for this machine it is http.  The
    path of the API itself is left out: people copy it from an SDK's base URL."""
    if "://" not in text:
        host = text.partition("/")[0].rsplit(":", 1)[0]
        text = ("http://" if host in ("localhost", "127.0.0.1", "[::1]") else "https://") + text
    if not text.startswith(("http://", "https://")):
        raise BadRequest(f"APIHOST {text!r} is not http or https", hint="thaw property set --apihost http://HOST:PORT")
    return _API_PATH.sub("", text.rstrip("/"))
