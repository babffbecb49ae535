"""A gateway's requests to an invoker's data port, except runs: logs, last output, preflights, packages and images."""

from __future__ import annotations

from dataclasses import dataclass

from thaw.config import LlmConfig
from thaw.ids import ActionName, ActivationId, HostId, InstanceId


@dataclass(frozen=True, slots=True)
class RunRef:
    instance_id: InstanceId
    activation_id: ActivationId


@dataclass(frozen=True, slots=True)
class LogsWanted:
    """``POST /logs``: ask for the logs of runs that have ended here, many at once: a gateway asks after it answered."""

    runs: tuple[RunRef, ...]


@dataclass(frozen=True, slots=True)
class LogsFound:
    """The logs in the order of the request; None if the instance has gone and its logs with it.  If the container ended
    with the run, they are the end of its stderr."""

    logs: tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class OutputWanted:
    """``POST /output``: ask for the last stderr output of the action's containers that have ended here."""

    action: ActionName


@dataclass(frozen=True, slots=True)
class EndedOutput:
    """The end of an ended container's stderr; ``reason`` is why it ended, empty for a release."""

    instance_id: InstanceId
    action: ActionName
    host_id: HostId
    stage: int
    n_stages: int
    ended_wall_ms: int
    reason: str
    stderr: str


@dataclass(frozen=True, slots=True)
class OutputFound:
    """Oldest first."""

    outputs: tuple[EndedOutput, ...]


@dataclass(frozen=True, slots=True)
class PreflightWanted:
    """``POST /preflight``: would a start of this config succeed on this host?  The answer is a PreflightFound, the
    error with which the start would fail, or Unavailable when the host cannot say so within ``deadline_ms``.

    Without ``memory`` the host does not check whether resources.gpu_memory_mb is enough.  With ``waits`` it waits until
    a stem cell, memory and a turn are spare."""

    config: LlmConfig
    deadline_ms: int
    memory: bool = True
    namespace: str = ""  # a host checks one model of a namespace at a time
    waits: bool = False


@dataclass(frozen=True, slots=True)
class PackagesWanted:
    """``POST /packages``: install the packages of a requirements.txt, within ``deadline_ms``.  The answer is a
    PackagesFound, a BadRequest that names the package, or Unavailable when the host can install nothing now."""

    asked: tuple[str, ...]
    deadline_ms: int
    namespace: str


@dataclass(frozen=True, slots=True)
class PackagesFound:
    """Each package with its version and its hashes."""

    packages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImageWanted:
    """``POST /image``: pull an image within ``deadline_ms``.  The answer is an ImageFound, or the InitFailed of a start
    with it."""

    image: str
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class ImageFound:
    """The image by its digest."""

    image: str


@dataclass(frozen=True, slots=True)
class PreflightFound:
    """The start would succeed, with the version at ``uri``.  ``engine`` is empty where only the files were looked at,
    and ``unchecked`` then says why; ``busy``: the host can look as soon as something is spare."""

    uri: str
    model_version: str
    engine: str = ""
    max_model_len: int = 0
    notes: tuple[str, ...] = ()
    unchecked: str = ""
    embeds: bool | None = None  # whether it is an embedding model; None: the engine did not say so
    most_stages: int = 0  # of a pipeline, as the engine has tried; 0: no limit was found
    busy: bool = False
