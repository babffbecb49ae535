"""The only file that imports the kubernetes client: a cluster's answers as values, its errors as ours.

Every call is bounded.  The package finds the credentials (a pod's, or those of a kubeconfig), speaks TLS and knows the
API's paths.  Bodies go and come as JSON: its models would cost a start some milliseconds and say no more.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import urllib3.exceptions
from kubernetes import client as api
from kubernetes import config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from invoker.drivers.kubernetes.seen import Seen, seen
from invoker.drivers.kubernetes.spec import Owner
from thaw.errors import Conflict, NotFound, PlatformError, Unavailable

CALL_S: Final = 30.0
WATCH_S: Final = 240.0
"""The cluster ends a watch after this time, so a connection that died without a word is noticed soon afterwards."""

_LATE_S: Final = 20.0
_LONGEST_EVENT: Final = 4 << 20  # etcd holds no object above 1.5 MiB
_GONE: Final = 410
_JSON: Final = "application/json"
_MERGE: Final = "application/merge-patch+json"
_MERGE_BY_NAME: Final = "application/strategic-merge-patch+json"
EXPIRED: Final = "EXPIRED"


@dataclass(frozen=True, slots=True)
class PodEvent:
    """``kind``: ADDED, MODIFIED, DELETED, BOOKMARK (only the version counts), or EXPIRED: what happened since the
    version from which we wanted to go on is forgotten, and a list must be read instead."""

    kind: str
    version: str = ""
    pod: Seen | None = None


@dataclass(frozen=True, slots=True)
class NodePod:
    """The pod of this process.  ``host_paths``: the directories that it has from the node, {path here: path there}."""

    owner: Owner
    host_paths: Mapping[str, str]


class Cluster:
    """Every method raises Unavailable when the API server cannot be reached or is overloaded, PlatformError for what it
    refuses."""

    def __init__(self, namespace: str, kubeconfig: str = "") -> None:
        """Raises PlatformError when there are no credentials."""
        self._namespace = namespace
        configuration = api.Configuration()
        try:
            if kubeconfig:
                config.load_kube_config(kubeconfig, client_configuration=configuration)
            else:
                config.load_incluster_config(client_configuration=configuration)
        except ConfigException as e:
            raise PlatformError(
                f"there are no credentials of a cluster: {e}", hint="run the invoker in a pod, or set KUBECONFIG"
            ) from e
        configuration.retries = False  # our callers know what may be repeated, and for how long
        self._api = api.ApiClient(configuration)
        self._streams = api.ApiClient(configuration)
        self._watch: urllib3.HTTPResponse | None = None
        self._watching = threading.Lock()

    def create(self, pod: Mapping[str, Any]) -> Seen:
        """Raises Conflict when a pod of this name exists."""
        return seen(self._call("create the pod", "POST", "", body=pod))

    def get(self, name: str) -> Seen:
        """Raises NotFound."""
        return seen(self._call("read the pod", "GET", f"/{name}"))

    def node_pod(self, name: str) -> NodePod:
        """Raises NotFound."""
        return _node_pod(self._call("read this invoker's own pod", "GET", f"/{name}"))

    def list(self, selector: str) -> tuple[Sequence[Seen], str]:
        """The pods, and the version from which a watch misses nothing."""
        found = self._call("list pods", "GET", "", query=[("labelSelector", selector)])
        return [seen(pod) for pod in found["items"]], str(found["metadata"]["resourceVersion"])

    def patch(self, name: str, body: Mapping[str, Any]) -> Seen:
        """Merge ``body`` into the pod.  Raises NotFound, and Conflict when the body names another resourceVersion."""
        return seen(self._call("patch the pod", "PATCH", f"/{name}", body=body, content=_MERGE))

    def resize(self, name: str, body: Mapping[str, Any]) -> None:
        """Merge ``body`` into the pod, lists by their items' names.  Raises NotFound for a cluster that cannot resize
        running pods (before 1.33)."""
        self._call("limit the container", "PATCH", f"/{name}/resize", body=body, content=_MERGE_BY_NAME)

    def delete(self, name: str, grace_s: int, *, version: str = "") -> None:
        """Ask for the pod's end: SIGTERM, and SIGKILL after ``grace_s``.  Raises NotFound, and Conflict when the pod
        has another version than ``version``."""
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": grace_s}
        if version:
            body["preconditions"] = {"resourceVersion": version}
        self._call("delete the pod", "DELETE", f"/{name}", body=body)

    def watch(self, selector: str, version: str) -> Iterator[PodEvent]:
        """What happens to pods after ``version``, until the cluster or :meth:`end_watch` ends the stream.  Returns when
        the cluster has begun to answer."""
        query = [
            ("labelSelector", selector),
            ("watch", "true"),
            ("resourceVersion", version),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(int(WATCH_S))),
        ]
        with _translated("watch pods"):
            try:
                stream = self._request(self._streams, "GET", "", query, timeout_s=WATCH_S + _LATE_S, preload=False)
            except ApiException as e:
                if e.status != _GONE:
                    raise
                return iter([PodEvent(EXPIRED)])
        with self._watching:
            self._watch = stream
        return self._events(stream)

    def _events(self, stream: urllib3.HTTPResponse) -> Iterator[PodEvent]:
        try:
            with _translated("watch pods"):
                for line in _lines(stream):
                    yield _event(json.loads(line))
        finally:
            with self._watching:
                self._watch = None
            stream.close()

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

    def _call(
        self,
        what: str,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Any = None,
        content: str = _JSON,
    ) -> Mapping[str, Any]:
        with _translated(what):
            found: Mapping[str, Any] = self._request(self._api, method, path, query, body, content)
        return found

    def _request(
        self,
        through: Any,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]],
        body: Any = None,
        content: str = _JSON,
        *,
        timeout_s: float = CALL_S,
        preload: bool = True,
    ) -> Any:
        return through.call_api(
            f"/api/v1/namespaces/{self._namespace}/pods{path}",
            method,
            query_params=list(query),
            header_params={"Accept": _JSON, "Content-Type": content},
            body=body,
            auth_settings=["BearerToken"],
            response_type="object",
            _return_http_data_only=True,
            _preload_content=preload,
            _request_timeout=(CALL_S, timeout_s),
        )


def _lines(stream: urllib3.HTTPResponse) -> Iterator[bytes]:
    part = b""
    for data in stream.stream(decode_content=True):
        *lines, part = (part + data).split(b"\n")
        yield from (line for line in lines if line)
        if len(part) > _LONGEST_EVENT:
            raise PlatformError(f"the cluster sent an event of more than {_LONGEST_EVENT >> 20} MiB")


def _event(plain: Mapping[str, Any]) -> PodEvent:
    kind, what = str(plain["type"]), plain["object"]
    if kind == "ERROR":
        if what.get("code") == _GONE:
            return PodEvent(EXPIRED)
        raise Unavailable(f"the cluster ended the watch: {what.get('message', '')}")
    version = str(what["metadata"]["resourceVersion"])
    return PodEvent(kind, version) if kind == "BOOKMARK" else PodEvent(kind, version, seen(what))


def _node_pod(pod: Mapping[str, Any]) -> NodePod:
    """The owner is what made the pod (a DaemonSet): it outlives the pod, as the containers do when it is replaced."""
    meta, spec = pod["metadata"], pod["spec"]
    maker = next((o for o in meta.get("ownerReferences") or [] if o.get("controller")), None)
    owner = (
        Owner(maker["apiVersion"], maker["kind"], maker["name"], maker["uid"])
        if maker is not None
        else Owner("v1", "Pod", meta["name"], meta["uid"])
    )
    there = {v["name"]: v["hostPath"]["path"] for v in spec.get("volumes") or [] if v.get("hostPath")}
    mounts = [m for container in spec["containers"] for m in container.get("volumeMounts") or []]
    return NodePod(owner, {m["mountPath"]: there[m["name"]] for m in mounts if m["name"] in there})


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except ApiException as e:
        raise _refusal(what, e) from e
    except (urllib3.exceptions.HTTPError, OSError) as e:
        raise Unavailable(f"cannot {what}: the API server is away ({e})", hint="see the cluster's control plane") from e
    except (ValueError, KeyError, TypeError) as e:
        raise PlatformError(f"cannot {what}: the API server's answer is not what it should be ({e!r})") from e


def _refusal(what: str, e: ApiException) -> Exception:
    message = _message(e)
    if e.status == 404:
        return NotFound(f"cannot {what}: {message}")
    if e.status == 409:
        return Conflict(f"cannot {what}: {message}")
    if e.status == 401:
        return PlatformError(f"cannot {what}: {message}", hint="the invoker's service account token is not valid")
    if e.status == 403 and "exceeded quota" in message:
        return PlatformError(
            f"cannot {what}: {message}", hint="raise the namespace's ResourceQuota, or end what uses it"
        )
    if e.status == 403 and "cannot" in message and "admission webhook" not in message:
        return PlatformError(f"cannot {what}: {message}", hint="give the invoker's service account this permission")
    if e.status in (0, 429) or e.status >= 500:
        return Unavailable(f"cannot {what}: {message}", hint="see the cluster's control plane")
    return PlatformError(f"cannot {what}: the cluster refused it: {message}", hint="ask who runs the cluster")


def _message(e: ApiException) -> str:
    """The cluster's own sentence: an admission webhook's text is in it."""
    body = e.body.decode("utf-8", "replace") if isinstance(e.body, bytes) else str(e.body or "")
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{e.status} {e.reason} {body[:200]}".strip()
