"""The preflight of a model before it is deployed: a host with the engine says whether a start would succeed.

One host of each kind of device is asked, those with a stem cell first, until one can run the model.  When those that
could look are busy, they are asked once more, and wait until they have a stem cell to spare.  A deploy never waits
longer than THAW_PREFLIGHT_S and is never refused because nobody could look: then the answer and the action's record say
so, and the model is checked later (late_checks.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.serving.hangup import Hangup
from gateway.serving.routing.invoker_pool import InvokerPool
from relay.protocol.data_port_messages import PreflightFound, PreflightWanted
from relay.state.registry import Registry
from thaw import wire
from thaw.action import KIND_LLM
from thaw.config import LlmConfig
from thaw.errors import (
    ErrorInfo,
    InitFailed,
    MemoryTooSmall,
    ModelCorrupt,
    ModelNotFound,
    ModelUnsupported,
    PlatformError,
    ThawError,
    TimeLimitExceeded,
    Unfit,
)
from thaw.host import HostReport

REFUSALS: Final = (ModelNotFound, ModelCorrupt, ModelUnsupported, MemoryTooSmall, InitFailed)
"""The errors of a start that are the function's own fault.  Any other error means that a host could not check."""
_ASKED_OF_A_KIND: Final = 2
"""Hosts of one kind of device that are asked when the first one cannot look."""
_MOST_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class Verdict:
    """``found`` is a host's answer; ``refusal`` the error of the start, on every kind of device; ``unchecked`` why
    nobody could say whether the engine can run the model.  A verdict may have notes and be unchecked."""

    found: PreflightFound | None = None
    refusal: ErrorInfo | None = None
    unchecked: str = ""

    @property
    def can_run(self) -> bool:
        return self.refusal is None and not self.unchecked

    @property
    def holds_everywhere(self) -> bool:
        """Whether no other host's answer matters: one kind of device that can run the model is enough, and a refusal
        because of the files is the same on every kind."""
        of_files = self.refusal is not None and self.refusal.code in (ModelNotFound.__name__, ModelCorrupt.__name__)
        return self.can_run or of_files

    @property
    def busy(self) -> bool:
        """Whether the host can look soon."""
        return self.found is not None and self.found.busy


@dataclass(frozen=True, slots=True)
class _Question:
    """One check: what is asked, until when on the monotonic clock, and what ends it earlier."""

    wanted: PreflightWanted
    ends_s: float
    hangup: Hangup

    def waiting(self, ends_s: float) -> _Question:
        return replace(self, wanted=replace(self.wanted, waits=True), ends_s=ends_s)


@dataclass(frozen=True, slots=True)
class _Answer:
    address: str
    verdict: Verdict


class Preflight:
    def __init__(self, registry: Registry, pool: InvokerPool, deadline_s: float) -> None:
        self._registry, self._pool, self._deadline_s = registry, pool, deadline_s

    @property
    def is_on(self) -> bool:
        return self._deadline_s > 0

    def check(
        self,
        config: LlmConfig,
        namespace: str,
        *,
        memory: bool = True,
        longest_s: float | None = None,
        hangup: Hangup | None = None,
    ) -> Verdict:
        """For a function of this namespace.  Without ``memory``, resources.gpu_memory_mb is nobody's wish yet.
        ``longest_s``: instead of the time that a deploy waits.  Raises nothing: a platform that is in trouble deploys
        unchecked."""
        if not self.is_on:
            return Verdict(unchecked="the operator has turned the check off (THAW_PREFLIGHT_S)")
        ends_s = time.monotonic() + (self._deadline_s if longest_s is None else longest_s)
        try:
            kinds = by_kind(self._registry.live_hosts())
        except PlatformError as e:
            return Verdict(unchecked=e.message)
        question = _Question(PreflightWanted(config, 0, memory, namespace), ends_s, hangup or Hangup())
        answers = list(self._until_one_can(kinds, question))
        return merged(self._when_not_busy(answers, question))

    def look_again(self, config: LlmConfig, namespace: str, verdict: Verdict) -> Verdict:
        """After a function was written, check that its model still exists.  A removal looks for users of the model, and
        does not see a function that is not written yet.  The engine's answer is known, so this is short."""
        if verdict.found is None or verdict.unchecked:
            return verdict
        again = self.check(config, namespace)
        gone = again.refusal is not None and again.refusal.code == ModelNotFound.__name__
        return again if gone else verdict

    def _until_one_can(self, kinds: Sequence[Sequence[HostReport]], question: _Question) -> Iterator[_Answer]:
        """One answer for each kind: of the first host that can look, else of one that is only busy."""
        for hosts in kinds:
            answers: list[_Answer] = []
            for host in hosts[:_ASKED_OF_A_KIND]:
                answers.append(_Answer(host.address, self._asked(host.address, question)))
                if not answers[-1].verdict.unchecked:
                    break
            yield min(answers, key=lambda a: (bool(a.verdict.unchecked), not a.verdict.busy))
            if answers[-1].verdict.can_run:
                return

    def _when_not_busy(self, answers: Sequence[_Answer], question: _Question) -> Iterator[Verdict]:
        """The answers, in place of those of busy hosts the ones that they give when something is spare.  The busy hosts
        share the time that is left; none is waited for where another one's answer holds everywhere."""
        n_busy = 0 if any(a.verdict.holds_everywhere for a in answers) else sum(a.verdict.busy for a in answers)
        for answer in answers:
            if not (n_busy and answer.verdict.busy):
                yield answer.verdict
                continue
            now_s = time.monotonic()
            verdict = self._asked(answer.address, question.waiting(now_s + (question.ends_s - now_s) / n_busy))
            yield verdict
            n_busy = 0 if verdict.holds_everywhere else n_busy - 1

    def _asked(self, address: str, question: _Question) -> Verdict:
        ends_s = question.ends_s
        left_ms = round(1000 * (ends_s - time.monotonic()))
        if left_ms <= 0:
            return Verdict(unchecked="the check took too long")
        body = wire.dumps(replace(question.wanted, deadline_ms=left_ms))
        try:
            reply = self._pool.post(
                address, "/preflight", body, stream=False, deadline_s=ends_s, hangup=question.hangup
            )
            reply.read_head()
            found = wire.from_plain(PreflightFound, reply.read_json(max_bytes=_MOST_BYTES))
        except TimeLimitExceeded:
            return Verdict(unchecked="the check took too long")
        except REFUSALS as e:
            return Verdict(refusal=e.info())
        except ThawError as e:
            return Verdict(unchecked=e.message)
        return Verdict(found, unchecked=found.unchecked)


def by_kind(reports: Sequence[HostReport]) -> list[list[HostReport]]:
    """The hosts that take work, one list for each kind of device; those with a waiting engine are first."""
    kinds: dict[str, list[HostReport]] = {}
    for report in sorted(reports, key=lambda r: (KIND_LLM not in r.stem_kinds, r.host_id)):
        if report.takes_starts:
            kinds.setdefault(report.devices[0].kind if report.devices else "", []).append(report)
    return list(kinds.values())


def merged(found: Iterable[Verdict]) -> Verdict:
    """Return the verdict for the platform: one kind of device that can run the model is enough, and a refusal needs all
    kinds.  A refusal because of the files is the same on every kind."""
    verdicts = list(found)
    for verdict in verdicts:
        if verdict.can_run:
            return verdict
    for verdict in verdicts:
        if verdict.holds_everywhere:
            return verdict
    unchecked = next((v for v in verdicts if v.refusal is None), None)
    if unchecked is not None:
        return unchecked
    return verdicts[0] if verdicts else Verdict(unchecked="the platform has no host")


def unfit(refusal: ErrorInfo) -> Unfit:
    """The error of a deploy."""
    step = f"{refusal.hint}; " if refusal.hint else ""
    return Unfit(
        f"This model would not start: {refusal.message}",
        hint=f"{step}to deploy it anyway: thaw action create --force, or PUT with force=true",
    )
