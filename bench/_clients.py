"""The competitors of bench/fetch.py.  Each runs in a process of its own, which times the transfer but not its imports.

    python -m bench._clients boto3|obstore ENDPOINT BUCKET KEY N_BYTES   →   {"seconds": …, "cpu_s": …}

Each is used in the way that its documentation recommends for speed: boto3's transfer manager writes to a file in shared
memory; obstore makes four ranged reads of 8 MiB at a time into memory that is already mapped.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench._common import PYTHON, ROOT, python_env
from bench._sample import Sample

_CHUNK = 8 * 1024 * 1024
_THREADS = 4


def run_python(name: str, endpoint: str, bucket: str, key: str, n_bytes: int) -> Sample:
    command = [PYTHON, "-m", "bench._clients", name, endpoint, bucket, key, str(n_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=python_env())
    plain = json.loads(done.stdout.splitlines()[-1])
    return Sample(plain["seconds"], plain["cpu_s"], n_bytes)


def run_program(command: list[str], made: Path, n_bytes: int, env: dict[str, str] | None = None) -> Sample:
    """Measure a program that writes ``made``, from its start to its end (its start takes a few milliseconds)."""
    made.unlink(missing_ok=True)
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **(env or {})})
    seconds = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if made.exists() and made.stat().st_size != n_bytes:
        raise SystemExit(f"{command[0]} wrote {made.stat().st_size} of {n_bytes} bytes")
    made.unlink(missing_ok=True)
    return Sample(seconds, after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime, n_bytes)


def _boto3(endpoint: str, bucket: str, key: str, n_bytes: int) -> Callable[[], None]:
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    config = Config(signature_version=UNSIGNED, s3={"addressing_style": "path"}, max_pool_connections=16)
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)
    made = Path("/dev/shm") / f"bench-boto3-{os.getpid()}"

    def transfer() -> None:
        client.download_file(bucket, key, str(made))
        made.unlink()

    return transfer


def _obstore(endpoint: str, bucket: str, key: str, n_bytes: int) -> Callable[[], None]:
    import obstore
    from obstore.store import HTTPStore

    store = HTTPStore.from_url(f"{endpoint}/{bucket}", client_options={"allow_http": True})
    memory = mmap.mmap(-1, n_bytes)
    view = memoryview(memory)
    view[:] = bytes(n_bytes)
    starts = iter(range(0, n_bytes, _CHUNK))
    lock = threading.Lock()

    def read() -> None:
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            end = min(start + _CHUNK, n_bytes)
            view[start:end] = memoryview(obstore.get_range(store, key, start=start, end=end)).cast("B")

    def transfer() -> None:
        threads = [threading.Thread(target=read) for _ in range(_THREADS)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    return transfer


def _main(name: str, endpoint: str, bucket: str, key: str, n_bytes: int) -> None:
    transfer = {"boto3": _boto3, "obstore": _obstore}[name](endpoint, bucket, key, n_bytes)
    cpu, began = time.process_time(), time.monotonic()
    transfer()
    print(json.dumps({"seconds": time.monotonic() - began, "cpu_s": time.process_time() - cpu}))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
