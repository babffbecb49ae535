"""The receiving end of one TCP connection between two stages (tcp.py)."""

from __future__ import annotations

import socket
from typing import Final

from relay.protocol.frames import (
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
    check_payload,
    check_sum,
    crc32c,
    decode_header,
    encode_header,
)
from relay.transports import handshake
from relay.transports.assembly import Assembly
from relay.transports.base import Flow
from relay.transports.inbox import Inbox
from relay.transports.resp import BUFFER_BYTES, READ_BYTES
from thaw.errors import ProtocolError

_ACK_BYTES: Final = 128 * 1024
_NOTHING: Final = memoryview(b"")


class TcpLane:
    """One connection on which messages arrive.  See inbox.Lane."""

    def __init__(
        self, sock: socket.socket, inbox: Inbox, assembly: Assembly, says: handshake.Hello, flow: Flow
    ) -> None:
        self.priority, self.sender = says.priority, says.sender
        self._sock, self._inbox, self._assembly, self._group_id = sock, inbox, assembly, says.group_id
        self._ack_bytes = min(flow.credit_bytes, _ACK_BYTES)
        self._owed = 0  # bytes received and not yet acknowledged
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._header: FrameHeader | None = None
        self._place = self._target = _NOTHING
        self._crc = 0  # checksum of the part that has come of the frame in progress

    def advance(self) -> None:
        try:
            if self._header is None:
                self._fill()
                while self._one():
                    pass
            while self._begin() and self._rest():
                self._finish()
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        except ProtocolError:
            self.close()
            raise
        if self._owed >= self._ack_bytes:
            self.arm()

    def arm(self) -> None:
        """Acknowledge the received frames, so that the sender need not keep them any longer."""
        if self._owed < self._ack_bytes:
            return
        # Earlier frames are still in the relay server, so the position does not yet cover the frames received here.
        if self._assembly.is_ahead:
            self._inbox.arm_again(self)
            return
        seq, chunk = self._assembly.position
        ack = encode_header(
            FrameHeader(FrameKind.ACK, self.priority, 0, self._group_id, seq=seq, chunk=chunk, n_chunks=chunk + 1)
        )
        try:
            if self._sock.send(ack) != len(ack):
                self.close()
        except BlockingIOError:
            return  # the sender does not read acknowledgements, so it does not wait for room
        except OSError:
            self.close()
        else:
            self._owed = 0

    def revive(self, now_s: float) -> float | None:
        return None  # the sender connects again

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._inbox.forget(self._sock.fileno())
            self._sock.close()

    def _fill(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == BUFFER_BYTES:
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        count = self._sock.recv_into(self._view[self._end : self._end + READ_BYTES])
        if count == 0:
            raise ConnectionResetError("the sender closed the connection")
        self._end += count

    def _one(self) -> bool:
        """Take a message of one frame that is complete in the buffer, in one step.  False if there is none."""
        at = self._start + HEADER_BYTES
        if self._end < at:
            return False
        header = self._next_header()
        end = at + header.n_bytes
        if header.n_chunks != 1 or end > self._end:
            return False
        payload = bytes(self._view[at:end])
        check_payload(header, payload)
        message = self._assembly.whole(header, payload)
        if message is None:
            return False
        self._start = end
        self._owed += HEADER_BYTES + header.n_bytes
        self._inbox.deliver(message)
        return True

    def _next_header(self) -> FrameHeader:
        header = decode_header(self._view[self._start : self._start + HEADER_BYTES])
        if header.group_id != self._group_id or header.priority is not self.priority:
            raise ProtocolError(f"stage {self.sender}: a frame of another group or priority")
        return header

    def _begin(self) -> bool:
        """Begin a frame that is incomplete, or only a part of its message.  True when one is in progress."""
        if self._header is None:
            if self._end - self._start < HEADER_BYTES:
                return False
            header = self._next_header()
            self._start += HEADER_BYTES
            place = self._assembly.place(header)
            have = min(header.n_bytes, self._end - self._start)
            place[:have] = self._view[self._start : self._start + have]
            self._crc = crc32c(self._view[self._start : self._start + have])
            self._start += have
            self._header, self._place, self._target = header, place, place[have:]
        return True

    def _rest(self) -> bool:
        """Receive the missing bytes of the frame into its place.  True when it is complete.  The checksum of each piece
        is computed while the next piece is on its way."""
        while self._target:
            try:
                count = self._sock.recv_into(self._target)
            except BlockingIOError:
                return False
            if count == 0:
                raise ConnectionResetError("the sender closed the connection")
            self._crc = crc32c(self._target[:count], self._crc)
            self._target = self._target[count:]
        return True

    def _finish(self) -> None:
        header, place = self._header, self._place
        # Drop the views: from now on, only the caller keeps views of the message.
        self._header, self._place, self._target = None, _NOTHING, _NOTHING
        assert header is not None  # noqa: S101
        check_sum(header, self._crc)
        self._owed += HEADER_BYTES + header.n_bytes
        for message in self._assembly.take(header, place):
            self._inbox.deliver(message)
