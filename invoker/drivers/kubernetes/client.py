"""The only file that imports the kubernetes client: a cluster's answers as values, its errors as ours.

Every call is bounded.  The package finds the credentials (a pod's, or those of a kubeconfig), speaks TLS and knows the
API's paths.  Bodies go and come as JSON: its models would cost a start some milliseconds and say no more.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
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
from thaw.errors import PlatformError, Unavailable

CALL_S: Final = 30.0
_EVENTS_S: Final = 2.0  # an explanation that comes later comes too late
WATCH_S: Final = 240.0
"""The cluster ends a watch after this time, so a connection that died without a word is noticed soon afterwards."""

_LATE_S: Final = 20.0
_LONGEST_EVENT: Final = 4 << 20  # etcd holds no object above 1.5 MiB
_GONE: Final = 410
_OVERLOADED: Final = (429, 503)
_JSON: Final = "application/json"
_MERGE: Final = "application/merge-patch+json"
_MERGE_BY_NAME: Final = "application/strategic-merge-patch+json"
EXPIRED: Final = "EXPIRED"
POD_NAME: Final = "THAW_POD_NAME"


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

    name: str
    uid: str
    owner: Owner
    host_paths: Mapping[str, str]


class Cluster:
    """Every method raises Unavailable when the API server cannot be reached or is overloaded, or when others write at
    the same time; PlatformError for what it refuses."""

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

    def create(self, pod: Mapping[str, Any]) -> Seen | None:
        """None when a pod of this name exists."""
        made = self._ask("create the pod", "POST", "", {"AlreadyExists"}, body=pod)
        return None if made is None else seen(made)

    def get(self, name: str) -> Seen | None:
        """None when there is no such pod."""
        found = self._ask("read the pod", "GET", f"/{name}", {"NotFound"})
        return None if found is None else seen(found)

    def node_pod(self, name: str) -> NodePod:
        return _node_pod(self._call("read this invoker's own pod", "GET", f"/{name}"))

    def list(self, selector: str) -> tuple[Sequence[Seen], str]:
        """The pods, and the version from which a watch misses nothing."""
        found = self._call("list pods", "GET", "", query=[("labelSelector", selector)])
        return [seen(pod) for pod in found["items"]], str(found["metadata"]["resourceVersion"])

    def messages(self, uid: str, reason: str) -> Sequence[str]:
        """What the node has noted of a pod for this reason."""
        query = [("fieldSelector", f"involvedObject.uid={uid},reason={reason}")]
        with _translated("list events"):
            found = self._request(self._api, "GET", "", query, timeout_s=_EVENTS_S, kind="events")
            return [str(event.get("message", "")) for event in found["items"]]

    def patch(self, name: str, body: Mapping[str, Any]) -> Seen | None:
        """Merge ``body`` into the pod.  None when there is no such pod, or none of the body's resourceVersion."""
        changed = self._ask("patch the pod", "PATCH", f"/{name}", {"NotFound", "Conflict"}, body=body, content=_MERGE)
        return None if changed is None else seen(changed)

    def resize(self, name: str, body: Mapping[str, Any]) -> Seen:
        """Merge ``body`` into the pod, lists by their items' names.  The answer says what is wanted, not what is.
        Raises PlatformError for a cluster that cannot resize running pods (before 1.33)."""
        path = f"/{name}/resize"
        return seen(self._call("limit the container", "PATCH", path, body=body, content=_MERGE_BY_NAME))

    def delete(self, name: str, grace_s: int, *, version: str = "", timeout_s: float = CALL_S) -> bool:
        """Ask for the pod's end: SIGTERM, and SIGKILL after ``grace_s``.  False when there is no such pod, or none of
        this version."""
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": grace_s}
        if version:
            body["preconditions"] = {"resourceVersion": version}
        none_for = {"NotFound", "Conflict"} if version else {"NotFound"}
        return self._ask("delete the pod", "DELETE", f"/{name}", none_for, body=body, timeout_s=timeout_s) is not None

    def watch(self, selector: str, version: str) -> Iterator[PodEvent]:
        """What happens to pods after ``version``, until the stream ends or is cut, or :meth:`end_watch` ends it.
        Returns when the cluster has begun to answer.  PlatformError, and not Unavailable: the cluster does not go on
        from this version."""
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
                if e.status == _GONE:
                    return iter([PodEvent(EXPIRED)])
                if e.status < 500 or e.status in _OVERLOADED:
                    raise
                raise PlatformError(f"cannot watch pods: {_status(e)[1]}") from e
        with self._watching:
            self._watch = stream
        return self._events(stream)

    def _events(self, stream: urllib3.HTTPResponse) -> Iterator[PodEvent]:
        try:
            with _translated("watch pods"):
                for line in _lines(stream):
                    yield _event(json.loads(line))
        except Unavailable:
            return  # it was cut; whether the API server is away, the next stream will show
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

    def _ask(
        self,
        what: str,
        method: str,
        path: str,
        none_for: Set[str],
        *,
        body: Any = None,
        content: str = _JSON,
        timeout_s: float = CALL_S,
    ) -> Mapping[str, Any] | None:
        """The same for a call that may find nothing: ``none_for`` are the cluster's reasons for that."""
        with _translated(what):
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
        content: str = _JSON,
        *,
        timeout_s: float = CALL_S,
        preload: bool = True,
        kind: str = "pods",
    ) -> Any:
        return through.call_api(
            f"/api/v1/namespaces/{self._namespace}/{kind}{path}",
            method,
            query_params=list(query),
            header_params={"Accept": _JSON, "Content-Type": content},
            body=body,
            auth_settings=["BearerToken"],
            response_type="object",
            _return_http_data_only=True,
            _preload_content=preload,
            _request_timeout=(min(CALL_S, timeout_s), timeout_s),
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
        raise PlatformError(f"the cluster ended the watch: {what.get('message', '')}")
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
    mounts = [m for container in _own_containers(spec) for m in container.get("volumeMounts") or []]
    host_paths = {m["mountPath"]: there[m["name"]] for m in mounts if m["name"] in there}
    return NodePod(str(meta["name"]), str(meta["uid"]), owner, host_paths)


def _own_containers(spec: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Ours is the one that is told its pod's name; all of them where that is told in another way."""
    containers: Sequence[Mapping[str, Any]] = spec["containers"]
    return [c for c in containers if any(e["name"] == POD_NAME for e in c.get("env") or [])] or containers


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


def _refusal(what: str, e: ApiException) -> PlatformError:
    message = _status(e)[1]
    if e.status == 404:
        return PlatformError(f"cannot {what}: {message}", hint="see THAW_POD_NAMESPACE and the cluster's version")
    if e.status == 409:
        return Unavailable(f"cannot {what}: {message}", hint="others changed the same object; it is tried again")
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


def _status(e: ApiException) -> tuple[str, str]:
    """The cluster's own reason and sentence: an admission webhook's text is in it."""
    body = e.body.decode("utf-8", "replace") if isinstance(e.body, bytes) else str(e.body or "")
    try:
        plain = json.loads(body)
        return str(plain.get("reason", "")), str(plain["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", f"{e.status} {e.reason} {body[:200]}".strip()
