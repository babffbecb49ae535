"""Checks the models that were deployed before any engine could look at them (preflight.py), as soon as one can.

An action's record says that it is unchecked, and the state server has the list of them, so a look outlasts the gateway
that took the deploy.  Gateways share the list; of two that look at one action the slower one changes nothing::

    claim ──▶ look ──▶ nobody could tell ──▶ again, later each time, for GIVE_UP_S
                  └──▶ an answer ──▶ the record has it, unless another version was deployed meanwhile

A look waits on the host for what starts leave (invoker/containers/spare_cells.py); the pauses here are for reasons that
nothing announces, as a store that was away.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Final

import redis

from gateway.serving.actions.action_cache import namespace_of
from gateway.serving.deploying.preflight import Preflight, Verdict
from gateway.serving.hangup import Hangup
from relay.state.records import Records
from relay.state.rewriting import rewrite_action
from relay.state.unchecked import Claim, Unchecked
from thaw.action import Action
from thaw.clock import wall_ms
from thaw.errors import Conflict, NotFound, PlatformError
from thaw.ids import ActionName
from thaw.logs import Log
from thaw.process.lasting import LastingThread

LOOK_S: Final = 30.0
"""The longest look.  No client waits for it, but other unchecked actions do."""
CLAIM_S: Final = 2 * LOOK_S
"""A gateway that claimed an action this long ago, and has not said what it found, has died."""
GIVE_UP_S: Final = 24 * 3600.0
_SHORTEST_S, _LONGEST_S, _OF_AGE = 2.0, 600.0, 0.25
"""The pause after a look is this part of the time since the deploy, within these bounds."""
_STATE_AWAY_S: Final = 5.0
_MOST_CHARS: Final = 500
"""The length at which a reason or an error is cut, because no quota counts what a look writes into a record."""


class LateChecks:
    def __init__(self, client: redis.Redis, records: Records, preflight: Preflight, log: Log) -> None:
        self._client, self._records, self._preflight, self._log = client, records, preflight, log
        self._unchecked = Unchecked(client)
        self._news = threading.Event()
        self._gone = Hangup()  # set when this gateway stops
        self._thread = LastingThread(self._run, "late-checks")

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._gone.set()
        self._news.set()
        self._thread.join(timeout_s)

    def before_write(self, action: Action) -> None:
        """Called before a record is written, so that no unchecked one is missing from the list.  Raises
        PlatformError."""
        if action.unchecked and self._preflight.is_on:
            self._unchecked.add(action.name, CLAIM_S)

    def after_write(self, action: Action) -> None:
        """Raises PlatformError."""
        if action.unchecked and self._preflight.is_on:
            self._unchecked.add(action.name)
            self.ring()

    def ring(self) -> None:
        """There may be an unchecked action, of this gateway or of one that dies before it has looked."""
        self._news.set()

    def _run(self) -> None:
        while not self._gone.is_set:
            self._news.clear()
            self._news.wait(self._next())

    def _next(self) -> float | None:
        """Look at the first action that is due; return the seconds until the next one is.  None: until there is one."""
        if not self._preflight.is_on:
            return None
        try:
            claim = self._unchecked.claim(CLAIM_S)
            if not isinstance(claim, Claim):
                return claim
            self._look(claim)
        except PlatformError as e:
            self._log.event("late_check_failed", error=e.message)
            return _STATE_AWAY_S
        return 0.0

    def _look(self, claim: Claim) -> None:
        """Raises PlatformError."""
        action = self._still_unchecked(claim.name)
        if action is None or action.config is None:
            return self._unchecked.done(claim)
        verdict = self._preflight.check(action.config, action.namespace, longest_s=LOOK_S, hangup=self._gone)
        if self._gone.is_set:
            return self._unchecked.again(claim, 0.0)
        try:
            self._write(action, verdict)
        except Conflict:  # another version was deployed, and perhaps unchecked, too
            return self._unchecked.again(claim, 0.0)
        except NotFound:
            return self._unchecked.done(claim)
        age_s = (wall_ms() - action.updated_ms) / 1000
        if verdict.unchecked and age_s < GIVE_UP_S:
            pause_s = 0.0 if verdict.busy else min(_LONGEST_S, _OF_AGE * age_s)  # a look at a busy host has waited
            return self._unchecked.again(claim, max(_SHORTEST_S, pause_s))
        self._say(action, verdict)
        return self._unchecked.done(claim)

    def _still_unchecked(self, name: ActionName) -> Action | None:
        try:
            action = self._records.action(namespace_of(name), name)
        except NotFound:
            return None
        return action if action.unchecked else None

    def _write(self, action: Action, verdict: Verdict) -> None:
        """Raises Conflict, NotFound, PlatformError."""
        if noted(action, verdict) == action:
            return

        def change(now: Action) -> Action:
            now.check_version(action.version)
            return noted(now, verdict)

        rewrite_action(self._client, action.namespace, action.name, change)

    def _say(self, action: Action, verdict: Verdict) -> None:
        of = {"action": action.name, "version": action.version}
        if verdict.refusal is not None:
            self._log.event("deployed_model_would_not_start", **of, error=verdict.refusal.message)
        elif verdict.unchecked:
            self._log.event("deployed_model_unchecked", **of, error=verdict.unchecked)
        else:
            self._log.event("deployed_model_checked", **of)


def noted(action: Action, verdict: Verdict) -> Action:
    """The action with what a check has found out, as its record keeps it."""
    return replace(
        action,
        unchecked=verdict.unchecked[:_MOST_CHARS],
        refusal=verdict.refusal.message[:_MOST_CHARS] if verdict.refusal is not None else "",
        embeds=verdict.found.embeds if verdict.found is not None else action.embeds,
        most_stages=verdict.found.most_stages if verdict.found is not None else action.most_stages,
    )


def differ_in_more(one: Action, other: Action) -> bool:
    """Whether two readings of one record differ in more than what a late check writes."""
    return _unnoted(one) != _unnoted(other)


def _unnoted(action: Action) -> Action:
    return replace(action, unchecked="", refusal="", embeds=None, most_stages=0)
