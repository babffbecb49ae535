"""TLS to the relay server, as the options of a ``rediss://`` address say (the names are redis-py's)."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from thaw.errors import PlatformError

TLS_SCHEME: Final = "rediss"
_DEFAULT_PORT: Final = 6379
_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


@dataclass(frozen=True, slots=True)
class RelayEndpoint:
    """Where a host finds a relay server.  Each file is a path that is the same on every host; empty: not given."""

    host: str
    port: int
    is_tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""

    def context(self) -> ssl.SSLContext:
        """Trusts the CA file, or the host's own authorities.  Raises PlatformError for files that cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.certificate_file:
                context.load_cert_chain(self.certificate_file, self.key_file or None)
        except OSError as e:  # ssl.SSLError is one
            raise PlatformError(f"the relay server's certificate files cannot be used: {e}") from e
        return context


def endpoint_of(address: str) -> RelayEndpoint:
    """Return the parts of ``redis://host:port/db`` or ``rediss://host:port/db?ssl_ca_certs=FILE``.

    Raises PlatformError for another scheme, and for an option of TLS that is not known: to leave one out could mean to
    trust everybody.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("redis", TLS_SCHEME) or parts.hostname is None:
        raise PlatformError(
            f"a container cannot be given a relay server with the scheme {parts.scheme!r}",
            hint="use redis://host:port or rediss://host:port",
        )
    options = dict(parse_qsl(parts.query))
    if parts.scheme == TLS_SCHEME and (unknown := sorted(o for o in options if o not in _FILES)):
        raise PlatformError(
            f"the relay server's address has the option {unknown[0]}", hint=f"known are {', '.join(_FILES)}"
        )
    files = [options.get(name, "") for name in _FILES] if parts.scheme == TLS_SCHEME else ["", "", ""]
    return RelayEndpoint(parts.hostname, parts.port or _DEFAULT_PORT, parts.scheme == TLS_SCHEME, *files)
