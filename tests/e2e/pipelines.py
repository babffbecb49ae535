"""Pipeline groups on a running platform: their containers, and everything that must end with them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import redis

from relay.state import keys, redis_link
from relay.state.credentials import key_prefix
from relay.state.registry import Registry
from tests.e2e.machine import Machine, processes, session_of
from thaw import wire
from thaw.action import KIND_LLM
from thaw.ids import GroupId
from thaw.instance import InstanceRecord
from thaw.plan import Plan
from thaw.tracing.timeline import Interval, analyse
from thaw.tracing.trace import TraceEvent

T = TypeVar("T")
_USER = "thaw-group-"


@dataclass(frozen=True, slots=True)
class StageContainer:
    record: InstanceRecord
    pid: int
    directory: Path

    def has_said(self, event: str) -> bool:
        return f'"{event}"' in (self.directory / "stderr.log").read_text()

    def kill(self) -> None:
        """Kill its processes.  The first one may have been forked just now and not lead their session yet."""
        for pid in processes():
            if pid == self.pid or session_of(pid) == self.pid:
                os.kill(pid, signal.SIGKILL)


class Pipelines:
    """Reads the state server, the relay server and the hosts' run directories, as an operator with all keys could."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        platform = json.loads((machine.state_dir / "platform.json").read_text())
        self._run_dir = Path(platform["run_dir"])
        self._state: redis.Redis = redis_link.connect(platform["state_url"])
        self._relay: redis.Redis = redis_link.connect(platform["relay_url"])

    def close(self) -> None:
        self._state.close()
        self._relay.close()

    def stages(self, action: str) -> dict[int, StageContainer]:
        """The containers of ``action`` that have a process, by stage."""
        return {found.record.stage: found for found in self.containers(action)}

    def containers(self, action: str) -> list[StageContainer]:
        found = []
        for owner in self._run_dir.glob("host-*/c/*/owner.json"):
            try:
                plain = json.loads(owner.read_text())
            except FileNotFoundError:
                continue  # it has just been removed
            if plain["pid"] and "record" in plain["labels"]:
                record = wire.loads(InstanceRecord, plain["labels"]["record"])
                if record.action == f"guest/{action}":
                    found.append(StageContainer(record, plain["pid"], owner.parent))
        return found

    def wait_stem_cells(self, n_hosts: int) -> None:
        """Wait until every host has a stem cell, because the time of a start and its number of stages depend on them.

        Four imports share the machine.
        """
        registry = Registry(self._state)

        def imported() -> bool:
            return [KIND_LLM in h.stem_kinds for h in registry.live_hosts()] == [True] * n_hosts

        wait_for(imported, "a host without a stem cell", 180)

    def leftovers(self, groups: Iterable[GroupId]) -> list[str]:
        """Everything that remains of these groups."""
        gone = set(groups)
        left = [
            f"instance {r.instance_id} of stage {r.stage}"
            for r in Registry(self._state).instances()
            if r.group_id in gone
        ]
        left += [f"plan {p.group_id}" for p in Registry(self._state).plans() if p.group_id in gone]
        left += self.credentials(gone)
        left += [f"frame {k!r}" for group in gone for k in self._relay.keys(key_prefix(group) + "*")]
        left += [
            f"fetch {f}" for host in Registry(self._state).live_hosts() for f in host.fetches if f.group_id in gone
        ]
        return left + [f"descriptor socket {d}" for d in self._strange_sockets()]

    def remainders(self) -> list[str]:
        """Everything that remains of any group or request on an idle platform."""
        registry = Registry(self._state)
        left = [f"instance {r.instance_id} of stage {r.stage}" for r in registry.instances()]
        left += [f"plan {p.group_id}" for p in registry.plans()]
        left += [f"request {d}" for d in self._state.hkeys(keys.DEMAND)]  # type: ignore[union-attr]
        left += [f"user {u}" for u in self._users()]
        left += [f"frame {k!r}" for k in self._relay.keys(key_prefix(GroupId("*")) + "*")]
        for host in registry.live_hosts():
            left += [f"fetch {f}" for f in host.fetches]
            left += [f"segment {held} on {host.host_id}" for held in (host.pool.held if host.pool else ())]
        return left + [f"descriptor socket {d}" for d in self._strange_sockets()]

    def credentials(self, groups: Iterable[GroupId]) -> list[str]:
        """Return the users and keys that let the stages of these groups into the relay server."""
        found = [f"user {u}" for u in self._users() if u.removeprefix(_USER) in groups]
        keys = self._state.keys("thaw:group-credential:*")
        return found + [f"key {k!r}" for k in keys if _text(k).split(":")[-1] in groups]

    def _strange_sockets(self) -> list[str]:
        known = {r.instance_id for r in Registry(self._state).instances()}
        return [str(d) for d in self._run_dir.glob("host-*/doors/*.sock") if d.stem not in known]

    def _users(self) -> list[str]:
        users: Any = self._relay.execute_command("ACL", "USERS")  # type: ignore[no-untyped-call]
        return [_text(u) for u in users if _text(u).startswith(_USER)]


def wait_for(look: Callable[[], T | None], what: str, deadline_s: float = 60) -> T:
    """Wait for a result that no message announces to a test: check several times, until a deadline."""
    until = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < until, what
        time.sleep(0.02)
    return found


def wait_gone(look: Callable[[], list[str]], deadline_s: float = 60) -> None:
    until = time.monotonic() + deadline_s
    while left := look():
        assert time.monotonic() < until, left
        time.sleep(0.05)


def plan_of(machine: Machine, activation_id: str) -> tuple[Plan, tuple[Interval, ...]]:
    """The plan of an activation's start, and the fetches of this start."""

    def written() -> Mapping[str, Any] | None:  # the plan is written after the answer
        found = machine.request("GET", f"/api/v1/namespaces/_/activations/{activation_id}/trace")
        return found.json() if found.status_code == 200 and found.json().get("plan") else None

    trace = wait_for(written, f"no plan of {activation_id}")
    plan = wire.from_plain(Plan, trace["plan"])
    timeline = analyse([wire.from_plain(TraceEvent, e) for e in trace["events"]])
    assert timeline is not None
    return plan, tuple(i for i in timeline.intervals if i.phase == "fetch")


def _text(value: object) -> str:
    return redis_link.text(value)
