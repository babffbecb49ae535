"""A store that is never the bottleneck: nginx sending files from shared memory.

SeaweedFS spends 1.4 CPU-seconds on a gigabyte, so a benchmark against it would measure SeaweedFS.  Where nginx is not
installed, a small sendfile server in a process of its own replaces it.  The results say which of the two served.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from bench._common import PYTHON, Program, python_env, say, start
from thaw.dev.links import inside
from thaw.dev.ports import free_ports

_CONFIG = """
worker_processes 2;
daemon off;
pid {work}/nginx.pid;
error_log stderr notice;
events {{ worker_connections 512; }}
http {{
    access_log off;
    sendfile on;
    sendfile_max_chunk 2m;
    tcp_nopush on;
    tcp_nodelay on;
    keepalive_requests 1000000;
    client_body_temp_path {work}/body; proxy_temp_path {work}/proxy; fastcgi_temp_path {work}/fcgi;
    uwsgi_temp_path {work}/uwsgi; scgi_temp_path {work}/scgi;
    map $connection $is_fourth {{ "~^[48]$|([02468][048]|[13579][26])$" 1; default 0; }}
    map $is_fourth $rate {{ 1 {slow_bytes_per_s}; default 0; }}
    limit_rate $rate;
    server {{ listen {address}:{port}; root {root}; }}
}}
"""
"""nginx counts its connections, and each fourth one has a rate of its own; 0 means no limit."""


class Origin:
    """Serves ``root`` over HTTP, in ``namespace`` when given.  Use it as a context manager.

    ``slow_bytes_per_s``: the rate of each fourth connection, which needs nginx; 0 means no limit.
    """

    def __init__(
        self, root: Path, work: Path, *, address: str = "127.0.0.1", namespace: str = "", slow_bytes_per_s: int = 0
    ) -> None:
        self.port = free_ports(1)[0]
        self.address = address
        self.url = f"http://{address}:{self.port}"
        self.kind = "nginx" if shutil.which("nginx") else "sendfile server (apt install nginx-light for nginx)"
        if self.kind == "nginx":
            config = work / f"nginx-{self.port}.conf"
            config.write_text(
                _CONFIG.format(work=work, address=address, port=self.port, root=root, slow_bytes_per_s=slow_bytes_per_s)
            )
            # nginx that runs as root would change to the user www-data, which may not enter a private directory
            user = ["-g", "user root;"] if os.geteuid() == 0 else []
            command, ready = ["nginx", "-c", str(config), "-p", str(work), *user], "start worker process "
        elif slow_bytes_per_s:
            raise SystemExit("a store with slow connections needs nginx (apt install nginx-light)")
        else:
            say(f"no nginx here: {self.kind}")
            command = [PYTHON, "-m", "bench._origin", str(root), address, str(self.port)]
            ready = "listening"
        if namespace:
            command = [*inside(namespace, tuple(command))]
        self._program: Program = start(command, work / "origin.log", ready, env=python_env())

    def __enter__(self) -> Origin:
        return self

    def __exit__(self, *_: Any) -> None:
        self._program.stop()


def _serve(root: Path, address: str, port: int) -> None:
    with socket.create_server((address, port), backlog=64) as listener:
        print("listening", flush=True)
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=_answer_all, args=(sock, root), daemon=True).start()


def _answer_all(sock: socket.socket, root: Path) -> None:
    with sock, sock.makefile("rb") as requests:
        while (line := requests.readline()) and (words := line.decode().split()):
            headers = {}
            while line := requests.readline().strip():
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip()
            _answer(sock, words[0], root / words[1].split("?")[0].lstrip("/"), headers.get("range", ""))


def _answer(sock: socket.socket, method: str, path: Path, wanted: str) -> None:
    if not path.is_file():
        sock.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        return
    size = path.stat().st_size
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
    first = int(match[1]) if match else 0
    last = min(int(match[2]), size - 1) if match and match[2] else size - 1
    status = f"206 Partial Content\r\nContent-Range: bytes {first}-{last}/{size}" if match else "200 OK"
    sock.sendall(
        f"HTTP/1.1 {status}\r\nContent-Length: {last - first + 1}\r\nAccept-Ranges: bytes\r\n"
        f'ETag: "{path.stat().st_mtime_ns:x}-{size:x}"\r\n\r\n'.encode()
    )
    if method != "HEAD":
        with path.open("rb") as f:
            sock.sendfile(f, first, last - first + 1)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
