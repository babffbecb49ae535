"""A container of kind llm:vllm without an engine, for the invoker's side of the contract.

``/init`` (and ``/preflight``) waits for the JSON object that a test writes to the FIFO ``<descriptor socket>.init``: the
reply, or the status to exit with.  ``/run`` sends a frame for each line that is written to the FIFO
``<descriptor socket>.feed``.  ``/consolidate`` reads the FIFO ``<descriptor socket>.consolidate``: the line ``switched``
(the engine is one worker, and the answer comes later), then the reply.
"""

from __future__ import annotations

import json
import os
import socketserver
import struct
import sys
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any


class Group:
    """The state of this container's pipeline."""

    stages = 1
    consolidating = False
    outcome: tuple[int, Any] | None = None
    ended = threading.Condition()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/consolidate":
            with Group.ended:
                Group.ended.wait_for(lambda: Group.outcome is not None)
            assert Group.outcome is not None
            self._json(*Group.outcome)
        else:
            health = {"stages": Group.stages, "consolidating": Group.consolidating}
            self._json(200, {"state": "ready", "inflight": 0, **health})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/consolidate":
            self._consolidate()
        elif self.path in ("/init", "/preflight"):
            Group.stages = json.loads(body)["value"]["n_stages"]
            with open(os.environ["THAW_DOOR"] + ".init") as fifo:
                reply = json.loads(fifo.read())
            if "exit" in reply:
                os._exit(reply["exit"])
            self._json(reply.pop("status", 200), reply)
        else:
            self._stream()

    def _consolidate(self) -> None:
        if Group.consolidating or Group.stages == 1:
            info = {"code": "Conflict", "message": "it is one, or is becoming one", "hint": ""}
            return self._json(409, {"error": info["message"], "info": info})
        Group.consolidating, Group.outcome = True, None
        with open(os.environ["THAW_DOOR"] + ".consolidate") as fifo:
            while (line := fifo.readline().strip()) == "switched":
                Group.stages = 1
        reply = json.loads(line)
        status = reply.pop("status", 200)
        if status == 200:
            Group.stages = 1
        with Group.ended:
            Group.consolidating, Group.outcome = False, (status, reply)
            Group.ended.notify_all()
        try:
            self._json(status, reply)
        except OSError:
            self.close_connection = True

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/x-thaw-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with open(os.environ["THAW_DOOR"] + ".feed") as fifo:
            for line in fifo:
                data = json.dumps({"t": "RunToken", "text": line.strip()}).encode()
                frame = struct.pack("<I", len(data)) + data
                try:
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(frame), frame))
                except OSError:
                    print("caller gone", file=sys.stderr, flush=True)
                    self.close_connection = True
                    return
        self.wfile.write(b"0\r\n\r\n")

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def address_string(self) -> str:
        return "unix"


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


if __name__ == "__main__":
    Server(os.environ["THAW_SOCKET"], Handler).serve_forever()
