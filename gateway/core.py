"""One gateway process: joins its parts, starts and stops its threads."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from gateway import metrics
from gateway.auth import Authenticator
from gateway.front.memory import SharedMemory
from gateway.processor import Processor, waiting
from gateway.serving.actions.action_cache import Actions
from gateway.serving.actions.packages import Packages
from gateway.serving.actions.quotas import QuotaBook
from gateway.serving.answers.event_ids import EventIds
from gateway.serving.answers.kept import Bounds
from gateway.serving.answers.several import CHOICES_BYTES
from gateway.serving.async_runner import AsyncRunner
from gateway.serving.blocking import BlockingRuns
from gateway.serving.call import Call
from gateway.serving.cold_starts import ColdStarts
from gateway.serving.deploying.late_checks import LateChecks
from gateway.serving.deploying.package_locks import PackageLocks
from gateway.serving.deploying.pinned_images import PinnedImages
from gateway.serving.deploying.preflight import Preflight
from gateway.serving.dispatch import Dispatcher
from gateway.serving.execute import Steps, to_end
from gateway.serving.held.following import Followers
from gateway.serving.held.standings import StandingsOf
from gateway.serving.held.until_news import Held
from gateway.serving.held.work import WorkBook
from gateway.serving.moving.host_drains import HostDrains
from gateway.serving.reconnect import Reconnects
from gateway.serving.recorder import Recorder
from gateway.serving.routing.cold_progress import ColdProgress
from gateway.serving.routing.demand import Demand
from gateway.serving.routing.expected_wait import Expectation
from gateway.serving.routing.invoker_pool import InvokerPool
from gateway.serving.routing.throttle import QueueCaps, Throttle
from gateway.serving.routing.versions import Versions, deleted_while_waiting
from gateway.serving.routing.waiting_room import Ticket, WaitingRoom
from gateway.serving.runs import Outcome
from gateway.serving.scaling.kept_instances import KeptInstances
from gateway.serving.scaling.warming import Warming
from gateway.serving.sequences import CallMaker, Sequences
from gateway.serving.streams import Streams
from gateway.settings import GatewaySettings
from relay.protocol.messages import (
    ActionChanged,
    ColdStarted,
    DemandAdded,
    DemandRemoved,
    InstanceChanged,
    PackageChanged,
    QuotasChanged,
    StartFailed,
    StreamWanted,
)
from relay.state import redis_link
from relay.state.allowed_models import AllowedModels, ModelLeave
from relay.state.api_keys import ApiKeys
from relay.state.bus import EventReader
from relay.state.clock import StateClock
from relay.state.endings import EndingsListener
from relay.state.entities import Entities
from relay.state.pending import PendingClaims
from relay.state.quotas import NamespaceQuotas
from relay.state.records import Records
from relay.state.registry import LEASE_MS, Registry
from relay.state.storage import Storage
from relay.state.streams import StreamHomes
from thaw.errors import NotFound, PlatformError, from_info
from thaw.ids import ActionName, ActivationId, GatewayId, Namespace, random_hex_id
from thaw.logs import Log
from thaw.model_uri import policy_of
from thaw.pools import is_pool_name
from thaw.process.hangup import HangupWatcher
from thaw.process.lasting import LastingThread

_SAID_AGAIN: Final = 2
"""How often all demand is said again after the gateway's lease had run out: a scheduler that called it lost just before
may drop what was said the first time."""


class OwnHeartbeats:
    """The times of this gateway's own heartbeats; they decide whether others count as dead.  If one of ours was late,
    the state server may have been away, and the leases that are missing may be those of gateways that are alive."""

    def __init__(self, interval_s: float) -> None:
        self._late_s = interval_s + LEASE_MS / 3000
        self._beaten_s: float | None = None
        self._from_s = float("-inf")

    def may_claim(self, now_s: float) -> bool:
        """Called after every heartbeat that was written.  True when dead gateways' work may be claimed."""
        if self._beaten_s is not None and now_s - self._beaten_s > self._late_s:
            self._from_s = now_s + LEASE_MS / 1000
        self._beaten_s = now_s
        return now_s >= self._from_s


class Gateway:
    """Made after the fork (threads do not survive one)."""

    def __init__(self, settings: GatewaySettings, log: Log, make_call: CallMaker) -> None:
        self.settings = settings
        self.gateway_id = GatewayId(random_hex_id())
        self.log = log.bind(gateway=self.gateway_id[:8])
        self.processor = Processor()
        self.client = redis_link.connect(settings.state_url, waiting=waiting)
        clock = StateClock()
        self.quotas = QuotaBook(settings.quotas, NamespaceQuotas(self.client))
        self.storage = Storage(self.client, self.quotas.of)
        self.records, self.registry = Records(self.client, clock, self.storage), Registry(self.client, clock)
        self.keys = ApiKeys(self.client)
        self.models = ModelLeave(policy_of(settings.models), AllowedModels(self.client))
        self.actions = Actions(self.client, self.records)
        self.kept = KeptInstances(self.client, self.records, self.actions, self.quotas)
        self.entities = Entities(self.client, settings.entities_bytes)
        self.packages = Packages(self.client, self.entities, self.actions)
        self.throttle = Throttle(settings.per_minute, settings.held_per_namespace, places=settings.threads)
        self.calls = Throttle(settings.calls_per_minute, settings.calls_concurrent)
        self.web_calls = Throttle(settings.calls_per_minute, settings.calls_concurrent)
        self.answered_actions = SharedMemory(settings.answered_action_bytes)
        self.choice_bodies = SharedMemory(CHOICES_BYTES)
        self.hangups = HangupWatcher()
        self.room = WaitingRoom()
        self.cold_progress = ColdProgress(self.room, self.registry)
        expected = Expectation(self.registry)
        self.caps = QueueCaps(
            settings.queue_action,
            settings.queue_namespace,
            self.room,
            expected,
            self.registry.n_held,
            lambda namespace: self.quotas.of(namespace).held,
        )
        token = self.registry.host_token(secrets.token_urlsafe(32))
        self.scrapers = (token, settings.metrics_token)
        self.event_ids = EventIds(token)
        self.pool = InvokerPool(token, settings.result_bytes)
        self.auth = Authenticator(self.keys, run_keys=self.pool.run_keys)
        self.preflight = Preflight(self.registry, self.pool, settings.preflight_s)
        self.late_checks = LateChecks(self.client, self.records, self.preflight, self.log)
        allowed = [prefix for text in settings.images.split(",") if (prefix := text.strip())]
        self.pinned_images = PinnedImages(self.registry, self.pool, allowed, settings.image_deploy_s)
        self.package_locks = PackageLocks(self.registry, self.pool, settings.packages_s)
        self.demand = Demand(self.room, self.registry, self.gateway_id, self.log)
        self.held = Held(settings.threads)
        versions = Versions(self.actions.get)
        self.warming = Warming(self.room, self.demand, self.registry, self.held, versions)
        self.work = WorkBook(self.client, self.registry)
        self.standings = StandingsOf(self.client, self.registry, self.work, self.actions.list)
        self.cold_starts = ColdStarts(self.client, self.log)
        self.followers = Followers(self.client)
        self.endings = EndingsListener(self.client, settings.state_url, self.log)
        self.dispatcher = Dispatcher(
            self.room,
            self.demand,
            self.pool,
            versions,
            self.log,
            settings.llm_result_bytes,
            self.cold_starts.note,
        )
        self.sequences = Sequences(
            self.dispatcher, self.packages, make_call, self.ended, self._caused, settings.sequence_length
        )
        self.host_drains = HostDrains(self.registry, lambda name: self.actions.get(name).is_llm)
        self.recorder = Recorder(self.records, self.pool, self.log, self.quotas.weight_of, self.storage.expect)
        bounds = Bounds(settings.reconnect_s, settings.reconnect_stream_bytes, settings.reconnect_bytes)
        self.streams = Streams(self.dispatcher, self.ended, self.throttle, bounds, 2 * settings.threads)
        self.reconnects = Reconnects(
            self.streams,
            StreamHomes(self.client, redis_link.connect(settings.state_url), self.gateway_id),
            self.registry,
            self.throttle,
            self.caps,
            self.gateway_id,
            settings.reconnect_s,
            self.log,
        )
        self.choices = ThreadPoolExecutor(settings.threads, "choice")
        self.blocking = BlockingRuns(
            self.steps, self.recorder, self.records, self.registry, self.gateway_id, 2 * settings.threads
        )
        self.runner = AsyncRunner(
            settings.state_url,
            self.gateway_id,
            self.execute,
            self.dispatcher,
            self.demand,
            self.actions,
            self.records,
            self.registry,
            PendingClaims(self.client, self.gateway_id),
            self.recorder,
            settings.async_threads,
            self.log,
            self.processor,
            self.quotas.weight_of,
        )
        self._events = EventReader(settings.state_url, self._on_event, self._on_connected, self.log)
        self._stop = threading.Event()
        self._missed = ""  # why the last heartbeat was not written
        self._heartbeat = LastingThread(self._beat, "heartbeat")

    def admit(self, call: Call, *, is_held: bool = True) -> None:
        """Refuse a call whose record has no room, or that would only add to a full queue.  ``is_held``: False for a
        202.  Raises ThawError."""
        self.storage.check(call.subject.namespace)
        self.caps.check(call.action, is_held=is_held)

    def steps(self, call: Call) -> Steps:
        return self.sequences.steps(call)

    def execute(self, call: Call) -> Outcome:
        return to_end(self.steps(call))

    def _caused(self, call: Call) -> list[ActivationId]:
        return self.records.caused_by(call.activation_id, call.subject.namespace, call.received_ms)

    def ended(self, call: Call, outcome: Outcome) -> None:
        """Count the end of a call, and have its record written."""
        metrics.ended(call, outcome)
        self.recorder.submit(call, outcome)

    def problems(self) -> tuple[str, ...]:
        """Return the faults of the state server, one sentence for each.  Raises PlatformError when it does not answer.

        A server whose disk is full may still answer reads, so the last heartbeat says whether it also writes.
        """
        self.keys.any()
        return (f"the last heartbeat was not written: {self._missed}",) if self._missed else ()

    def start(self) -> None:
        self.registry.gateway_alive(self.gateway_id)
        self.room.reload(self.registry.instances())
        self.quotas.reload()
        self.storage.look()
        if not self.storage.is_limited:
            self.log.event("state_memory_unlimited", advice="set the state server's maxmemory, or tenants may fill it")
        self.processor.start()
        self._events.start()
        self.hangups.start()
        self.endings.start()
        self.recorder.start()
        self.cold_starts.start()
        self.cold_progress.start()
        self.streams.start()
        self.late_checks.start()
        self.runner.start()
        self._heartbeat.start()
        self.log.event("gateway_started", bind=self.settings.bind)

    def stop(self) -> None:
        """Called after the last request: write the records that remain, and leave the rest to other gateways."""
        self._stop.set()
        self.held.end_all()
        self.endings.stop()
        self.runner.stop()
        self.blocking.stop()
        self.reconnects.stop()
        self.streams.stop(timeout_s=0.5)
        self.cold_progress.stop()
        self.choices.shutdown(wait=False, cancel_futures=True)
        self.cold_starts.stop(timeout_s=0.5)
        self.late_checks.stop(timeout_s=0.5)
        self.recorder.stop(timeout_s=3.0)
        self._events.stop()
        self.hangups.stop()
        self.pool.close()
        self.processor.stop()
        try:
            self.registry.forget_gateway(self.gateway_id)
        except PlatformError as e:
            self.log.event("gateway_not_forgotten", error=e.message)
        self.log.event("gateway_stopped")

    def _beat(self) -> None:
        """Write heartbeats, and take over the work of gateways that have died."""
        own, n_to_say = OwnHeartbeats(self.settings.heartbeat_s), 0
        while True:
            try:
                if not self.registry.gateway_alive(self.gateway_id):
                    self.log.event("lease_had_run_out")
                    n_to_say = _SAID_AGAIN
                self.storage.look()
                self.demand.retry()
                if n_to_say:
                    self._say_all_demand(self.room.all_waiting())
                    n_to_say -= 1
                if own.may_claim(time.monotonic()):
                    self.runner.claim_dead()
                self._missed = ""
            except PlatformError as e:
                self._missed = e.message
                self.log.event("heartbeat_missed", error=e.message)
            if self._stop.wait(self.settings.heartbeat_s):
                return

    def _say_all_demand(self, waiting: Sequence[Ticket]) -> None:
        """Raises Unavailable."""
        self.demand.restore(waiting, self.runner.holds, self.runner.ahead())

    def _on_event(self, message: object) -> None:
        if isinstance(message, InstanceChanged):
            self.room.instance_changed(message.instance)
            self.pool.gone.instance_changed(message.instance)
            self.cold_progress.instance_changed(message.instance)
            self.host_drains.instance_changed(message.instance)
            self.standings.instance_changed(message.instance)
            self.work.bell.ring()
        elif isinstance(message, DemandAdded | DemandRemoved):
            self.work.bell.ring()
        elif isinstance(message, StartFailed):
            self.room.fail(message.action, message.activation_ids, from_info(message.error))
            self.standings.action_changed(message.action)
        elif isinstance(message, ColdStarted):
            self.standings.action_changed(message.action)
        elif isinstance(message, StreamWanted):
            self.reconnects.wanted(message)
        elif isinstance(message, QuotasChanged):
            self._on_quotas(message.namespace)
        elif isinstance(message, ActionChanged):
            self.actions.forget(message.action)
            self.late_checks.ring()
            if message.deleted:
                self._on_deleted(message.action)
            self.room.action_changed(message.action)
            self.standings.action_changed(message.action)
        elif isinstance(message, PackageChanged):
            self.packages.forget(message.namespace, message.package)

    def _on_quotas(self, namespace: Namespace) -> None:
        try:
            self.quotas.changed(namespace)
        except PlatformError as e:
            self.log.event("quotas_unknown", namespace=namespace, error=e.message)

    def _on_deleted(self, action: ActionName) -> None:
        if not is_pool_name(action):  # the instances of a pool that is made anew are the same (thaw/pools.py)
            self.room.retire(action)
        try:
            self.actions.get(action)  # deleted and made anew: the waiting requests wait for the new one
        except NotFound:
            self.room.fail_all(action, deleted_while_waiting())
        except PlatformError as e:
            self.log.event("deleted_action_unknown", action=action, error=e.message)

    def _on_connected(self) -> None:
        """Events may have been missed, so the registry's content is taken over.  Our demand may be gone with a
        server."""
        self.registry.gateway_alive(self.gateway_id)  # first: demand of a gateway without a lease is dropped
        self.actions.forget()
        self.packages.forget()
        self.quotas.reload()
        records = self.registry.instances()
        self.pool.gone.reload(records)
        self.cold_progress.reload(records)
        self.standings.reload()
        self.late_checks.ring()
        self._say_all_demand(self.room.reload(records))
        self.work.bell.ring()
