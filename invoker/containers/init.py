"""``/init``: its value for each kind and each stage of a group, and the one call that sends it.

The call may take minutes (an engine loads), so another thread can give it up at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Final

from invoker.containers.call import ContainerCall
from invoker.settings import InvokerSettings
from relay.protocol.messages import GroupCredential, GroupLink, LlmInit, StageShape
from thaw import wire
from thaw.action import Action
from thaw.errors import ErrorInfo, InitFailed, ProtocolError, WorkerLost, from_info
from thaw.ids import HostId
from thaw.plan import Plan, PlanStage, PlanTransport, TransportKind
from thaw.spliced import spliced

WEIGHTS_SUFFIX: Final = ".safetensors"


def init_body(value: Any, mark: str = "", code: Iterable[bytes] = ()) -> bytes:
    """``code``: pieces of UTF-8 that the string ``mark`` in the value stands for.  Raises what reading them raises."""
    plain = {"value": value}
    return b"".join(spliced(plain, mark, code)) if mark else json.dumps(plain).encode()


class InitCall:
    def __init__(self, path: str, deadline_s: float) -> None:
        self._call = ContainerCall(path, deadline_s)
        self.answered = False  # if True, an error that ``post`` raises is the container's own answer

    def post(self, body: bytes) -> Any:
        """Return the reply's JSON.  Raises the container's error, InitFailed when it does not answer in time or cannot
        be read, WorkerLost when it closes the connection."""
        try:
            status, plain = self._call.ask("POST", "/init", body)
        except TimeoutError as e:
            raise InitFailed("the container did not finish its start in time", hint="raise THAW_START_TIMEOUT_S") from e
        except OSError as e:
            raise WorkerLost("the container closed its connection while it started") from e
        except ProtocolError as e:
            raise InitFailed(f"the container's answer to /init cannot be read: {e.message}") from e
        self.answered = True
        if status != 200:
            info = plain.get("info")
            raise from_info(wire.from_plain(ErrorInfo, info)) if info else InitFailed(str(plain.get("error")))
        return plain

    def abort(self) -> None:
        """Make :meth:`post` raise WorkerLost now."""
        self._call.abort()


def llm_init(
    plan: Plan, stage: PlanStage, function: Action, settings: InvokerSettings, link: GroupLink | None
) -> LlmInit:
    """Threads by share: more of them than the quota allows would only be throttled."""
    if function.config is None:
        raise InitFailed(f"{function.name} has no config", hint="update the action with --config")
    n_threads = max(1, round(stage.share * settings.n_cores))
    shapes = tuple(map(_shape, plan.stages)) if len(plan.stages) > 1 else ()
    return LlmInit(
        plan.action,
        plan.group_id,
        stage.stage,
        len(plan.stages),
        stage.layers,
        function.config,
        stage.reserve_bytes,
        stage.share,
        n_threads,
        HostId(settings.host_id),
        stage.role,
        link,
        shapes,
        plan.model.version if plan.model is not None else "",
    )


def group_link(
    transport: PlanTransport, credential: Callable[[str], GroupCredential], host_address: str
) -> GroupLink | None:
    """How a stage reaches the others; None for a plan of one stage.

    ``credential`` looks a reference up; it raises when the group was given up meanwhile.
    """
    if transport.kind == TransportKind.NONE:
        return None
    return GroupLink(transport.kind, transport.address, credential(transport.credential_ref), host_address)


def _shape(stage: PlanStage) -> StageShape:
    """Ranges of safetensors files are weights; the other files are sidecars, which no device holds."""
    ranges = (r for r in (*stage.first_ranges, *stage.later_ranges) if r.file.endswith(WEIGHTS_SUFFIX))
    return StageShape(stage.layers, stage.reserve_bytes, sum(r.n_bytes for r in ranges), stage.role)


def python_init(function: Action, code: str, api_host: str, layer: str = "") -> dict[str, object]:
    """OpenWhisk's init value; ``concurrency`` and ``packages`` are ours and ignored by other runtimes.  ``api_host``:
    the API's URL, ``layer``: the name of the folder with its packages; both may be empty."""
    env = {
        **{k: v if isinstance(v, str) else wire.encode(v).decode() for k, v in function.init_parameters.items()},
        "__OW_ACTION_NAME": f"/{function.name}",
        "__OW_NAMESPACE": function.namespace,
        "__OW_ACTION_VERSION": function.version,
        **({"__OW_API_HOST": api_host} if api_host else {}),
    }
    return {
        "name": function.name.rpartition("/")[2],
        "main": function.exec.main or "main",
        "code": code,
        "binary": function.exec.binary,
        "env": env,
        "concurrency": slots_of(function),
        **({"packages": layer} if layer else {}),
        **({"http": True} if function.is_http_server else {}),
    }


def image_environment(function: Action) -> dict[str, str]:
    """The environment that Knative gives a service's container; OpenWhisk's contract has the same port."""
    if not function.exec.image:
        return {}
    name = function.name.rpartition("/")[2]
    revision = f"{name}-{function.version.replace('.', '-')}"
    return {"PORT": "8080", "K_SERVICE": name, "K_CONFIGURATION": name, "K_REVISION": revision}


def slots_of(function: Action) -> int:
    if function.config is not None:
        return max(1, min(function.config.scaling.max_batch, function.config.limits.concurrency))
    return max(1, function.limits.concurrency)


def slots_in(function: Action, stage: int, n_stages: int) -> int:
    """The slots of one stage: requests enter a group at its first stage, which keeps one batch in flight per stage."""
    return slots_of(function) * n_stages if stage == 0 else 0


def keep_alive_s_of(function: Action) -> float:
    return function.config.scaling.keep_alive_s if function.config is not None else function.keep_alive_s
