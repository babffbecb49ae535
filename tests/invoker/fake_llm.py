"""A container of kind llm:vllm without an engine, for the invoker's side of the contract.

``/init`` waits for the JSON object that a test writes to the FIFO ``<door>.init``: the reply, or the status to exit
with.  ``/run`` sends a frame for each line that is written to the FIFO ``<door>.feed``.
"""

from __future__ import annotations

import json
import os
import socketserver
import struct
import sys
from http.server import BaseHTTPRequestHandler
from typing import Any


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._json(200, {"state": "ready", "inflight": 0})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/init":
            with open(os.environ["THAW_DOOR"] + ".init") as fifo:
                reply = json.loads(fifo.read())
            if "exit" in reply:
                os._exit(reply["exit"])
            self._json(reply.pop("status", 200), reply)
        else:
            self._stream()

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
