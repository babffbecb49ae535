"""An S3 server, and the identity that Thaw has there.  Every component that speaks S3 uses this module.

botocore finds the credentials (environment, profile, role of a web identity, of a container or of an instance), renews
those that expire before they are used, and signs.  The command line moves its bytes with botocore's client.  fetchd and
the object transport have HTTP code of their own: fetchd reads weights straight into its slabs, and the transport sends
many small requests, in which botocore's overhead would be most of the time (docs/lab-log.md).  This module reads the
XML that a server sends them.  No key, secret or token gets into an error: a message of a server or a program about
credentials may repeat them, so an error contains only the code of such a message.
"""

from __future__ import annotations

import ipaddress
import os
import re
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import urlsplit

import botocore.config
import botocore.session
from botocore import UNSIGNED
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    PartialCredentialsError,
    ProfileNotFound,
)

from thaw.errors import PlatformError, ProtocolError, StoreUnavailable, ThawError

_DEFAULT_REGION: Final = "us-east-1"
_CODE: Final = re.compile(r"\w{1,80}")
_NOBODY_S: Final = 60.0
"""After a search that found no credentials, the next search comes after this time.  An instance may get its role late,
and a machine that is not at Amazon takes a second to find that it has none.
"""
_OF_NO_SHELL: Final = {
    "profile": (None, None, None, None),
    "config_file": (None, None, os.devnull, None),
    "credentials_file": (None, None, os.devnull, None),
}
"""These replace the shell's variables that name a profile and its files."""
_HINT: Final = "see 'Credentials for S3' in docs/fetchd.md"
_ROLES: Final = botocore.config.Config(
    connect_timeout=5, read_timeout=10, retries={"mode": "standard", "max_attempts": 2}
)
"""The limits for requests to the service that gives a role.  They are short, because the read of a model waits."""
_CREDENTIAL_ERRORS: Final = (BotoCoreError, ClientError, OSError, RuntimeError, ValueError)
"""The errors of finding and renewing credentials.  They include a missing file, credentials that have expired although
they were renewed just now, and an answer that cannot be read.
"""
_PASSING: Final = (EndpointConnectionError, HTTPClientError, CredentialRetrievalError, OSError, RuntimeError)
"""The errors among them that may not occur at the next try: the service that gives roles does not answer, or a file is
not there yet.
"""


class S3Access:
    """Access to one server with one identity.  Thread-safe."""

    def __init__(
        self,
        endpoint: str = "",
        region: str = "",
        *,
        key_id: str = "",
        secret: str = "",
        token: str = "",
        profile: str = "",
        anonymous: bool = False,
    ) -> None:
        """Without ``endpoint`` the server is Amazon's server of the region.  Without ``region`` the region is the
        profile's, or us-east-1.  Without ``key_id`` the credentials are those that botocore finds, in ``profile`` if it
        is given.  An ``anonymous`` identity has none.

        With ``key_id``, and for an anonymous identity, the profile and the files that the shell names are ignored.
        Raises PlatformError when the profile cannot be used.
        """
        own = dict(_OF_NO_SHELL) if key_id or anonymous else None
        self._session = botocore.session.Session(session_vars=own, profile=profile or None)
        self._session.set_default_client_config(_ROLES)
        self._anonymous = anonymous
        if key_id:
            self._session.set_credentials(key_id, secret, token or None)
        try:
            self.region = region or self._session.get_config_variable("region") or _DEFAULT_REGION
        except _CREDENTIAL_ERRORS as e:
            raise credential_error(e) from None
        self._session.set_config_variable("region", self.region)  # the STS that gives a role uses it, too
        self._given_endpoint = endpoint or None
        self.endpoint = (endpoint or _of_amazon(self.region)).rstrip("/")
        self._lock = threading.Lock()
        self._credentials: Any = None
        self._nobody_until_s = 0.0  # monotonic

    @staticmethod
    def from_environment(env: Mapping[str, str]) -> S3Access:
        """Access to the server that ``env`` names.  The credentials are always those of this process."""
        return S3Access(env.get("THAW_S3_ENDPOINT", ""), env.get("AWS_REGION", ""))

    def prepare(self) -> None:
        """Find the credentials for later requests.  Raises the errors of :meth:`sign`."""
        self._current()

    def sign(self, method: str, url: str, headers: Mapping[str, str], body: bytes = b"") -> dict[str, str]:
        """Return the headers to send.  Without credentials they stay unsigned, for a server that needs no signature.

        Raises StoreUnavailable if another try may find the credentials, PlatformError if it cannot.
        """
        credentials = self._current()
        if credentials is None:
            return dict(headers)
        request = AWSRequest(method=method, url=url, headers=dict(headers), data=body)
        S3SigV4Auth(credentials, "s3", self.region).add_auth(request)
        return {name: str(value) for name, value in request.headers.items()}

    def client(self) -> Any:
        """A botocore client, for requests that need no HTTP code of their own.  Raises the errors of :meth:`sign`."""
        config = botocore.config.Config(
            signature_version=None if self._current() else UNSIGNED,
            proxies={} if _is_loopback(self.endpoint) else None,  # None: http_proxy and no_proxy decide
            retries={"mode": "standard", "max_attempts": 3},
            s3={"addressing_style": "path"},
            connect_timeout=10,
            read_timeout=60,
            max_pool_connections=8,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            ignore_configured_endpoint_urls=True,
        )
        return self._session.create_client(
            "s3", region_name=self.region, endpoint_url=self._given_endpoint, config=config
        )

    def _current(self) -> Any:
        """Key, secret and token for one request, renewed if they are about to expire; None without credentials."""
        try:
            credentials = self._find()
            return None if credentials is None else credentials.get_frozen_credentials()
        except _CREDENTIAL_ERRORS as e:
            raise credential_error(e) from None  # the cause may contain a secret, which must not be printed

    def _find(self) -> Any:
        """Find the credentials once and keep them: credentials that expire renew themselves."""
        if self._credentials is not None or self._anonymous:
            return self._credentials
        with self._lock:
            if self._credentials is None and time.monotonic() >= self._nobody_until_s:
                self._credentials = self._session.get_credentials()
                self._nobody_until_s = time.monotonic() + _NOBODY_S
            return self._credentials


@dataclass(frozen=True, slots=True)
class ListedObject:
    key: str
    n_bytes: int
    modified_wall_s: float


def read_listing(body: bytes) -> tuple[list[ListedObject], bool]:
    """The objects of one page of ListObjectsV2, and whether more pages follow.  Raises ProtocolError."""
    try:
        root = _parse(body)
        found = [
            ListedObject(
                _text(each, "Key"),
                int(_text(each, "Size")),
                datetime.fromisoformat(_text(each, "LastModified")).timestamp(),
            )
            for each in root.iterfind("{*}Contents")
        ]
        return found, root.findtext("{*}IsTruncated") == "true"
    except (ElementTree.ParseError, ValueError) as e:
        raise ProtocolError(f"the store's listing cannot be read: {e}") from e


def read_refusal(body: bytes) -> str:
    """The error code in a server's answer, like :func:`refusal`; empty if the answer has none."""
    try:
        code = _parse(body).findtext("{*}Code") or ""
    except (ElementTree.ParseError, ValueError):
        return ""
    return code if _CODE.fullmatch(code) else ""


def _parse(body: bytes) -> ElementTree.Element:
    """Raises ParseError, and ValueError for a document type, which could define entities that expand without end."""
    text = body.decode()
    if "<!DOCTYPE" in text:
        raise ValueError("it has a document type")
    return ElementTree.fromstring(text)  # noqa: S314  without a document type, it can only be malformed


def _text(element: ElementTree.Element, name: str) -> str:
    found = element.findtext(f"{{*}}{name}")
    if found is None:
        raise ProtocolError(f"the store lists an object without {name}")
    return found


def refusal(e: ClientError) -> str:
    """The error code of a server's refusal.  The rest of the answer may repeat a token, so it is not used."""
    return str(e.response.get("Error", {}).get("Code", "")) or "no reason given"


def credential_error(e: Exception) -> ThawError:
    """Translate ``e`` into an error of Thaw: StoreUnavailable if another try may help, else PlatformError."""
    text = f"the credentials for S3 cannot be had: {_why(e)}"
    if isinstance(e, ClientError):
        status = int(e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        passing = status >= 500 or status == 429
    else:
        passing = isinstance(e, _PASSING)
    return StoreUnavailable(text, hint=_HINT) if passing else PlatformError(text, hint=_HINT)


def _why(e: Exception) -> str:
    if isinstance(e, ClientError):
        return f"{e.operation_name}: {refusal(e)}"
    if isinstance(e, (ProfileNotFound, PartialCredentialsError, EndpointConnectionError, HTTPClientError)):
        return str(e)  # their text names a profile, a variable or an address
    if isinstance(e, OSError) and e.strerror:
        return f"{e.filename or type(e).__name__}: {e.strerror}"
    return type(e).__name__


def _of_amazon(region: str) -> str:
    return f"https://s3.{region}.amazonaws.com" + (".cn" if region.startswith("cn-") else "")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
