"""Actions, activation records, 202s and traces in the state server.

The promise of a 202: its record-to-be and its queue entry are written in one transaction and are on disk before the
client reads the answer; it then ends in exactly one record (:meth:`Records.end` writes a record once, and takes the
pending entry away in the same transaction).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import redis

from relay.state import endings, keys, redis_link
from relay.state.action_lists import ActionLists
from relay.state.clock import StateClock
from relay.state.code import UNNAMED_TTL_S, Codes
from relay.state.quota_errors import not_accepted, too_many_actions
from relay.state.record_lists import RecordLists, names_of
from relay.state.record_scripts import ACCEPT, ADD_TRACE, DELETE_ACTION, END, MARK, PUT_ACTION, TAKE_BACK, texts
from relay.state.retention import forget, limits
from relay.state.storage import SHORT_BYTES, Storage
from relay.state.usage_counting import RECORD_TTL_S
from thaw import pools, wire
from thaw.action import Action
from thaw.activation import Activation, ActivationStatus
from thaw.errors import Conflict, NotFound, PlatformError, TooLarge, Unavailable
from thaw.ids import ActionName, ActivationId, Namespace
from thaw.quotas import Quotas
from thaw.tracing.clocks import event_of
from thaw.tracing.trace import Phase, TraceEvent

TRACE_TTL_S: Final = 7 * 24 * 3600
_FSYNC_WAIT_MS: Final = 2_000
_TRANSACTION_BYTES: Final = 8 << 20
"""Upper limit for one write: the state server serves no other client while it stores the records."""
_OF_A_START: Final = frozenset({Phase.QUEUED_END, Phase.PLANNED_END, Phase.COMMAND})
"""Events of a start: gateway, scheduler and invoker write one each."""
_NOT_KEPT: Final = {
    "error": "The result was not kept: the namespace has no room for it. thaw namespace quota shows what it has."
}
_NO_LOGS: Final = ("The logs were not kept: the namespace has no room for them.",)
RELEASED_CODES: Final = 4
"""The number of codes of a namespace that stay for a while when no action names them any more: a host or a client may
be reading one, but endless updates must not fill the server."""
DELETED_KEPT: Final = 500
"""The deleted actions of a namespace whose last versions are kept one by one."""
STARTS_KEPT: Final = 400
TRACE_BYTES: Final = 64 << 10
"""The starts of a namespace that have traces, and the bytes of one of these; each stage of a start has some 5 KiB, and
as much again when it becomes a worker of its own."""
_DELETE_TRIES: Final = 10


@dataclass(frozen=True, slots=True)
class Pending:
    """A 202 that has not ended: everything needed to run it, on any gateway."""

    activation_id: ActivationId
    namespace: Namespace
    subject: str
    action: ActionName
    action_version: str
    payload: object
    accepted_ms: int
    seed: int
    endpoint: str = ""  # llm kinds: "chat" | "completions"
    cause: str = ""  # the trigger's activation
    binding: str = ""
    key_digest: str = ""  # the hash of the caller's key
    key_until_ms: int = 0
    parameters: Mapping[str, object] = field(default_factory=dict)  # a conductor's parameters, for each of its runs


@dataclass(frozen=True, slots=True)
class Ended:
    """An activation's record, with the part of its trace that the writer has seen."""

    record: Activation
    events: Sequence[TraceEvent] = ()
    pending_entry: bytes | None = None


class Records(RecordLists, ActionLists):
    def __init__(self, client: redis.Redis, clock: StateClock | None = None, storage: Storage | None = None) -> None:
        """``clock``: its reading is written into the traces of starts.  ``storage``: the quotas of namespaces; without
        it everything is written."""
        super().__init__(client)
        self._storage = storage
        self._clock = clock or StateClock()
        self.code = Codes(client)

    # actions -------------------------------------------------------------------------------------------------------

    def put_action(self, action: Action, *, last: str | None, old: Action | None = None, row: str = "") -> None:
        """``last``: the version of this name that ``action`` was made from, whether it exists or was deleted; ``old``
        is that version if it exists, and ``row`` the digest of the row that was read.  Raises Conflict when another
        version was written meanwhile, ``old`` deleted, or its row changed in place (rewriting.py): a version stands for
        one code and one model, and the code of a deleted one has an end; Forbidden, TooLarge and StorageFull when the
        namespace may have no more.  An action with an adapter comes and goes with its pool."""
        code, before, pool = _code_key(action), "" if old is None else _code_key(old), pools.pool_of(action)
        data, limits = wire.dumps(action), texts("", "", "", "")
        if self._storage is not None:
            quotas = self._storage.quotas_of(action.namespace)
            limits = texts(quotas.actions, quotas.code_bytes, *self._storage.code_share())
        with redis_link.translated("write an action"):
            written: Any = self._redis.eval(
                PUT_ACTION,
                8,
                keys.actions(action.namespace),
                keys.last_version(action.name),
                code,
                before if before != code else "",
                keys.released_code(action.namespace),
                keys.code_sizes(action.namespace),
                keys.used(action.namespace),
                keys.pools(action.namespace),
                action.name,
                data,
                action.version,
                last or "",
                *limits,
                UNNAMED_TTL_S,
                "" if old is None else "1",
                RELEASED_CODES,
                0 if action.exec.stored is None else action.exec.stored.n_bytes,
                *(("", b"") if pool is None else (pool.name, wire.dumps(pool))),
                row,
            )
        if self._storage is not None and written[0] < 0:
            raise too_many_actions(action.namespace, written[0] == -1, written[1], self._storage)
        if not written[0]:
            raise Conflict("Concurrent modification to resource detected", hint="read it, and try again")
        if written[0] == 2:
            if before == code:
                raise PlatformError("The code of the action is lost: deploy the action again.")
            raise Unavailable("The code of the action was lost before the action was written: try again.")

    def last_version(self, name: ActionName) -> str | None:
        """The version that an action of this name has or had last, or may have had; instances of a deleted one may
        still run."""
        with redis_link.translated("read an action's last version"):
            own, of_any = self._redis.mget(keys.last_version(name), keys.deleted_before(name.partition("/")[0]))
        version = of_any if own is None else own
        return None if version is None else redis_link.text(version)

    def action(self, namespace: Namespace, name: ActionName) -> Action:
        """Raises NotFound."""
        return self.action_row(namespace, name)[0]

    def action_row(self, namespace: Namespace, name: ActionName) -> tuple[Action, str]:
        """The action, and a digest of all that is kept of it, by which a change shows.  Raises NotFound."""
        with redis_link.translated("read an action"):
            data: Any = self._redis.hget(keys.actions(namespace), name)
        if data is None:
            raise NotFound("The requested resource does not exist.", hint="list actions: thaw action list")
        return wire.loads(Action, data), hashlib.sha1(data, usedforsecurity=False).hexdigest()

    def action_bytes(self, namespace: Namespace, name: ActionName) -> int:
        """The length of an action as it is kept, without code in pieces; 0 if there is none.  Actions of before code
        was kept in pieces have all of it."""
        with redis_link.translated("read an action's length"):
            return int(self._redis.hstrlen(keys.actions(namespace), name))

    def delete_action(self, namespace: Namespace, name: ActionName, version: str = "") -> Action:
        """Return the action as it was; its code can be read for some minutes more.  ``version``: delete no other.
        Raises NotFound, and Conflict for another version and when it is updated all the time."""
        for _ in range(_DELETE_TRIES):
            action = self.action(namespace, name)
            action.check_version(version)
            with redis_link.translated("delete an action"):
                deleted: Any = self._redis.eval(
                    DELETE_ACTION,
                    10,
                    keys.actions(namespace),
                    keys.last_version(name),
                    _code_key(action),
                    keys.released_code(namespace),
                    keys.code_sizes(namespace),
                    keys.pools(namespace),
                    keys.UNCHECKED,
                    keys.deleted(namespace),
                    keys.deleted_before(namespace),
                    keys.last_version(ActionName("")),
                    name,
                    action.version,
                    RECORD_TTL_S,
                    UNNAMED_TTL_S,
                    RELEASED_CODES,
                    DELETED_KEPT,
                )
            if deleted:
                if self._storage is not None:
                    self._storage.usage(namespace)  # it also notes the sum of its code
                return action
        raise Conflict("Concurrent modification to resource detected", hint="try again")

    # activations ---------------------------------------------------------------------------------------------------

    def accept(self, pending: Pending, owner: str = "") -> bytes:
        """Make a 202 durable: written and on disk.  Returns its entry.  Raises Unavailable or PlatformError, and
        Throttled or StorageFull when the namespace may have no more; then there is no 202.  ``owner`` is the gateway
        that already runs it: others do not claim it while that one lives, and no quota refuses it."""
        return self._accept(pending.namespace, [wire.dumps(pending), pending.activation_id], owner)[0]

    def accept_all(self, namespace: Namespace, some: Iterable[Pending]) -> None:
        """Make several 202s of a namespace durable in one step, or none of them.  Raises TooLarge, and what accept()
        raises."""
        rows: list[bytes | str] = []
        n_bytes = 0
        for pending in some:
            data = wire.dumps(pending)
            n_bytes += len(data)
            if n_bytes > _TRANSACTION_BYTES and rows:
                raise TooLarge(f"Calls accepted together are larger than allowed: {_TRANSACTION_BYTES} bytes.")
            rows += [data, pending.activation_id]
        self._accept(namespace, rows, "")

    def _accept(self, namespace: Namespace, rows: Sequence[bytes | str], owner: str) -> list[bytes]:
        """``rows``: each 202 and its activation's id."""
        room = texts("", "", "", "")
        if self._storage is not None and not owner:
            room = texts(self._storage.quotas_of(namespace).accepted, *self._storage.room_of_202s(namespace))
        used = keys.used(namespace)
        with redis_link.translated("accept an activation"):
            # WAITAOF covers the writes of its own connection only, so both commands are sent in one pipeline
            pipe = self._redis.pipeline(transaction=False)
            pipe.eval(ACCEPT, 2, keys.PENDING, used, owner, *room, *rows)
            pipe.execute_command("WAITAOF", 1, 0, _FSYNC_WAIT_MS)  # type: ignore[no-untyped-call]
            asks = self._storage is not None and self._storage.is_look_due(sum(map(len, rows)))
            if asks:
                pipe.info("memory")
            accepted, synced, *info = pipe.execute(raise_on_error=False)
        if self._storage is not None and info and isinstance(info[0], dict):
            self._storage.learn_memory(info[0])
        if isinstance(accepted, redis.ResponseError):
            raise redis_link.refusal("accept an activation", accepted) from accepted
        refused, *entries = accepted
        if refused and self._storage is not None:
            raise not_accepted(namespace, redis_link.text(refused), int(entries[0]), self._storage)
        if not isinstance(synced, redis.ResponseError) and int(synced[0]) >= 1:
            return [bytes(entry) for entry in entries]
        with redis_link.translated("take an activation back"):
            self._redis.eval(TAKE_BACK, 2, keys.PENDING, used, keys.PENDING_GROUP, *entries)
        if isinstance(synced, redis.ResponseError):
            raise PlatformError(
                f"the state server cannot promise durability: {synced}", hint="start it with --appendonly yes"
            )
        raise Unavailable("the state server did not sync its AOF in time", hint="is its disk full or slow?")

    def mark_started(self, activation_id: ActivationId, owner: str) -> bool:
        """Claim the one run of a non-idempotent activation.  False means that another owner ran it before.  A repeat by
        the same owner, after an answer that was lost, is True again."""
        with redis_link.translated("mark a run"):
            first: Any = self._redis.eval(MARK, 1, keys.started(activation_id), owner, str(RECORD_TTL_S))
        return redis_link.text(first) == owner

    def end(self, record: Activation, *, pending_entry: bytes | None = None) -> bool:
        """Write the record, once.  False means that the activation had ended before; the first record stays."""
        return self.end_all([Ended(record, pending_entry=pending_entry)])[0]

    def end_all(self, ended: Sequence[Ended], told: Callable[[Ended], None] = lambda _: None) -> list[bool]:
        """Write each trace with its record at once: a reader of the record finds its trace.  When the activation had
        ended before, its trace and its place in the index stay as they are.  ``told`` hears of each that is written,
        when its bytes count.  See end()."""
        encoded = [wire.dumps(one.record) for one in ended]  # encode all before any is written
        parts, used = [0], 0
        for i, data in enumerate(encoded):
            used += len(data)
            if used > _TRANSACTION_BYTES and i > parts[-1]:
                parts, used = [*parts, i], len(data)
        written: list[bool] = []
        for begin, end in zip(parts, [*parts[1:], len(ended)], strict=True):
            written += self._end_together(ended[begin:end], encoded[begin:end], told)
        return written

    def _end_together(
        self, ended: Sequence[Ended], encoded: Sequence[bytes], told: Callable[[Ended], None]
    ) -> list[bool]:
        of = Counter[Namespace]()
        with redis_link.translated("write records"):
            pipe = self._redis.pipeline(transaction=True)
            for one, data in zip(ended, encoded, strict=True):
                self._end_one(pipe, one, data, of[one.record.namespace])
                of[one.record.namespace] += 1
            for namespace, n in of.items():
                forget(pipe, namespace, self._quotas_of(namespace), n)
            for namespace in of:
                endings.tell(pipe, namespace, [one.record for one in ended if one.record.namespace == namespace])
            asks = self._storage is not None and self._storage.is_look_due(sum(map(len, encoded)))
            if asks:
                pipe.info("memory")
            answers = pipe.execute()
        written = [int(answer) for answer, *_ in answers[: len(ended)]]
        for one, answer in zip(ended, written, strict=True):
            if answer >= 0:
                told(one)
        if self._storage is not None:
            for namespace, (_, *has) in zip(of, answers[len(ended) :], strict=False):
                self._storage.learn(namespace, *map(int, has))
            if asks:
                self._storage.learn_memory(answers[-1])
        if too_long := [i for i, answer in enumerate(written) if answer < 0]:
            less = [_with_less(ended[i]) for i in too_long]
            again = self._end_together(less, [wire.dumps(one.record) for one in less], told)
            for i, was_written in zip(too_long, again, strict=True):
                written[i] = int(was_written)
        return list(map(bool, written))

    def _end_one(self, pipe: Any, ended: Ended, encoded: bytes, n_before: int) -> None:
        """``n_before``: records of the namespace that the same transaction writes before; they stay."""
        record, room = ended.record, texts("", "", "")
        if self._storage is not None and len(encoded) > SHORT_BYTES and record.result != _NOT_KEPT:
            room = texts(*self._storage.room(record.namespace, promised=ended.pending_entry is not None))
        seconds, most, _ = limits(self._quotas_of(record.namespace))
        written_to = (
            keys.activation(record.activation_id),
            keys.trace(record.activation_id),
            keys.PENDING,
            keys.trace(record.group_id) if record.group_id else "",
            keys.written(record.namespace),
            keys.activations(record.namespace),
            keys.used(record.namespace),
            *keys.of_records(record.namespace),
            *(keys.activations_of(record.namespace, name) for name in names_of(record)),
        )
        pipe.eval(
            END,
            len(written_to),
            *written_to,
            encoded,
            record.activation_id,
            record.start_ms,
            keys.PENDING_GROUP,
            ended.pending_entry or b"",
            *texts(seconds, most, n_before),
            *room,
            *self._trace_rows(ended.events),
        )

    def _quotas_of(self, namespace: Namespace) -> Quotas | None:
        return None if self._storage is None else self._storage.quotas_of(namespace)

    # traces --------------------------------------------------------------------------------------------------------

    def add_trace(self, action: ActionName, trace_id: str, events: Iterable[TraceEvent]) -> None:
        """Add to the trace of a start of the action, as far as it is not too long.  No quota counts these traces, so
        those of the namespace's latest starts are kept."""
        trace = keys.trace(trace_id)
        limits = texts(TRACE_TTL_S, STARTS_KEPT, TRACE_BYTES)
        if rows := self._trace_rows(list(events)):
            with redis_link.translated("write a trace"):
                written_to = (trace, keys.started_groups(action.partition("/")[0]), keys.trace(""))
                self._redis.eval(ADD_TRACE, len(written_to), *written_to, trace_id, *limits, *rows)

    def _trace_rows(self, events: Sequence[TraceEvent]) -> list[bytes]:
        return [wire.dumps(e) for e in (*events, *self._clock_in(events))]

    def _clock_in(self, events: Sequence[TraceEvent]) -> tuple[TraceEvent, ...]:
        """The reading of this machine's clock, once among the events of a start; a warm request does not need it."""
        reading = self._clock.reading
        of_start = next((e for e in events if e.name in _OF_A_START), None)
        return () if reading is None or of_start is None else (event_of(reading, of_start),)

    def trace(self, *trace_ids: str) -> Sequence[TraceEvent]:
        """The events under these ids (an activation's, its group's), by wall time."""
        events: list[TraceEvent] = []
        with redis_link.translated("read a trace"):
            for trace_id in trace_ids:
                rows: Any = self._redis.lrange(keys.trace(trace_id), 0, -1)
                events += [wire.loads(TraceEvent, row) for row in rows]
        return sorted(events, key=lambda e: e.wall_ns)


def _with_less(ended: Ended) -> Ended:
    """Return a record that was too long without its logs; if it had none, without its result.  Then it is no success,
    so that nobody takes the sentence for the result."""
    record = ended.record
    if record.logs not in ((), _NO_LOGS):
        return replace(ended, record=replace(record, logs=_NO_LOGS))
    status = ActivationStatus.INTERNAL_ERROR if record.status is ActivationStatus.SUCCESS else record.status
    return replace(ended, record=replace(record, status=status, result=_NOT_KEPT, logs=()))


def _code_key(action: Action) -> str:
    return "" if action.exec.stored is None else keys.code(action.exec.stored.id)
