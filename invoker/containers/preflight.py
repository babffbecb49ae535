"""The preflight of a model: would a start succeed here?  A stem cell finds out with the model's small files alone.

::

    fetchd:  Inspect ── FetchStart (config, tokenizer) ── grant ──┐          cancel, close the descriptor socket
    here:                        a fork, or a stem cell ── POST /preflight ── ends, whatever it said

It is a start that stops before the weights, on the same ways, so its answer holds for the start.  It takes only what
starts do not need, waits for that as long as it may (spare_cells.py), and else answers that it could not check.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from invoker.containers.call import ContainerCall
from invoker.containers.fleet import Fleet
from invoker.containers.spare_cells import FORK_BYTES, LABEL, SHARE, Busy, SpareCells, Taken
from invoker.containers.stem_cells import StemCells
from invoker.drivers.base import Handle, Spec
from relay.clients.fetch import FetchClient
from relay.protocol.data_port_messages import PreflightFound, PreflightWanted
from relay.protocol.messages import FetchStart, LlmInit, PreflightReply, StageShape
from thaw import wire
from thaw.action import KIND_LLM
from thaw.checkpoints import checkpoint, fitness
from thaw.errors import DeveloperError, ErrorInfo, PlatformError, ProtocolError, ThawError, Unavailable, from_info
from thaw.ids import ActionName, GroupId, HostId, InstanceId, random_hex_id
from thaw.logs import Log
from thaw.model import FileRange, ModelFacts
from thaw.plan import PlanModel, StageRole

MOST_FETCHED: Final = 128 << 20
"""Config, tokenizer and templates together have at most so many bytes.  The largest tokenizers have 40 MiB."""
KEPT: Final = 256
KEPT_S: Final = 3600.0
"""An answer holds for a version, settings, an engine and a device.  The engine's image may be replaced under its name
while the invoker lives, so an answer is asked for again after this time."""
SLOW_S: Final = 60.0
"""After a check took too long, its error is repeated for this long, so that nobody keeps a host busy with one model."""
_NO_END: Final = "the engine looked at the model for too long"
_WAITED: Final = 0.75
"""The part of its time that a check may wait for a stem cell.  The rest is for the check itself: what ends for want of
time counts as a model that takes too long."""


class Preflights:
    def __init__(
        self, fleet: Fleet, cells: StemCells, fetch: FetchClient, host_id: HostId, device: str, log: Log
    ) -> None:
        """``fetch`` gives up at its deadline, also while fetchd is away."""
        self._fleet, self._cells, self._fetch, self._host_id = fleet, cells, fetch, host_id
        self._device, self._log = device, log
        self._spare = SpareCells(fleet, cells)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[float, PreflightFound | ErrorInfo]] = OrderedDict()  # until when it holds

    def check(self, wanted: PreflightWanted) -> PreflightFound:
        """Raises the DeveloperError with which a start would fail, and PlatformError when the store, fetchd or the
        stem cell does not answer in time."""
        ends_s = time.monotonic() + wanted.deadline_ms / 1000
        facts = self._fetch.inspect(wanted.config.model.uri, deadline_s=_left_s(ends_s))
        fitness.check_files(facts.files, facts.asked_for)
        if adapter := wanted.config.model.adapter:
            rank = wanted.config.engine.max_lora_rank
            self._fetch.inspect_adapter(adapter, wanted.namespace, facts.uri, rank, deadline_s=_left_s(ends_s))
        key = _key(facts, wanted)
        answer = self._remembered(key)
        if answer is None:
            answer = self._ask(key, facts, wanted, ends_s)
        if isinstance(answer, ErrorInfo):
            raise from_info(answer)
        return answer

    def _ask(self, key: str, facts: ModelFacts, wanted: PreflightWanted, ends_s: float) -> PreflightFound | ErrorInfo:
        found = PreflightFound(facts.uri, facts.version)
        now_s = time.monotonic()
        try:
            taken = self._spare.take(wanted.namespace, now_s + (_WAITED * (ends_s - now_s) if wanted.waits else 0))
        except Unavailable as e:
            return replace(found, unchecked=e.message, busy=isinstance(e, Busy))
        try:
            answer = self._remembered(key)  # another check may have found it out meanwhile
            if answer is None:
                answer = self._look(found, taken, facts, wanted, ends_s)
                self._remember(key, answer)
            return answer
        finally:
            self._spare.give_back(taken)

    # one preflight -------------------------------------------------------------------------------------------------

    def _look(
        self, found: PreflightFound, taken: Taken, facts: ModelFacts, wanted: PreflightWanted, ends_s: float
    ) -> PreflightFound | ErrorInfo:
        try:
            reply = self._with_container(taken, facts, wanted, ends_s)
        except DeveloperError as e:
            return e.info()
        except Unavailable as e:
            return replace(found, unchecked=e.message)
        return replace(
            found,
            engine=reply.engine,
            max_model_len=reply.max_model_len,
            notes=reply.notes,
            embeds=reply.embeds if reply.engine else None,  # an engine without a name has not looked
            most_stages=reply.most_stages,
        )

    def _with_container(
        self, taken: Taken, facts: ModelFacts, wanted: PreflightWanted, ends_s: float
    ) -> PreflightReply:
        group_id, fetch = GroupId(f"{LABEL}-{random_hex_id()}"), self._fetch
        instance_id = InstanceId(taken.cell.container_id if taken.cell is not None else taken.owner)
        forked: Handle | None = None
        try:
            descriptor_socket = (
                "" if taken.cell is not None else fetch.open_descriptor_socket(instance_id, deadline_s=_left_s(ends_s))
            )
            started = fetch.start(self._request(group_id, facts), deadline_s=_left_s(ends_s))
            fetch.grant_segment(instance_id, started.segment_id, group_id, 0, deadline_s=_left_s(ends_s))
            forked = None if taken.cell is not None else self._fork(instance_id, descriptor_socket)
            handle = taken.cell or forked
            assert handle is not None  # noqa: S101  one of the two
            handle = self._fleet.driver.connect(handle, deadline_s=_left_s(ends_s))
            return _asked(handle.socket_path, self._init(group_id, facts, wanted), ends_s)
        finally:
            if forked is not None:
                self._cells.end(forked)
            elif taken.cell is None:
                self._quietly(lambda: fetch.close_descriptor_socket(instance_id))
            self._quietly(lambda: fetch.cancel(group_id, self._fleet.epoch))

    def _request(self, group_id: GroupId, facts: ModelFacts) -> FetchStart:
        model = PlanModel(facts.uri, facts.sha256, facts.etag, facts.n_bytes)
        ranges = tuple(
            FileRange(name, 0, n_bytes)
            for name, n_bytes in facts.files.items()
            if name in checkpoint.SIDECAR_NAMES and n_bytes
        )
        if sum(r.n_bytes for r in ranges) > MOST_FETCHED:
            raise Unavailable(f"the model's small files have more than {MOST_FETCHED >> 20} MiB")
        return FetchStart(group_id, 0, self._fleet.epoch, model, ranges, spare=True)

    def _fork(self, instance_id: InstanceId, descriptor_socket: str) -> Handle:
        identity = {"THAW_INSTANCE_ID": instance_id, "THAW_HOST_ID": self._host_id}
        spec = Spec(
            instance_id,
            KIND_LLM,
            identity,
            {"role": LABEL},
            SHARE,
            fork=True,
            memory_bytes=FORK_BYTES,
            descriptor_socket=descriptor_socket,
            device=self._device,
        )
        handle = self._fleet.driver.create(spec)
        try:
            return self._fleet.driver.start(handle, spec)
        except PlatformError as e:
            self._cells.end(handle)
            raise Unavailable(e.message, hint=e.hint) from e

    def _init(self, group_id: GroupId, facts: ModelFacts, wanted: PreflightWanted) -> LlmInit:
        layers, reserve_bytes = (0, facts.n_layers), wanted.config.reserve_bytes if wanted.memory else 0
        shape = StageShape(layers, reserve_bytes, facts.weight_bytes, StageRole.FULL)
        action = ActionName(LABEL)
        return LlmInit(
            action, group_id, 0, 1, layers, wanted.config, reserve_bytes, 1.0, 1, self._host_id, stages=(shape,)
        )

    def _quietly(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except ThawError as e:  # fetchd is away: it holds nothing when it comes back
            self._log.event("preflight_left", error=e.message)

    # answers that are known ----------------------------------------------------------------------------------------

    def _remembered(self, key: str) -> PreflightFound | ErrorInfo | None:
        with self._lock:
            known = self._known.get(key)
            return known[1] if known is not None and time.monotonic() < known[0] else None

    def _remember(self, key: str, answer: PreflightFound | ErrorInfo) -> None:
        """Keep the engine's answer.  If the engine could not be asked, nothing is kept."""
        holds_s = KEPT_S
        if isinstance(answer, PreflightFound) and answer.unchecked:
            if answer.unchecked != _NO_END:
                return
            holds_s = SLOW_S
        with self._lock:
            self._known[key] = time.monotonic() + holds_s, answer
            while len(self._known) > KEPT:
                self._known.popitem(last=False)


def _key(facts: ModelFacts, wanted: PreflightWanted) -> str:
    """Everything that the engine's answer depends on: the bytes, and what a start would tell the engine."""
    config = wanted.config
    memory_mb = config.resources.gpu_memory_mb if wanted.memory else 0
    scaling = config.scaling
    sizes = (memory_mb, scaling.max_batch, scaling.stages, scaling.max_stages, scaling.keep)
    settings = (facts.uri, facts.version, config.kind, wire.to_plain(config.engine), config.model.adapter, sizes)
    return json.dumps(settings, sort_keys=True)


def _left_s(ends_s: float) -> float:
    """Raises Unavailable after the end."""
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise Unavailable("the check took too long")
    return left_s


def _asked(path: str, init: LlmInit, ends_s: float) -> PreflightReply:
    """Raises the container's error; Unavailable when there is none in time."""
    try:
        status, plain = ContainerCall(path, _left_s(ends_s)).ask(
            "POST", "/preflight", json.dumps({"value": wire.to_plain(init)}).encode()
        )
    except TimeoutError as e:
        raise Unavailable(_NO_END) from e
    except (OSError, ProtocolError) as e:
        raise Unavailable(f"the stem cell gave no answer: {e}") from e
    if status == 200:
        return wire.from_plain(PreflightReply, plain)
    info = plain.get("info")
    error = from_info(wire.from_plain(ErrorInfo, info)) if info else Unavailable(f"the stem cell answered {status}")
    raise error if isinstance(error, DeveloperError) else Unavailable(error.message)
