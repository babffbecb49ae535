"""The sources of a process's AWS credentials: the metadata service of an instance, and the STS of a web identity.

The server returns credentials that :func:`tests.seaweed.session_credentials` has made.  At any other address it refuses
as S3 does, and repeats the request's token, as S3 does too.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "/latest/api/token"
INSTANCE = "/latest/meta-data/iam/security-credentials/"
TIME = "%Y-%m-%dT%H:%M:%SZ"


class Roles:
    """From now on the server returns the credentials ``hands``, each time for ``lasts_s``."""

    def __init__(self, endpoint: str, hands: Mapping[str, str], lasts_s: float) -> None:
        self.endpoint, self.hands, self.lasts_s = endpoint, hands, lasts_s
        self.n_handed = 0

    def hand(self) -> dict[str, str]:
        self.n_handed += 1
        return {**self.hands, "Expiration": time.strftime(TIME, time.gmtime(time.time() + self.lasts_s))}


@contextmanager
def serve_roles(hands: Mapping[str, str], lasts_s: float = 3600.0) -> Iterator[Roles]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path == TOKEN:
                self._answer(200, "a token of the metadata service")
            else:
                self._refuse()

        def do_GET(self) -> None:
            if self.path == INSTANCE:
                self._answer(200, "the-role")
            elif self.path.startswith(INSTANCE):
                found = roles.hand()
                self._answer(200, json.dumps({"Code": "Success", "Token": found.pop("SessionToken"), **found}))
            else:
                self._refuse()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            fields = "".join(f"<{name}>{value}</{name}>" for name, value in roles.hand().items())
            self._answer(
                200,
                "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
                f"{fields}</Credentials></AssumeRoleWithWebIdentityResult>"
                "</AssumeRoleWithWebIdentityResponse>",
            )

        do_HEAD = do_GET

        def _refuse(self) -> None:
            token = self.headers.get("X-Amz-Security-Token", "")
            self._answer(400, f"<Error><Code>ExpiredToken</Code><Token-0>{token}</Token-0></Error>")

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        roles = Roles(f"http://127.0.0.1:{server.server_address[1]}", hands, lasts_s)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield roles
        server.shutdown()
        thread.join()
