"""The only file that imports the kubernetes client: objects of one kind as values, the cluster's errors as ours.

Every call is bounded.  The package finds the credentials (a pod's, or those of a kubeconfig), speaks TLS and knows how
the API is called.  Bodies are sent and received as JSON: the package's models would cost a start some milliseconds and
add nothing.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import urllib3.exceptions
from kubernetes import client as api
from kubernetes import config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from thaw.errors import PlatformError, Unavailable

T = TypeVar("T")

CALL_S: Final = 30.0
WATCH_S: Final = 240.0
"""The cluster ends a watch after this time, so a connection that died silently is noticed soon afterwards."""

_LATE_S: Final = 20.0
_LONGEST_EVENT: Final = 4 << 20  # etcd holds no object above 1.5 MiB
_GONE: Final = 410
_OVERLOADED: Final = (429, 503)
JSON: Final = "application/json"
MERGE: Final = "application/merge-patch+json"
MERGE_BY_NAME: Final = "application/strategic-merge-patch+json"
EXPIRED: Final = "EXPIRED"


@dataclass(frozen=True, slots=True)
class Event(Generic[T]):
    """``kind``: ADDED, MODIFIED, DELETED, BOOKMARK (only the version counts), or EXPIRED: the cluster no longer has the
    changes since the version from which we wanted to go on, and a list must be read instead."""

    kind: str
    version: str = ""
    what: T | None = None


class Collection(Generic[T]):
    """The objects of one kind in one namespace.  Every method raises Unavailable when the API server cannot be reached
    or is overloaded, or when others write at the same time; PlatformError when it refuses a request."""

    def __init__(
        self, path: str, noun: str, component: str, see: Callable[[Mapping[str, Any]], T], kubeconfig: str = ""
    ) -> None:
        """``path``: of the API.  ``noun`` names the objects in errors, ``component`` who asks.  ``see`` makes a value
        of an object's JSON.  Raises PlatformError when there are no credentials."""
        self._path, self._noun, self._component, self._see = path, noun, component, see
        configuration = api.Configuration()
        try:
            if kubeconfig:
                config.load_kube_config(kubeconfig, client_configuration=configuration)
            else:
                config.load_incluster_config(client_configuration=configuration)
        except ConfigException as e:
            raise PlatformError(
                f"there are no credentials of a cluster: {e}", hint=f"run the {component} in a pod, or set KUBECONFIG"
            ) from e
        configuration.retries = False  # our callers know what may be repeated, and for how long
        self._api = api.ApiClient(configuration)
        self._streams = api.ApiClient(configuration)
        self._watch: urllib3.HTTPResponse | None = None
        self._watching = threading.Lock()

    def list(self, selector: str = "", name: str = "") -> tuple[Sequence[T], str]:
        """The objects, and the version from which a watch misses nothing.  ``name``: no more than this one."""
        query = [("labelSelector", selector)] if selector else []
        query += [("fieldSelector", f"metadata.name={name}")] if name else []
        what = f"list {self._noun}"
        with self._translated(what):
            found = self.call(what, "GET", "", query=query)
            return [self._see(each) for each in found["items"]], str(found["metadata"]["resourceVersion"])

    def watch(self, selector: str, version: str) -> Iterator[Event[T]]:
        """Return the events of the objects after ``version``, until the stream ends or is cut, or :meth:`end_watch`
        ends it.  Returns when the cluster has begun to answer.  A PlatformError that is not Unavailable means that the
        cluster cannot go on from this version."""
        query = [
            *([("labelSelector", selector)] if selector else []),
            ("watch", "true"),
            ("resourceVersion", version),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(int(WATCH_S))),
        ]
        with self._translated(f"watch {self._noun}"):
            try:
                stream = self._request(self._streams, "GET", "", query, timeout_s=WATCH_S + _LATE_S, preload=False)
            except ApiException as e:
                if e.status == _GONE:
                    return iter([Event(EXPIRED)])
                if e.status < 500 or e.status in _OVERLOADED:
                    raise
                raise PlatformError(f"cannot watch {self._noun}: {_status(e)[1]}") from e
        with self._watching:
            self._watch = stream
        return self._events(stream)

    def _events(self, stream: urllib3.HTTPResponse) -> Iterator[Event[T]]:
        try:
            with self._translated(f"watch {self._noun}"):
                for line in _lines(stream):
                    yield self._event(json.loads(line))
        except Unavailable:
            return  # it was cut; whether the API server is away, the next stream will show
        finally:
            with self._watching:
                self._watch = None
            stream.close()

    def _event(self, plain: Mapping[str, Any]) -> Event[T]:
        kind, what = str(plain["type"]), plain["object"]
        if kind == "ERROR":
            if what.get("code") == _GONE:
                return Event(EXPIRED)
            raise PlatformError(f"the cluster ended the watch: {what.get('message', '')}")
        version = str(what["metadata"]["resourceVersion"])
        return Event(kind, version) if kind == "BOOKMARK" else Event(kind, version, self._see(what))

    def end_watch(self) -> None:
        """Any thread may call this."""
        with self._watching:
            if self._watch is not None:
                with contextlib.suppress(OSError, ValueError):  # it has just ended
                    self._watch.shutdown()

    def close(self) -> None:
        for one in (self._api, self._streams):
            one.rest_client.pool_manager.clear()
            one.close()

    def call(
        self,
        what: str,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Any = None,
        content: str = JSON,
        timeout_s: float = CALL_S,
        of: str = "",
    ) -> Mapping[str, Any]:
        """``path``: below the collection's, or below ``of``, another one's.  ``what`` is done, for errors."""
        with self._translated(what):
            found: Mapping[str, Any] = self._request(
                self._api, method, path, query, body, content, timeout_s=timeout_s, of=of
            )
        return found

    def uid(self, what: str, path: str) -> str:
        """Return the uid of another object, at ``path`` of the API."""
        with self._translated(what):
            return str(self.call(what, "GET", "", of=path)["metadata"]["uid"])

    def ask(
        self,
        what: str,
        method: str,
        path: str,
        none_for: Set[str],
        *,
        body: Any = None,
        content: str = JSON,
        timeout_s: float = CALL_S,
    ) -> Mapping[str, Any] | None:
        """The same for a call that may find nothing: ``none_for`` are the cluster's reasons for that."""
        with self._translated(what):
            try:
                found: Mapping[str, Any] = self._request(
                    self._api, method, path, (), body, content, timeout_s=timeout_s
                )
            except ApiException as e:
                if _status(e)[0] not in none_for:
                    raise
                return None
        return found

    def _request(
        self,
        through: Any,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]],
        body: Any = None,
        content: str = JSON,
        *,
        timeout_s: float = CALL_S,
        preload: bool = True,
        of: str = "",
    ) -> Any:
        return through.call_api(
            f"{of or self._path}{path}",
            method,
            query_params=[*query],
            header_params={"Accept": JSON, "Content-Type": content},
            body=body,
            auth_settings=["BearerToken"],
            response_type="object",
            _return_http_data_only=True,
            _preload_content=preload,
            _request_timeout=(min(CALL_S, timeout_s), timeout_s),
        )

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except ApiException as e:
            raise self._refusal(what, e) from e
        except (urllib3.exceptions.HTTPError, OSError) as e:
            raise Unavailable(
                f"cannot {what}: the API server is away ({e})", hint="see the cluster's control plane"
            ) from e
        except (ValueError, KeyError, TypeError) as e:
            raise PlatformError(f"cannot {what}: the API server's answer is not what it should be ({e!r})") from e

    def _refusal(self, what: str, e: ApiException) -> PlatformError:
        message, account = _status(e)[1], f"the {self._component}'s service account"
        if e.status == 404:
            return PlatformError(f"cannot {what}: {message}", hint="see THAW_POD_NAMESPACE and the cluster's version")
        if e.status == 409:
            return Unavailable(f"cannot {what}: {message}", hint="others changed the same object; it is tried again")
        if e.status == 401:
            return PlatformError(f"cannot {what}: {message}", hint=f"{account} token is not valid")
        if e.status == 403 and "exceeded quota" in message:
            return PlatformError(
                f"cannot {what}: {message}", hint="raise the namespace's ResourceQuota, or end what uses it"
            )
        if e.status == 403 and "cannot" in message and "admission webhook" not in message:
            return PlatformError(f"cannot {what}: {message}", hint=f"give {account} this permission")
        if e.status in (0, 429) or e.status >= 500:
            return Unavailable(f"cannot {what}: {message}", hint="see the cluster's control plane")
        return PlatformError(f"cannot {what}: the cluster refused it: {message}", hint="ask who runs the cluster")


def _lines(stream: urllib3.HTTPResponse) -> Iterator[bytes]:
    part = b""
    for data in stream.stream(decode_content=True):
        *lines, part = (part + data).split(b"\n")
        yield from (line for line in lines if line)
        if len(part) > _LONGEST_EVENT:
            raise PlatformError(f"the cluster sent an event of more than {_LONGEST_EVENT >> 20} MiB")


def _status(e: ApiException) -> tuple[str, str]:
    """The cluster's own reason and sentence: an admission webhook's text is in it."""
    body = e.body.decode("utf-8", "replace") if isinstance(e.body, bytes) else str(e.body or "")
    try:
        plain = json.loads(body)
        return str(plain.get("reason", "")), str(plain["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", f"{e.status} {e.reason} {body[:200]}".strip()
