"""The only file that imports the docker SDK: an engine's answers as values, its errors as ours, every call bounded.

API 1.41 (Docker 20.10) is enough.  The engine must be on this machine, behind a unix socket: functions are reached
through sockets in mounted directories.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import docker
import docker.errors
import docker.types
import requests.exceptions

from thaw.errors import NotFound, PlatformError, Unavailable

CALL_S: Final = 30.0
"""Twice the longest start that was seen on a busy machine; a pull and the streams have bounds of their own."""

OLDEST_API: Final = "1.41"
_OLDEST_API: Final = (1, 41)


@dataclass(frozen=True, slots=True)
class Seen:
    """A container as the engine describes it.  ``pid`` is the pid on the engine's machine, 0 if it does not run."""

    name: str
    labels: Mapping[str, str]
    running: bool
    paused: bool
    pid: int
    exit_code: int
    out_of_memory: bool
    memory_bytes: int  # its limit


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """``action`` is the engine's name of the event (die, oom …), ``at_ns`` its time by the engine's clock."""

    action: str
    labels: Mapping[str, str]
    at_ns: int


@dataclass(frozen=True, slots=True)
class ImageSeen:
    """``digests``: ``name@sha256:…`` for each registry that it came from or went to.  ``n_bytes``: its layers, also
    those that other images share."""

    id: str
    digests: Sequence[str]
    tags: Sequence[str]
    n_bytes: int
    volumes: Sequence[str] = ()


class Engine:
    """Every method raises Unavailable when the engine cannot be reached and PlatformError when it refuses the call."""

    def __init__(self, url: str) -> None:
        if not url.startswith("unix://"):
            raise PlatformError(f"DOCKER_HOST={url!r} is not a unix socket", hint="use unix:///path/to/docker.sock")
        self.url, self.socket_path = url, url.removeprefix("unix://")
        self._api = docker.APIClient(base_url=url, version=OLDEST_API, timeout=CALL_S, max_pool_size=32)
        self._streams = docker.APIClient(base_url=url, version=OLDEST_API, timeout=CALL_S)
        self._events: docker.types.CancellableStream | None = None

    def check(self) -> None:
        """Raises Unavailable (with what to do) or PlatformError for an engine that is too old."""
        self._check_socket()
        with _translated("ask the engine"):
            version = str(self._api.version(api_version=False)["ApiVersion"])
        if tuple(map(int, version.split("."))) < _OLDEST_API:
            raise PlatformError(f"the engine speaks API {version}", hint="Docker 20.10 or newer is needed")

    def maps_users(self) -> bool:
        """Whether the engine's containers have a user namespace: it is rootless, or has userns-remap."""
        with _translated("ask the engine"):
            options = self._api.info().get("SecurityOptions") or ()
        return any(str(option).partition(",")[0] in ("name=rootless", "name=userns") for option in options)

    def create(self, name: str, config: Mapping[str, Any]) -> None:
        """``config`` is the body of POST /containers/create.  Raises NotFound for a missing image.  A container of
        this name that exists already counts as created."""
        try:
            with _translated("create the container"):
                self._api.create_container_from_config(config, name)
        except PlatformError as e:
            if not isinstance(e.__cause__, docker.errors.APIError) or e.__cause__.status_code != 409:
                raise

    def pull(self, image: str, deadline_s: float, arrived: Callable[[], None] = lambda: None) -> None:
        """Pull an image.  Raises PlatformError when this fails or takes longer than ``deadline_s``.  ``arrived`` is
        called when the image is there, and may be called after that time."""
        outcome: queue.SimpleQueue[PlatformError | None] = queue.SimpleQueue()
        # the SDK gives a pull no timeout; one that hangs is left to the engine, which ends it or completes it
        threading.Thread(target=self._pull, args=(image, arrived, outcome), name="pull", daemon=True).start()
        try:
            error = outcome.get(timeout=deadline_s)
        except queue.Empty:
            raise PlatformError(f"pulling {image} took longer than {deadline_s:g} s", hint=_image_hint(image)) from None
        if error is not None:
            raise error

    def _pull(self, image: str, arrived: Callable[[], None], outcome: queue.SimpleQueue[PlatformError | None]) -> None:
        client = docker.APIClient(base_url=self.url, version=OLDEST_API, timeout=CALL_S)  # may outlive this object's
        try:
            with _translated(f"pull {image}"):
                for step in client.pull(image, stream=True, decode=True):
                    if "error" in step:
                        outcome.put(PlatformError(f"cannot pull {image}: {step['error']}", hint=_image_hint(image)))
                        return
        except PlatformError as e:
            outcome.put(e)
        else:
            try:
                arrived()
            finally:
                outcome.put(None)
        finally:
            client.close()

    def image(self, name: str) -> ImageSeen:
        """Raises NotFound for an image that is not on this machine."""
        with _translated("look at the image"):
            plain = self._api.inspect_image(name)
        return _image_seen(plain)

    def images(self) -> Sequence[ImageSeen]:
        """All images, without their volumes."""
        with _translated("list images"):
            return [_image_seen(plain) for plain in self._api.images()]

    def images_of_containers(self) -> frozenset[str]:
        """The ids of the images that have a container, whoever made it and whether it runs or not."""
        with _translated("list containers"):
            return frozenset(str(plain["ImageID"]) for plain in self._api.containers(all=True))

    def remove_image(self, name: str) -> None:
        """Take a name from an image, which is deleted with its last one.  Raises NotFound, and PlatformError when a
        container has the image."""
        with _translated("remove the image"):
            self._api.remove_image(name)

    def start(self, name: str) -> None:
        with _translated("start the container"):
            self._api.start(name)

    def pause(self, name: str) -> None:
        with _translated("pause the container", ignored=(409,)):  # it is paused, or does not run
            self._api.pause(name)

    def unpause(self, name: str) -> None:
        with _translated("unpause the container", ignored=(409, 500)):  # it is not paused
            self._api.unpause(name)

    def signal(self, name: str, signal: str) -> None:
        """A container that has ended, or is no more, is no error."""
        with _translated("signal the container", ignored=(404, 409)):
            self._api.kill(name, signal)

    def remove(self, name: str) -> None:
        """Remove a container with its processes.  Status 409 means that a removal is in progress already."""
        with _translated("remove the container", ignored=(404, 409)):
            self._api.remove_container(name, force=True, v=True)

    def update(self, name: str, *, cpu_quota_us: int, cpu_period_us: int, memory_bytes: int) -> None:
        limits: dict[str, int] = {}
        if cpu_quota_us:
            limits |= {"cpu_quota": cpu_quota_us, "cpu_period": cpu_period_us}
        if memory_bytes:
            limits |= {"mem_limit": memory_bytes, "memswap_limit": memory_bytes}
        if limits:
            with _translated("limit the container"):
                self._api.update_container(name, **limits)

    def inspect(self, name: str) -> Seen:
        """Raises NotFound."""
        with _translated("inspect the container"):
            return _seen(self._api.inspect_container(name))

    def mounts(self, name: str) -> Mapping[str, str]:
        """The mounts of a container: {path inside: path on the engine's machine}."""
        with _translated("inspect the container"):
            found = self._api.inspect_container(name)["Mounts"]
        return {str(m["Destination"]): str(m["Source"]) for m in found if m.get("Source")}

    def list(self, label: str) -> Sequence[Seen]:
        """All containers with this label, running or not.  A container that is removed meanwhile is left out."""
        with _translated("list containers"):
            names = [
                str(c["Names"][0]).lstrip("/")
                for c in self._api.containers(all=True, filters={"label": label})
                if c["Names"]
            ]
        found = []
        for name in names:
            try:
                found.append(self.inspect(name))
            except NotFound:
                continue
        return found

    def label_values(self, label: str) -> Sequence[str]:
        """The values of this label, of all containers that have it."""
        with _translated("list containers"):
            found = self._api.containers(all=True, filters={"label": label})
        return [str(c["Labels"][label]) for c in found]

    def usage(self, name: str) -> tuple[int, float]:
        """(bytes of memory, CPU seconds)."""
        with _translated("measure the container"):
            stats = self._api.stats(name, stream=False, one_shot=True)
        cpu_ns = stats.get("cpu_stats", {}).get("cpu_usage", {}).get("total_usage", 0)
        return int(stats.get("memory_stats", {}).get("usage", 0)), cpu_ns / 1e9

    def events(self, label: str, since_ns: int) -> Iterator[EngineEvent]:
        """Yield events of containers with this label from ``since_ns`` on, until the engine or :meth:`end_events` ends
        the stream."""
        since = f"{since_ns // 10**9}.{since_ns % 10**9:09d}"
        filters = {"type": "container", "label": label, "event": ["die", "oom"]}
        with _translated("follow the engine's events"):
            self._events = self._streams.events(since=since, filters=filters, decode=True)
            try:
                for event in self._events:
                    actor = event.get("Actor", {}).get("Attributes", {})
                    yield EngineEvent(str(event.get("Action")), actor, int(event.get("timeNano", 0)))
            finally:
                self.end_events()

    def end_events(self) -> None:
        """Any thread may call this."""
        events, self._events = self._events, None
        if events is not None:
            with contextlib.suppress(OSError):  # the engine closed it first
                events.close()

    def close(self) -> None:
        self._api.close()
        self._streams.close()

    def _check_socket(self) -> None:
        path = self.socket_path
        if not os.path.exists(path):
            raise Unavailable(f"no engine at {path}", hint="start Docker, or set DOCKER_HOST to its socket")
        if not os.access(path, os.W_OK):
            raise Unavailable(
                f"no permission on the engine's socket {path}",
                hint="add this user to the group docker, or run the invoker as root",
            )


def gpu_request(device: str) -> Mapping[str, Any]:
    """``cuda:1`` → the body of a device request for GPU 1; ``cuda`` → for all."""
    _, _, index = device.partition(":")
    return dict(
        docker.types.DeviceRequest(
            driver="nvidia", count=None if index else -1, device_ids=[index] if index else None, capabilities=[["gpu"]]
        )
    )


def _image_seen(plain: Mapping[str, Any]) -> ImageSeen:
    volumes = (plain.get("Config") or {}).get("Volumes") or {}
    digests, tags = plain.get("RepoDigests") or (), plain.get("RepoTags") or ()
    return ImageSeen(
        str(plain["Id"]),
        tuple(map(str, digests)),
        tuple(map(str, tags)),
        int(plain["Size"]),
        tuple(map(str, volumes)),
    )


def _seen(plain: Mapping[str, Any]) -> Seen:
    state = plain["State"]
    return Seen(
        str(plain["Name"]).lstrip("/"),
        plain["Config"].get("Labels") or {},
        bool(state["Running"]),
        bool(state["Paused"]),
        int(state["Pid"]),
        int(state["ExitCode"]),
        bool(state["OOMKilled"]),
        int(plain["HostConfig"]["Memory"]),
    )


@contextmanager
def _translated(what: str, ignored: Sequence[int] = ()) -> Iterator[None]:
    try:
        yield
    except docker.errors.ImageNotFound as e:
        raise NotFound(f"cannot {what}: {e.explanation}") from e
    except docker.errors.NotFound as e:
        if 404 in ignored:
            return
        raise NotFound(f"cannot {what}: {e.explanation}") from e
    except docker.errors.APIError as e:
        if e.status_code in ignored:
            return
        raise PlatformError(f"cannot {what}: {e.explanation}", hint=_api_hint(str(e.explanation))) from e
    except requests.exceptions.Timeout as e:
        raise PlatformError(f"cannot {what}: the engine did not answer in time", hint="see the engine's log") from e
    except (requests.exceptions.RequestException, docker.errors.DockerException, OSError) as e:
        raise Unavailable(f"cannot {what}: the engine is away ({e})", hint="start Docker again") from e


def _api_hint(explanation: str) -> str:
    hints: Mapping[str, str] = {
        "no space left on device": "make room on the engine's disk: docker system prune",
        "seccomp is not enabled": "this host's kernel or engine has no seccomp; functions are not run without it",
        "could not select device driver": "install the NVIDIA container toolkit on this host",
        "bind source path does not exist": "mount THAW_RUN_DIR into the invoker from the engine's machine",
    }
    return next((hint for text, hint in hints.items() if text in explanation), "see the engine's log")


def _image_hint(image: str) -> str:
    return f"make images builds Thaw's own; else: docker pull {image}"
