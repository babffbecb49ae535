"""The platform's HTTP API as the commands use it.  A refusal of the API becomes an :class:`ApiError`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import requests

from thaw.cli.platform_api.property_file import Target
from thaw.cli.platform_api.unreachable import no_api, unreachable
from thaw.errors import BadRequest, ThawError, Unavailable

CONNECT_TIMEOUT_S = 5.0
CA_VARIABLE = "SSL_CERT_FILE"  # as with wsk and every other program that is written in Go
READ_TIMEOUT_S = 3700.0
"""The timeout is above the longest time limit of a function, so that the server decides when a call is over."""


class ApiError(ThawError):
    """A refusal of the API.  The command's exit code is made of its HTTP status, as wsk does."""

    def __init__(self, status: int, message: str, *, body: object = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.http_status = status
        self.body = body


_HINTS = {
    401: "check the key: thaw property get --auth",
    403: "this key's namespace may not do that: thaw namespace list",
    404: "thaw action list and thaw activation list show what exists",
    409: "thaw action update changes what exists",
    429: "wait a moment and try again",
    503: "is a host up?  thaw host list, thaw dev status",
}


class Client:
    def __init__(
        self,
        target: Target,
        *,
        insecure: bool = False,
        tell: Callable[[requests.Response, bool], None] | None = None,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        """``insecure``: take any certificate.  ``tell`` is called with every answer, and whether it is a stream."""
        self._target, self._tell, self._read_timeout_s = target, tell, read_timeout_s
        self._session = requests.Session()
        user, _, key = target.require_auth().partition(":")
        self._session.auth = (user, key)
        self._session.trust_env = False  # use no proxy to the platform, and no .netrc instead of the key
        self._session.verify = os.environ.get(CA_VARIABLE) or True
        if target.cert:
            self._session.cert = (target.cert, target.key) if target.key else target.cert
        if insecure:
            import urllib3

            self._session.verify = False
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)

    @property
    def apihost(self) -> str:
        return self._target.apihost

    @property
    def auth(self) -> str:
        """The API key, for a feed that fires a trigger with it."""
        return self._target.require_auth()

    def get(self, path: str, **params: object) -> Any:
        return self._json("GET", path, params)

    def post(self, path: str, body: object, **params: object) -> Any:
        return self._json("POST", path, params, body)

    def put(self, path: str, body: object, **params: object) -> Any:
        return self._json("PUT", path, params, body)

    def delete(self, path: str, body: object = None, **params: object) -> Any:
        return self._json("DELETE", path, params, body)

    def invoke(self, path: str, body: object, **params: object) -> tuple[int, Any]:
        """Return status and body.  The record of a failed run is an answer here, not an error."""
        response = self._request("POST", path, params, body)
        content = _decode(response)
        if response.ok or (response.status_code in (500, 502) and not _is_api_error(content)):
            return response.status_code, content
        raise _error(response.status_code, content)

    @contextmanager
    def stream(self, path: str, body: object) -> Iterator[requests.Response]:
        response = self._request("POST", path, {}, body, stream=True)
        try:
            if not response.ok:
                raise _error(response.status_code, _decode(response))
            yield response
        except requests.RequestException as e:
            raise Unavailable(
                f"the connection broke before the answer ended: {e}", hint="thaw activation list shows how it ended"
            ) from e
        finally:
            response.close()

    def _json(self, method: str, path: str, params: Mapping[str, object], body: object = None) -> Any:
        response = self._request(method, path, params, body)
        content = _decode(response)
        if not response.ok:
            raise _error(response.status_code, content)
        if isinstance(content, str) and content:
            raise no_api(self._target.apihost, response.status_code)
        return content

    def _request(
        self, method: str, path: str, params: Mapping[str, object], body: object = None, *, stream: bool = False
    ) -> requests.Response:
        url = self._target.apihost + (path if path.startswith("/") else f"/api/v1/namespaces/_/{path}")
        query = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in params.items() if v is not None}
        try:
            response = self._session.request(
                method, url, params=query, json=body, stream=stream, timeout=(CONNECT_TIMEOUT_S, self._read_timeout_s)
            )
        except (requests.exceptions.InvalidJSONError, UnicodeError) as e:  # the server has not been asked
            problem = f"what was given cannot be sent: {e}"
            raise BadRequest(problem, hint="numbers must be finite, names and keys must be text") from e
        except (requests.RequestException, OSError) as e:  # OSError: a certificate's file that is not there
            raise unreachable(self._target.apihost, e) from e
        if self._tell is not None:
            self._tell(response, stream)
        return response


def action_path(name: str) -> str:
    """``chat``, ``pkg/chat``, ``/ns/chat`` or ``/ns/pkg/chat`` → the path of the action."""
    return entity_path("actions", name)


def entity_path(kind: str, name: str) -> str:
    """The path of one of the actions, packages, triggers or rules; without a name the path of their list."""
    if name.startswith("/"):
        namespace, _, rest = name[1:].partition("/")
        return f"/api/v1/namespaces/{_quoted(namespace, '')}/{kind}{'/' if rest else ''}{_quoted(rest)}"
    return f"{kind}/{_quoted(name)}" if name else kind


def _quoted(name: str, safe: str = "/") -> str:
    """A word of the command line may have bytes that are no UTF-8; the API says that there is no such name."""
    return quote(name, safe, errors="surrogateescape")


def _decode(response: requests.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def _is_api_error(content: object) -> bool:
    """True for ``{"error":…,"code":…}``.  The record of a failed run never has ``code`` beside ``error``."""
    return not isinstance(content, dict) or ("error" in content and "code" in content)


def _error(status: int, content: Any) -> ApiError:
    message, hint = f"HTTP {status}", ""
    if isinstance(content, dict):
        inner = content.get("error", message)
        message = str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
        hint = str((inner if isinstance(inner, dict) else content).get("hint") or "")
    return ApiError(status, message.strip(), body=content, hint=hint or _HINTS.get(status, ""))
