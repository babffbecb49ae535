"""One group's access to its relay server: authenticated connections, key names, a check that nothing was lost."""

from __future__ import annotations

import secrets
import threading
from typing import Final

from relay.protocol.frames import Priority
from relay.protocol.messages import GroupCredential
from relay.state.credentials import key_prefix
from relay.transports.resp import Connection, Refused, Server, command
from thaw.errors import Unavailable, WorkerLost
from thaw.ids import GroupId

TTL_MS: Final = 120_000
"""A stream that no stage uses is deleted after this time; a live group renews its streams far more often."""
TOUCH_S: Final = 30.0
"""A stream's time to live is renewed this often while it is written, not with every frame."""
REMEMBERED_MS: Final = 24 * 3600 * 1000
"""Time to live of the few bytes that a quiet group needs later: its marker, and how much each receiver has taken.  A
sender that found no such sum would wait for one, although the receiver has nothing more to report."""

_UNKNOWN: Final = frozenset({"WRONGPASS", "NOAUTH", "NOPERM"})
_STARTING: Final = frozenset({"LOADING", "MASTERDOWN", "BUSY", "TRYAGAIN"})


class GroupRelay:
    """Connections of one stage.  Thread-safe."""

    def __init__(self, url: str, credential: GroupCredential, group_id: GroupId) -> None:
        self.group_id, self.group_bytes = group_id, bytes.fromhex(group_id)
        self._server, self._credential = Server.parse(url), credential
        self._marker_key = key_prefix(group_id) + "alive"
        self._marker: bytes | None = None
        self._lock = threading.Lock()

    def stream(self, sender: int, receiver: int, priority: Priority) -> str:
        return f"{key_prefix(self.group_id)}{sender}:{receiver}:{priority.value}"

    def address_key(self, stage: int) -> str:
        """The key of the TCP address on which a stage listens (tcp.py)."""
        return f"{key_prefix(self.group_id)}at:{stage}"

    def touch(self, key: str) -> bytes:
        """The commands that renew the time to live of the stream ``key``, of its credit and of the group's marker."""
        return b"".join(
            (
                unanswered("PEXPIRE", key, TTL_MS),
                unanswered("PEXPIRE", key + ":credit", REMEMBERED_MS),
                unanswered("PEXPIRE", self._marker_key, REMEMBERED_MS),
            )
        )

    def connect(self, priority: Priority, timeout_s: float) -> Connection:
        """Raises OSError while the server cannot be reached; WorkerLost when it does not know the group any more."""
        try:
            connection = Connection(self._server, self._credential, priority, timeout_s)
        except Refused as e:
            raise self._translated(e) from e
        try:
            self._check_memory(connection)
        except Refused as e:
            connection.close()
            raise self._translated(e) from e
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_memory(self, connection: Connection) -> None:
        """A relay server that was restarted empty holds another marker than the one this stage has seen, or none."""
        with self._lock:
            made = secrets.token_hex(8)
            connection.send(
                command("SET", self._marker_key, made, "NX", "PX", REMEMBERED_MS), command("GET", self._marker_key)
            )
            connection.reply()
            found = connection.reply()
            if self._marker is not None and found != self._marker:
                raise WorkerLost(
                    f"the relay server has lost what group {self.group_id} had sent: it was restarted",
                    hint="the group is built again and continues from its last token",
                )
            self._marker = found

    def _translated(self, e: Refused) -> Exception:
        if e.word in _STARTING:
            return ConnectionRefusedError(e.message)
        if e.word in _UNKNOWN:
            return WorkerLost(
                f"the relay server does not know group {self.group_id}: it ended, or the server was restarted",
                hint="the scheduler makes a new group",
            )
        return memory_full() if e.word == "OOM" else e


SKIP_REPLY: Final = command("CLIENT", "REPLY", "SKIP")
"""Precedes a command whose answer is not needed: the server does not write it, and the sender does not read it."""


def memory_full() -> Unavailable:
    return Unavailable("the relay server's memory is full", hint="raise its maxmemory, or lower the groups' windows")


def unanswered(*arguments: bytes | str | int) -> bytes:
    return SKIP_REPLY + command(*arguments)
