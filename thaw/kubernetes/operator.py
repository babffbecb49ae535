"""The operator: ModelFunctions of one namespace of a cluster as actions of one namespace of the platform.

::

    the cluster's watch ──▶ resources ──┐
                                        ├──▶ one pass: writes to the gateway, statuses to the cluster
    the gateway's news ───▶ standings ──┘

It is a client of the gateway with a tenant's key, and keeps nothing: all data for a pass is in the two lists.  A pass
decides by a list that was asked for after the last write, so nothing is written twice.  While the gateway or the
cluster is away nothing is lost, because the remaining work follows from the lists again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from thaw import wire
from thaw.cli.platform_api.client import ApiError, Client, action_path, entity_path
from thaw.cli.platform_api.property_file import Target, normal_apihost
from thaw.errors import ErrorInfo, PlatformError, ThawError, Unavailable
from thaw.kubernetes import decide
from thaw.kubernetes.api import MERGE, Collection, Event
from thaw.kubernetes.crd import GROUP, PLURAL, VERSION
from thaw.kubernetes.refusals import Refusals
from thaw.kubernetes.resource import ModelFunction, seen, without_times
from thaw.kubernetes.settings import OperatorSettings
from thaw.kubernetes.watch import Watch
from thaw.logs import Log
from thaw.process import lasting
from thaw.process.ending import Ending
from thaw.process.lasting import LastingThread
from thaw.settings import SettingError, load
from thaw.standing import Standing, Standings

_NEWS_S: Final = 25.0
"""How long the gateway may wait for news before it answers.  A change without an event is seen after this time at the
latest."""

_GAP_S: Final = 0.25
"""Between two questions for news: a gateway that is about to end answers each of them at once."""

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0
_REFUSED_S: Final = 60.0
"""A refusal is asked for again after this time: an operator may have allowed the model meanwhile."""

_JOIN_S: Final = 5.0
_EXISTS: Final = 409
_TOO_MANY: Final = 429


class Operator:
    """``start`` returns when the threads run; ``stop`` leaves everything as it is."""

    def __init__(
        self,
        settings: OperatorSettings,
        log: Log,
        refused_s: float = _REFUSED_S,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """``refused_s``: how long a refusal stands.  Raises PlatformError when there are no credentials of a cluster,
        ThawError for a key that is none."""
        self._now = now
        self._namespace, self._log = settings.pod_namespace, log
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{self._namespace}/{PLURAL}"
        self._cluster = Collection(path, PLURAL, "operator", seen, settings.kubeconfig)
        target = Target(normal_apihost(settings.gateway_url), settings.key, "THAW_API_KEY")
        self._news, self._gateway = (Client(target, read_timeout_s=_NEWS_S + 30.0) for _ in range(2))
        self._namespace_path = f"/api/v1/namespaces/{self._namespace}"
        self._within = ""  # the UID of the cluster's namespace; empty: not read yet
        self._changed = threading.Condition()
        self._stopping = False
        self._pending = True  # a pass is due
        self._resources: dict[str, ModelFunction] | None = None  # None: not listed yet
        self._standings: Mapping[str, Standing] | None = None  # None: nobody has asked since the last write
        self._mark = ""  # the standings' mark
        self._n_writes = 0
        self._away: ErrorInfo | None = None  # why the gateway tells nothing
        self._refusals = Refusals[tuple[str, int], ErrorInfo](refused_s)  # by uid and generation
        self._not_shown = Refusals[str, Mapping[str, Any]](refused_s)  # statuses that the cluster does not take, by uid
        self._watch: Watch[ModelFunction] | None = None
        self._passes = LastingThread(self._run, "passes")

    def start(self) -> None:
        self._watch = Watch(self._cluster, "", self._take, self._again, self._wake, self._log)
        LastingThread(self._follow_gateway, "standings").start()
        self._passes.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._watch is not None:
            self._watch.stop()
        self._passes.join(_JOIN_S)  # the other thread may be waiting for the gateway, and writes nothing
        self._cluster.close()

    # wanted state ----------------------------------------------------------------------------------------------------

    def _take(self, event: Event[ModelFunction]) -> None:
        if event.what is None:
            return
        with self._changed:
            known = self._resources if self._resources is not None else {}
            if event.kind == "DELETED":
                known.pop(event.what.name, None)
            else:
                known[event.what.name] = event.what
        self._wake()

    def _again(self, listed: Sequence[ModelFunction]) -> None:
        with self._changed:
            self._resources = {each.name: each for each in listed}
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._pending = True
            self._changed.notify_all()

    # present state ---------------------------------------------------------------------------------------------------

    def _follow_gateway(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            with self._changed:
                if self._stopping:
                    return
                n_writes, known = self._n_writes, None if self._standings is None else self._mark
            gap_s = _GAP_S
            try:
                plain = self._news.get("standings", known=known, wait_s=0 if known is None else _NEWS_S)
                self._told(wire.from_plain(Standings, plain), n_writes)
                pause_s = _FIRST_PAUSE_S
            except ThawError as e:
                self._lost(e)
                gap_s, pause_s = pause_s, min(2 * pause_s, _LONGEST_PAUSE_S)
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, gap_s)

    def _told(self, found: Standings, n_writes: int) -> None:
        with self._changed:
            if self._away is not None:
                self._log.event("gateway_back")
            self._pending = self._pending or self._away is not None or found.mark != self._mark
            self._away = None
            if n_writes == self._n_writes:  # else it may be from before the last write
                self._standings, self._mark = {each.name: each for each in found.actions}, found.mark
            self._changed.notify_all()

    def _lost(self, error: ThawError) -> None:
        """The earlier answer stays valid if the gateway is only overloaded."""
        if isinstance(error, ApiError) and error.http_status == _TOO_MANY:
            self._log.event("gateway_busy", error=error.message)
            return
        why = _absence(error)
        with self._changed:
            if self._away is None and not self._stopping:
                self._log.event("gateway_away", reason=why.code, error=why.message)
            self._pending = self._pending or self._away != why
            self._away, self._standings = why, None
            self._changed.notify_all()

    def _ask(self) -> Mapping[str, Standing]:
        """Read the state after all writes so far.  Raises ThawError."""
        found = wire.from_plain(Standings, self._gateway.get("standings"))
        standings = {each.name: each for each in found.actions}
        with self._changed:
            self._standings, self._mark = standings, found.mark
        return standings

    # passes ----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            left_s = [s for s in (self._refusals.left_s(), self._not_shown.left_s()) if s is not None]
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._pending, min(left_s, default=None))
                if self._stopping:
                    return
                self._pending = False
            try:
                self._pass()
                pause_s = _FIRST_PAUSE_S
            except ThawError as e:
                self._log.event("pass_failed", error=e.message, hint=e.hint)
                with self._changed:
                    self._pending = True
                    self._changed.wait_for(lambda: self._stopping, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _pass(self) -> None:
        """Bring each resource and each action of ours to its wanted state, and report its present state.  Raises
        ThawError if something is to be tried again."""
        with self._changed:
            resources, away = dict(self._resources or {}), self._away
            standings: Mapping[str, Standing] | None = self._standings
            if self._resources is None:
                return  # the list wakes us
        self._within = self._within or self._cluster.uid("read the namespace", self._namespace_path)
        self._refusals.forget({(r.uid, r.generation) for r in resources.values()})
        self._not_shown.forget({r.uid for r in resources.values()})
        failed: ThawError | None = None
        if away is None:
            standings = self._ask() if standings is None else standings
            n_writes = self._n_writes
            if not self._is_cluster_away():  # its present state is unknown; the watch wakes us when it is back
                failed = self._write(resources, standings)
            if n_writes != self._n_writes:
                standings = self._ask()
        failed = self._show_all(resources, standings or {}, away) or failed
        if failed is not None:
            raise failed

    def _write(self, resources: Mapping[str, ModelFunction], standings: Mapping[str, Standing]) -> ThawError | None:
        """Returns the error for the resources that the gateway did not accept for now.  The other resources do not wait
        for these, unless the gateway accepts nothing."""
        failed: ThawError | None = None
        for name in sorted({*resources, *standings}):
            if self._step(resources.get(name), standings.get(name)) is None:
                continue
            try:
                self._bring(name, standings.get(name))
            except ApiError as e:
                if e.http_status == _TOO_MANY:
                    return e
                failed = e
            except ThawError as e:
                return e
        return failed

    def _step(self, resource: ModelFunction | None, standing: Standing | None) -> decide.Step | None:
        if resource is not None and self._refusals.get((resource.uid, resource.generation)):
            return None
        return decide.step(resource, standing, self._within)

    def _bring(self, name: str, standing: Standing | None) -> None:
        """Write the step for the resource as the cluster holds it now.  The watch's copy may be old, and a write based
        on it would undo another operator's change.  Raises ThawError."""
        listed, _ = self._cluster.list(name=name)
        resource = next(iter(listed), None)
        step = self._step(resource, standing)
        if step is None:
            return
        self._outdate()  # an answer that was requested before this write does not show the state after it
        try:
            self._carry_out(name, step, None if standing is None else standing.version)
        except ApiError as e:
            if resource is None or not _is_final(step, e):
                raise
            if e.http_status == _EXISTS and name in self._ask():
                raise  # another operator was first, or somebody else's model is there: the next pass tells them apart
            self._refused(resource, e)
        finally:
            self._outdate()  # nor does one that was asked for during the write

    def _is_cluster_away(self) -> bool:
        return self._watch is not None and self._watch.away

    def _outdate(self) -> None:
        with self._changed:
            self._n_writes += 1
            self._standings = None

    def _carry_out(self, name: str, step: decide.Step, version: str | None) -> None:
        """``version``: by which the step was decided.  The gateway refuses it (409) when there is another one by now,
        which may be somebody else's action."""
        match step:
            case decide.Put():
                overwrite = {} if step.creates else {"overwrite": True}
                self._gateway.put(action_path(name), step.body, version=version, **overwrite)
                self._log.event("deployed", action=name, creates=step.creates)
            case decide.Scale():
                self._gateway.put(entity_path("scaling", name), step.body, version=version)
                self._log.event("scaled", action=name, least=step.body["min_instances"])
            case decide.Remove():
                self._gateway.delete(action_path(name), version=version)
                self._log.event("removed", action=name)

    def _refused(self, resource: ModelFunction, error: ApiError) -> None:
        said = ErrorInfo("Refused", error.message, _own_hint(error))
        if error.http_status == _EXISTS:
            said = decide.name_taken(resource.name)
        self._log.event("refused", action=resource.name, status=error.http_status, error=error.message)
        self._refusals.note((resource.uid, resource.generation), said)

    def _show_all(
        self, resources: Mapping[str, ModelFunction], standings: Mapping[str, Standing], away: ErrorInfo | None
    ) -> ThawError | None:
        """Returns why a status is to be written again; the others do not wait for it."""
        failed: ThawError | None = None
        for name, resource in resources.items():
            if resource.deleting or (failed is not None and self._is_cluster_away()):
                continue
            refusal = self._refusals.get((resource.uid, resource.generation))
            wanted = decide.status(resource, standings.get(name), self._within, refusal, away, self._now())
            if wanted == resource.status or without_times(wanted) == self._not_shown.get(resource.uid):
                continue
            try:
                self._show(resource, dict(wanted))
            except Unavailable as e:
                failed = e
            except PlatformError as e:
                self._log.event("status_refused", resource=name, error=e.message)
                self._not_shown.note(resource.uid, without_times(wanted))
        return failed

    def _show(self, resource: ModelFunction, wanted: Mapping[str, Any]) -> None:
        body = {"status": {**dict.fromkeys(resource.status.keys() - wanted.keys()), **wanted}}
        path = f"/{resource.name}/status"
        if self._cluster.ask("write the status", "PATCH", path, {"NotFound"}, body=body, content=MERGE) is not None:
            self._note_status(resource, wanted)

    def _note_status(self, resource: ModelFunction, written: Mapping[str, Any]) -> None:
        """The watch says so, too, but later than the next pass may come."""
        with self._changed:
            known = (self._resources or {}).get(resource.name)
            if self._resources is not None and known is not None and known.uid == resource.uid:
                self._resources[resource.name] = replace(known, status=written)


def _absence(error: ThawError) -> ErrorInfo:
    """Why the gateway tells nothing, as a condition's reason and message."""
    status = error.http_status if isinstance(error, ApiError) else 0
    if status in (401, 403):
        hint = "Put a key into the Secret from which the operator has THAW_API_KEY, and restart the operator."
        return ErrorInfo("KeyRefused", error.message, hint)
    if isinstance(error, Unavailable) or status >= 500:
        return ErrorInfo("GatewayAway", error.message)
    return ErrorInfo("GatewayNotUnderstood", error.message, "Are THAW_GATEWAY_URL and the gateway's version right?")


def _own_hint(error: ApiError) -> str:
    """Return the gateway's hint.  The client's own hints are for users of the command line."""
    return str(error.body.get("hint") or "") if isinstance(error.body, dict) else ""


def _is_final(step: decide.Step, error: ApiError) -> bool:
    """A repeat would be refused again.  An update that met another one (409) is not: the next list has that one."""
    if error.http_status == _EXISTS:
        return isinstance(step, decide.Put) and step.creates
    return error.http_status < 500 and error.http_status not in (401, 404, 429)


def main() -> None:
    log = Log("operator")
    lasting.guard(log)
    ending = Ending()
    try:
        operator = Operator(load(OperatorSettings), log)
        operator.start()
    except (SettingError, PlatformError) as e:
        sys.exit(f"thaw-operator: {e.message}; {e.hint}")
    ending.wait()
    operator.stop()


if __name__ == "__main__":
    main()
