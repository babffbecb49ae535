"""All incoming messages of a stage: one thread waits on all sockets, and hands messages out by priority.

::

    lane (socket) ──┐
    lane (socket) ──┼── epoll ──▶ assemblies ──▶ ready: inference │ KV │ bulk ──▶ receive()
    closed (event) ─┘

No thread stands between a socket and the caller of ``receive``: handing a message from one thread to another would
cost as much as the kernel takes to carry it.  Messages that are not received stay in the sockets, and with the senders.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from typing import Final, Protocol

from relay.protocol.frames import Priority
from relay.transports.base import Message, closed
from thaw.errors import PlatformError

INCOMING: Final = select.EPOLLIN | select.EPOLLRDHUP
_MOST_EVENTS: Final = 64
"""The most events of one poll; the others come with the next poll."""
LOSS_ONLY: Final = select.EPOLLRDHUP
"""For a socket that is only written: answers wake no thread, a lost connection does."""

BUSY_S: Final = 0.01
"""The pause before another try to revive a lane on which a sending thread works: that thread may leave it lost."""


class Lane(Protocol):
    """One connection on which messages come, or go.  The caller of every method holds the inbox's lock."""

    priority: Priority

    def advance(self) -> None:
        """The socket is readable, or was lost: read it once, and deliver the messages that are complete now."""

    def arm(self) -> None:
        """The caller has taken every message: tell the other side, and ask for more if the transport has to ask."""

    def revive(self, now_s: float) -> float | None:
        """Renew a lost connection.  Returns the time to call again, None when there is nothing left to do."""

    def close(self) -> None: ...


class Inbox:
    def __init__(self, stage: int) -> None:
        self.lock = threading.Lock()
        """Held while lanes are read or exchanged; never while waiting."""
        self._inside = threading.Lock()  # held by the thread that receives, all the time
        self._stage = stage
        self._epoll = select.epoll()
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._waker, select.EPOLLIN)
        self._lanes: dict[int, Lane] = {}
        self._idle: list[Lane] = []  # without a socket: to be revived
        self._ready: tuple[deque[Message], ...] = tuple(deque() for _ in Priority)
        self._unarmed: list[Lane] = []
        self._closed = False

    def watch(self, fd: int, lane: Lane, events: int = INCOMING) -> None:
        self._lanes[fd] = lane
        try:
            self._epoll.register(fd, events)
        except ValueError:
            raise closed(self._stage) from None

    def rewatch(self, fd: int, events: int) -> None:
        if fd in self._lanes and not self._closed:
            self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Call this before ``fd`` is closed: the kernel may give its number to another socket."""
        if self._lanes.pop(fd, None) is not None and not self._closed:
            self._epoll.unregister(fd)

    def deliver(self, message: Message) -> None:
        self._ready[message.priority].append(message)

    def arm_again(self, lane: Lane) -> None:
        """``lane`` cannot acknowledge its messages yet: ``arm`` it again after other messages have come."""
        if lane not in self._unarmed:
            self._unarmed.append(lane)

    def idle(self, lane: Lane) -> None:
        """``lane`` has no socket now; the thread that receives calls its ``revive``."""
        if lane not in self._idle:
            self._idle.append(lane)
        self.wake()

    def wake(self) -> None:
        """Let a waiting ``receive`` check its lanes again."""
        if not self._closed:
            os.eventfd_write(self._waker, 1)

    def receive(self, deadline_s: float) -> Message:
        with self._inside:
            until, last_look = time.monotonic() + deadline_s, False
            while not self._closed:
                for queue in self._ready:
                    if queue:
                        return queue.popleft()
                if self._unarmed:
                    self._arm()
                retry_s = self._revive() if self._idle else None
                left_s = until - time.monotonic()
                if left_s <= 0 and last_look:
                    raise TimeoutError(f"stage {self._stage}: nothing came in {deadline_s} s")
                last_look = left_s <= 0  # messages that have already come count, also for a deadline of 0
                self._poll(max(0.0, left_s), retry_s)
            raise closed(self._stage)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True  # before the thread that receives is woken
        os.eventfd_write(self._waker, 1)
        with self._inside, self.lock:  # an epoll that is closed under a thread would never wake it
            for lane in [*self._lanes.values(), *self._idle]:
                lane.close()
            self._lanes.clear()
            self._epoll.close()
            os.close(self._waker)

    def _poll(self, left_s: float, retry_s: float | None) -> None:
        """Wait, then read the most urgent of the lanes that can be read."""
        events = self._epoll.poll(left_s if retry_s is None else min(left_s, retry_s), _MOST_EVENTS)
        if not events:
            return
        with self.lock:
            lane = self._lanes.get(events[0][0]) if len(events) == 1 else None
            if lane is None:
                lane = self._most_urgent(events)
            if lane is not None:
                lane.advance()
                self._unarmed.append(lane)

    def _most_urgent(self, events: list[tuple[int, int]]) -> Lane | None:
        lane: Lane | None = None
        for fd, _ in events:
            if fd == self._waker:
                os.eventfd_read(self._waker)
                continue
            found = self._lanes.get(fd)
            if found is not None and (lane is None or found.priority < lane.priority):
                lane = found
        return lane

    def _arm(self) -> None:
        with self.lock:
            lanes, self._unarmed = self._unarmed, []
            for lane in lanes:
                lane.arm()

    def _revive(self) -> float | None:
        now = time.monotonic()
        times = []
        with self.lock:
            idle, self._idle = self._idle, []
            while idle:
                try:
                    at = idle[0].revive(now)
                except PlatformError:
                    self._idle += idle
                    raise
                lane = idle.pop(0)
                if at is not None:
                    times.append(at)
                    self._idle += [] if lane in self._idle else [lane]
        return max(0.0, min(times) - now) if times else None
