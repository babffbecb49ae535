"""The operator: ModelFunctions of one namespace of a cluster as actions of one namespace of the platform.

::

    the cluster's watch ──▶ resources ──┐
                                        ├──▶ one pass: writes to the gateway, statuses to the cluster
    the gateway's news ───▶ standings ──┘

It is a client of the gateway with a tenant's key, and keeps nothing: what a pass needs is in the two lists.  A pass
decides by a list that was asked for after the last write, so nothing is written twice.  While the
gateway or the cluster is away nothing is forgotten, because what is left to do is seen from the lists again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from thaw import lasting, wire
from thaw.cli.client import ApiError, Client, action_path
from thaw.cli.properties import Target, normal_apihost
from thaw.ending import Ending
from thaw.errors import ErrorInfo, PlatformError, ThawError
from thaw.kubernetes import decide
from thaw.kubernetes.api import MERGE, Collection, Event
from thaw.kubernetes.crd import GROUP, PLURAL, VERSION
from thaw.kubernetes.resource import ModelFunction, seen
from thaw.kubernetes.settings import OperatorSettings
from thaw.kubernetes.watch import Watch
from thaw.lasting import LastingThread
from thaw.logs import Log
from thaw.settings import SettingError, load
from thaw.standing import Standing, Standings

_NEWS_S: Final = 25.0
"""How long the gateway may wait for news before it answers, and how late is seen what no event tells of."""

_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0
_REFUSED_S: Final = 60.0
"""A refusal is asked for again after this time: an operator may have allowed the model meanwhile."""

_JOIN_S: Final = 5.0


class Operator:
    """``start`` returns when the threads run; ``stop`` leaves everything as it is."""

    def __init__(self, settings: OperatorSettings, log: Log) -> None:
        """Raises PlatformError when there are no credentials of a cluster, ThawError for a key that is none."""
        self._namespace, self._log = settings.pod_namespace, log
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{self._namespace}/{PLURAL}"
        self._cluster = Collection(path, PLURAL, "operator", seen, settings.kubeconfig)
        target = Target(normal_apihost(settings.gateway_url), settings.key, "THAW_API_KEY")
        self._news, self._gateway = (Client(target, read_timeout_s=_NEWS_S + 30.0) for _ in range(2))
        self._changed = threading.Condition()
        self._stopping = False
        self._pending = True  # a pass is due
        self._resources: dict[str, ModelFunction] | None = None  # None: not listed yet
        self._standings: Mapping[str, Standing] | None = None  # None: nobody has asked since the last write
        self._token = ""
        self._n_writes = 0
        self._away = ""  # why the gateway does not answer
        self._refusals: dict[tuple[str, int], ErrorInfo] = {}  # by uid and generation
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

    # what there shall be ---------------------------------------------------------------------------------------------

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

    # what there is ---------------------------------------------------------------------------------------------------

    def _follow_gateway(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            with self._changed:
                if self._stopping:
                    return
                n_writes, known = self._n_writes, "" if self._standings is None else self._token
            try:
                plain = self._news.get("standings", known=known, wait_s=_NEWS_S if known else 0)
                self._told(wire.from_plain(Standings, plain), n_writes)
                pause_s = _FIRST_PAUSE_S
            except ThawError as e:
                self._lost(f"{e.message}  {e.hint}".strip())
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _told(self, found: Standings, n_writes: int) -> None:
        with self._changed:
            if self._away:
                self._log.event("gateway_back")
            self._pending = self._pending or bool(self._away) or found.token != self._token
            self._away = ""
            if n_writes == self._n_writes:  # else it may be from before the last write
                self._standings, self._token = {each.name: each for each in found.actions}, found.token
            self._changed.notify_all()

    def _lost(self, why: str) -> None:
        with self._changed:
            if not self._away and not self._stopping:
                self._log.event("gateway_away", error=why)
            self._pending = self._pending or self._away != why
            self._away, self._standings = why, None
            self._changed.notify_all()

    def _ask(self) -> Mapping[str, Standing]:
        """What there is after all writes so far.  Raises ThawError."""
        found = wire.from_plain(Standings, self._gateway.get("standings"))
        standings = {each.name: each for each in found.actions}
        with self._changed:
            self._standings, self._token = standings, found.token
        return standings

    # what is done ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._pending, _REFUSED_S if self._refusals else None)
                if self._stopping:
                    return
                if not self._pending:
                    self._refusals.clear()  # they are asked for again
                self._pending = False
            try:
                self._pass()
                pause_s = _FIRST_PAUSE_S
            except ThawError as e:
                self._log.event("pass_failed", error=e.message)
                with self._changed:
                    self._pending = True
                    self._changed.wait_for(lambda: self._stopping, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _pass(self) -> None:
        """Bring each resource and each action of ours to where it shall be, and say where it is.  Raises ThawError for
        what is to be tried again."""
        with self._changed:
            resources, away = dict(self._resources or {}), self._away
            standings: Mapping[str, Standing] | None = self._standings
            if self._resources is None:
                return  # the list wakes us
        self._forget_refusals(resources)
        failed: ThawError | None = None
        if not away:
            standings = self._ask() if standings is None else standings
            n_writes = self._n_writes
            failed = self._write(resources, standings)
            if n_writes != self._n_writes:
                standings = self._ask()
        for name, resource in resources.items():
            if not resource.deleting:
                self._show(resource, (standings or {}).get(name), away)
        if failed is not None:
            raise failed

    def _write(self, resources: Mapping[str, ModelFunction], standings: Mapping[str, Standing]) -> ThawError | None:
        """Returns what the gateway did not take for now; the other resources do not wait for it."""
        failed: ThawError | None = None
        for name in sorted({*resources, *standings}):
            resource = resources.get(name)
            step = decide.step(resource, standings.get(name), self._namespace)
            if step is None or (resource is not None and (resource.uid, resource.generation) in self._refusals):
                continue
            self._outdate()  # an answer that was asked for before this write says nothing of what there is after it
            try:
                self._carry_out(name, step)
            except ApiError as e:
                if resource is None or not _is_final(step, e):
                    failed = e
                else:
                    self._refused(resource, e)
            except ThawError as e:
                failed = e
            finally:
                self._outdate()  # nor does one that was asked for during the write
        return failed

    def _outdate(self) -> None:
        with self._changed:
            self._n_writes += 1
            self._standings = None

    def _carry_out(self, name: str, step: decide.Put | decide.Remove) -> None:
        match step:
            case decide.Put():
                overwrite = {} if step.creates else {"overwrite": True}
                self._gateway.put(action_path(name), step.body, **overwrite)
                self._log.event("deployed", action=name, creates=step.creates, scales="scaling" in step.body)
            case decide.Remove():
                self._gateway.delete(action_path(name))
                self._log.event("removed", action=name)

    def _refused(self, resource: ModelFunction, error: ApiError) -> None:
        code = decide.NAME_TAKEN if error.http_status == 409 else "Refused"
        self._log.event("refused", action=resource.name, status=error.http_status, error=error.message)
        with self._changed:
            self._refusals[resource.uid, resource.generation] = ErrorInfo(code, error.message, error.hint)

    def _forget_refusals(self, resources: Mapping[str, ModelFunction]) -> None:
        living = {(r.uid, r.generation) for r in resources.values()}
        with self._changed:
            self._refusals = {key: error for key, error in self._refusals.items() if key in living}

    def _show(self, resource: ModelFunction, standing: Standing | None, away: str) -> None:
        refusal = self._refusals.get((resource.uid, resource.generation))
        now = datetime.now(UTC)
        wanted: dict[str, Any] = dict(decide.status(resource, standing, self._namespace, refusal, away, now))
        if wanted == resource.status:
            return
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


def _is_final(step: decide.Put | decide.Remove, error: ApiError) -> bool:
    """A repeat would be refused again.  An update that met another one (409) is not: the next list has that one."""
    if error.http_status == 409:
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
