"""An API server in the test's process: real HTTP with watch streams, pods in memory, and faults to order.

It refuses requests that the API's description does not allow, keeps versions as the real one does, and records every
request.  A :class:`~tests.kubernetes.kubelet.Kubelet` runs the pods.
"""

from __future__ import annotations

import copy
import json
import math
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.kubernetes.schema import problems

JSON, MERGE, BY_NAME = "application/json", "application/merge-patch+json", "application/strategic-merge-patch+json"
QUERY = {"labelSelector", "fieldSelector", "watch", "resourceVersion", "allowWatchBookmarks", "timeoutSeconds"}
NAMESPACE = "functions"
WRITES = ("POST", "PUT", "PATCH", "DELETE")


class Refusal(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message

    def status(self) -> dict[str, Any]:
        said = {"code": self.code, "reason": self.reason, "message": self.message}
        return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {}, **said}


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: Any
    is_watch: bool = False


@dataclass(frozen=True)
class Event:
    version: int
    kind: str
    pod: dict[str, Any]


class ApiServer:
    """``refuse`` is asked before each request, and may raise a Refusal.  ``on_change`` hears of each change of a pod."""

    collection = f"/api/v1/namespaces/{NAMESPACE}/pods"

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.problems: list[str] = []
        self.refuse: Callable[[Request], object] = lambda request: None
        self.on_change: Callable[[Event], None] = lambda event: None
        self.can_resize = True
        self.noted: dict[str, str] = {}  # a pod's name → its node's note on its image
        self.token = "secret-of-the-test"
        self._pods: dict[str, dict[str, Any]] = {}
        self._version = 100
        self._events: list[Event] = []
        self._forgotten = 0  # events up to this version are no more
        self._changed = threading.Condition(threading.RLock())
        self._cuts = 0
        self._watches = 0
        self._server = _Server(("127.0.0.1", 0), self)
        self.port = self._server.server_address[1]
        self._serve()

    def kubeconfig(self, directory: Path) -> str:
        path = directory / "kubeconfig"
        cluster = {"name": "t", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
        user = {"name": "t", "user": {"token": self.token}}
        context = {"name": "t", "context": {"cluster": "t", "user": "t"}}
        plain = {"clusters": [cluster], "users": [user], "contexts": [context], "current-context": "t"}
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **plain}))
        return str(path)

    # what tests and kubelets do ----------------------------------------------------------------------------------

    def pods(self) -> dict[str, dict[str, Any]]:
        with self._changed:
            return copy.deepcopy(self._pods)

    def left(self, role: str = "") -> set[str]:
        """Return the names of the functions' pods that were not deleted: of all, or of those with this role."""
        kept = {name: p["metadata"] for name, p in self.pods().items() if "deletionTimestamp" not in p["metadata"]}
        return {name for name, m in kept.items() if "labels" in m and role in ("", m["labels"].get("thaw.dev/role"))}

    def refuse_next(self, refusal: Refusal, *methods: str, path: str = "", times: float = math.inf) -> list[Request]:
        """Refuse the next requests by these methods whose path ends like this.  Return them in a list, which grows."""
        refused: list[Request] = []

        def refuse(request: Request) -> None:
            if request.method in methods and request.path.endswith(path) and len(refused) < times:
                refused.append(request)
                raise refusal

        self.refuse = refuse
        return refused

    def add_invoker(self, name: str) -> str:
        """An invoker's own pod, which no node of the test runs; its uid."""
        uid = str(uuid.uuid4())
        with self._changed:
            metadata = {"name": name, "uid": uid, "resourceVersion": str(self._version)}
            self._pods[name] = {"metadata": metadata, "spec": {"containers": []}, "status": {"phase": "Running"}}
        return uid

    def change(self, name: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Change a pod as the node or the scheduler does; nothing happens when it is gone."""
        with self._changed:
            if name in self._pods:
                change(self._pods[name])
                self._put("MODIFIED", name)

    def vanish(self, name: str) -> None:
        """The pod is no more."""
        with self._changed:
            if name in self._pods:
                self._put("DELETED", name)
                del self._pods[name]

    def cut_watches(self) -> None:
        with self._changed:
            self._cuts += 1
            self._changed.notify_all()

    def forget(self) -> None:
        """No watch can go on at an earlier version: 410."""
        with self._changed:
            self._forgotten = self._version
            self._events.clear()

    def wait_until(self, holds: Callable[[], object], deadline_s: float = 20.0) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, deadline_s), self._pods

    def wait_watched(self, n_watches: int = 1) -> None:
        self.wait_until(lambda: self._watches >= n_watches)

    def wait_pod(self, ready: Callable[[dict[str, Any]], bool]) -> None:
        self.wait_until(lambda: any(map(ready, self._pods.values())))

    def wait_request(self, matches: Callable[[Request], bool]) -> None:
        self.wait_until(lambda: any(map(matches, self.requests)))

    @property
    def writes(self) -> list[Request]:
        return [r for r in self.requests if r.method != "GET"]

    def go_away(self) -> None:
        """Stop listening and cut every connection; ``come_back`` listens at the same port again."""
        self._server.shutdown()
        self._server.server_close()
        self.cut_watches()
        self._server.cut()
        self._thread.join()

    def come_back(self) -> None:
        self._server = _Server(("127.0.0.1", self.port), self)
        self._serve()

    close = go_away

    def _serve(self) -> None:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    # what clients ask for ----------------------------------------------------------------------------------------

    def answer(self, request: Request, query: dict[str, str], content: str) -> dict[str, Any]:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
        self.refuse(request)
        name, _, sub = request.path.removeprefix(self.collection).strip("/").partition("/")
        with self._changed:
            if not request.path.startswith(self.collection):
                return self._elsewhere(request, query)
            return self._answer(request, name, sub, query, content)

    def _elsewhere(self, request: Request, query: dict[str, str]) -> dict[str, Any]:
        if request.path == f"/api/v1/namespaces/{NAMESPACE}/events":
            return self._events_of(query)
        raise Refusal(404, "NotFound", "the server could not find the requested resource")

    def _answer(self, request: Request, name: str, sub: str, query: dict[str, str], content: str) -> dict[str, Any]:
        match request.method, bool(name), sub:
            case "GET", False, "":
                return self._list(query)
            case "POST", False, "":
                return self._create(request.body, content)
            case "GET", True, "":
                return self._get(name)
            case "PATCH", True, "" | "resize":
                return self._patch(name, sub, request.body, content)
            case "DELETE", True, "":
                return self._delete(name, request.body)
        raise Refusal(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def watch(self, query: dict[str, str], send: Callable[[dict[str, Any]], None], begin: Callable[[], None]) -> None:
        """Send events until the watch is cut; ``begin`` sends the head."""
        seen = int(query["resourceVersion"])
        with self._changed:
            if seen < self._forgotten:
                raise Refusal(410, "Expired", "too old resource version")
            cuts = self._cuts
            begin()
            self._watches += 1
            self._changed.notify_all()
        while True:
            with self._changed:
                while self._cuts == cuts and self._version == seen:
                    self._changed.wait()
                if self._cuts > cuts:
                    return
                if seen < self._forgotten:
                    gone = Refusal(410, "Expired", "too old resource version")
                    send({"type": "ERROR", "object": gone.status()})
                    return
                due = [e for e in self._events if e.version > seen]
                seen = self._version
            for event in due:
                if _selected(event.pod, query):
                    send({"type": event.kind, "object": event.pod})
            send({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": str(seen)}}})

    def _list(self, query: dict[str, str]) -> dict[str, Any]:
        items = [copy.deepcopy(p) for p in self._pods.values() if _selected(p, query)]
        return {"kind": "PodList", "metadata": {"resourceVersion": str(self._version)}, "items": items}

    def _events_of(self, query: dict[str, str]) -> dict[str, Any]:
        wanted = dict(term.split("=", 1) for term in query["fieldSelector"].split(","))
        uids = {pod["metadata"]["uid"]: name for name, pod in self._pods.items()}
        said = self.noted.get(uids[wanted["involvedObject.uid"]]) if wanted["reason"] == "Pulled" else None
        return {"kind": "EventList", "items": [{"message": said}] if said else []}

    def _create(self, body: Any, content: str) -> dict[str, Any]:
        self._check(body, "V1Pod", content, {JSON})
        name = body["metadata"]["name"]
        if name in self._pods:
            raise Refusal(409, "AlreadyExists", f'pods "{name}" already exists')
        self._pods[name] = copy.deepcopy(body) | {"status": {"phase": "Pending"}}
        self._pods[name]["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": NAMESPACE}
        return self._put("ADDED", name)

    def _get(self, name: str) -> dict[str, Any]:
        if name not in self._pods:
            raise Refusal(404, "NotFound", f'pods "{name}" not found')
        return copy.deepcopy(self._pods[name])

    def _patch(self, name: str, sub: str, body: Any, content: str) -> dict[str, Any]:
        if sub == "resize" and not self.can_resize:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        self._check(body, "V1Pod", content, {BY_NAME} if sub else {MERGE}, partial=True)
        pod = self._pods.get(name) or self._get(name)
        wanted = body.get("metadata", {}).get("resourceVersion")
        if wanted is not None and wanted != pod["metadata"]["resourceVersion"]:
            raise Refusal(409, "Conflict", "the object has been modified; please apply your changes to the latest")
        if sub:
            for container in body["spec"]["containers"]:
                own = next(c for c in pod["spec"]["containers"] if c["name"] == container["name"])
                _merge(own["resources"], container["resources"])
        else:
            _merge(pod, body)
        return self._put("MODIFIED", name)

    def _delete(self, name: str, body: Any) -> dict[str, Any]:
        self._check(body, "V1DeleteOptions", JSON, {JSON})
        pod = self._pods.get(name) or self._get(name)
        wanted = (body.get("preconditions") or {}).get("resourceVersion")
        if wanted is not None and wanted != pod["metadata"]["resourceVersion"]:
            raise Refusal(409, "Conflict", "Precondition failed: ResourceVersion in precondition")
        if body["gracePeriodSeconds"] == 0 or pod["status"].get("phase") in ("Succeeded", "Failed"):
            self.vanish(name)
            return copy.deepcopy(pod)
        mark_deleted(pod, body["gracePeriodSeconds"])
        return self._put("MODIFIED", name)

    def _check(self, body: Any, kind: str, content: str, allowed: set[str], *, partial: bool = False) -> None:
        found = problems(body, kind, kind, partial=partial)
        if content not in allowed:
            found.append(f"content type {content}")
        if found:
            self.problems += found
            raise Refusal(400, "BadRequest", "; ".join(found))

    def _put(self, kind: str, name: str) -> dict[str, Any]:
        self._version += 1
        pod = self._pods[name]
        pod["metadata"]["resourceVersion"] = str(self._version)
        event = Event(self._version, kind, copy.deepcopy(pod))
        self._events.append(event)
        self._changed.notify_all()
        self.on_change(event)
        return copy.deepcopy(pod)


def mark_deleted(pod: dict[str, Any], grace_s: int = 1) -> None:
    """Mark a pod as ``kubectl delete`` does."""
    pod["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": grace_s}


def _selected(pod: dict[str, Any], query: dict[str, str]) -> bool:
    wanted = dict(term.split("=", 1) for term in query.get("labelSelector", "").split(",") if term)
    labels = pod["metadata"].get("labels") or {}
    fields = dict(term.split("=", 1) for term in query.get("fieldSelector", "").split(",") if term)
    is_named = fields.get("metadata.name", pod["metadata"]["name"]) == pod["metadata"]["name"]
    return is_named and all(labels.get(name) == value for name, value in wanted.items())


def _merge(into: dict[str, Any], body: dict[str, Any]) -> None:
    for name, value in body.items():
        if isinstance(value, dict):
            _merge(into.setdefault(name, {}), value)
        else:
            into[name] = value


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], api: ApiServer) -> None:
        self.api = api
        self._open: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def cut(self) -> None:
        for request in tuple(self._open):
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        self._do()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _do(self) -> None:
        api, url = self.server.api, urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, url.path, json.loads(body) if body else None, query.get("watch") == "true")
        unknown = set(query) - QUERY
        api.problems += [f"unknown query parameter {name}" for name in unknown]
        try:
            if self.headers.get("Authorization") != f"Bearer {api.token}":
                raise Refusal(401, "Unauthorized", "Unauthorized")
            if request.is_watch:
                api.refuse(request)
                self._watch(query)
                return
            answer, code = api.answer(request, query, self.headers.get("Content-Type", "")), 200
        except Refusal as e:
            answer, code = e.status(), e.code
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", JSON)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _watch(self, query: dict[str, str]) -> None:
        def begin() -> None:
            self.send_response(200)
            self.send_header("Content-Type", JSON)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()

        def send(event: dict[str, Any]) -> None:
            line = json.dumps(event).encode() + b"\n"
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")

        self.close_connection = True
        self.server.api.watch(query, send, begin)  # it is cut: the stream has no end, the connection has

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: tests print the messages that they need."""
