"""The model port by itself: who may ask, what is a request, and how much is given at once."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest

from invoker.model_port.files import piece_at, uri_of
from invoker.model_port.port import Places, places
from tests.fetchd.harness import Fetchd, wait_until
from tests.invoker import platform
from tests.kserve.conftest import NAME, Host
from tests.kserve.harness import SHARD, ModelPortProcess, key_of, model_port, revoke, set_epoch
from thaw.errors import BadRequest
from thaw.ids import InstanceId
from thaw.model import FileRange, ModelIndex

FILES = {"config.json": 10, "tokenizer.json": 0, "vocab.json": 5, "model.safetensors": 250}


def asked(path: str, **parameters: object) -> str:
    return f"{path}?{urlencode(parameters)}"


def test_without_a_key_of_the_platform_nothing_is_answered(port: ModelPortProcess) -> None:
    for authorization in ("", "Bearer ", "Bearer a:b", "Basic Og==", "Bearer"):
        for path in ("/model", "/digests", "/file", "/else"):
            status, answer = port.get(asked(path, name=NAME), authorization=authorization)
            assert (status, answer["info"]["code"]) == (401, "Unauthorized"), (authorization, path)


def test_a_key_that_was_revoked_is_refused_at_once(port: ModelPortProcess, pushed: ModelIndex, valkey_url: str) -> None:
    key = key_of(valkey_url, "team-a")
    key_of(valkey_url, "team-a")
    assert port.get(asked("/model", name=NAME), key)[0] == 200
    revoke(valkey_url, key)
    assert port.get(asked("/model", name=NAME), key)[0] == 401


def test_its_health_needs_no_key(port: ModelPortProcess) -> None:
    assert port.get("/health") == (200, {"status": "ok"})


def test_a_listing_names_the_version_and_the_files(port: ModelPortProcess, key: str, pushed: ModelIndex) -> None:
    status, found = port.get(asked("/model", name=NAME), key)
    assert status == 200
    assert found["version"] == pushed.sha256
    assert found["verified"] is True
    assert found["files"] == [{"name": f.name, "n_bytes": f.n_bytes} for f in pushed.files]
    for file in pushed.files:
        status, digests = port.get(asked("/digests", name=NAME, version=pushed.sha256, file=file.name), key)
        assert (status, tuple(digests["chunks_blake3"])) == (200, file.chunks_blake3)


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("/else", {}, "NotFound"),
    ("/model", {}, "BadRequest"),
    ("/model", {"name": "../x"}, "BadRequest"),
    ("/model", {"name": "team/two-shards/../../x"}, "BadRequest"),
    ("/model", {"name": ""}, "BadRequest"),
    ("/model", {"name": "absent"}, "ModelNotFound"),
    ("/digests", {"name": NAME, "version": "V", "file": "thaw-index.json"}, "NotFound"),
    ("/file", {"name": NAME, "version": "V", "file": "../config.json", "from": 0}, "NotFound"),
    ("/file", {"name": NAME, "version": "V", "file": "config.json", "from": 10**6}, "BadRequest"),
    ("/file", {"name": NAME, "version": "V", "file": "config.json", "from": -1}, "BadRequest"),
    ("/file", {"name": NAME, "version": "V", "file": "config.json", "from": "0x1"}, "BadRequest"),
    ("/file", {"name": NAME, "version": "V", "file": "config.json"}, "BadRequest"),
    ("/file", {"name": NAME, "version": "0" * 64, "file": "config.json", "from": 0}, "ModelNotFound"),
    ("/file", {"name": NAME, "version": "0", "file": "config.json", "from": 0}, "ModelChanged"),
]


def test_what_cannot_be_had_has_a_reason(port: ModelPortProcess, key: str, pushed: ModelIndex) -> None:
    for path, parameters, code in REFUSED:
        given = {name: pushed.sha256 if value == "V" else value for name, value in parameters.items()}
        status, answer = port.get(asked(path, **given), key)
        assert status >= 400
        assert answer["info"]["code"] == code, (path, parameters, answer)
    assert port.get("/health")[0] == 200


def test_a_parameter_that_is_given_twice_is_refused(port: ModelPortProcess, key: str) -> None:
    assert port.get("/model?name=a&name=b", key)[0] == 400


def test_a_request_with_a_body_ends_its_connection(port: ModelPortProcess, key: str) -> None:
    """Else the body would be read as the next request."""
    with socket.create_connection(port.address.split(":"), 20) as sock:  # type: ignore[arg-type]
        head = f"GET /health HTTP/1.1\r\nAuthorization: Bearer {key}\r\n"
        sock.sendall(f"{head.replace('health', 'model?name=a')}Content-Length: 5\r\n\r\n12345{head}\r\n".encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_readers_that_are_slow_hold_a_part_of_the_pool_and_leave_room_to_others(
    own_port: ModelPortProcess, key: str, pushed: ModelIndex, fetchd: Fetchd, valkey_url: str
) -> None:
    port = own_port
    most = places(fetchd.client.status().pool_bytes, 8 << 20)
    path = asked("/file", name=NAME, version=pushed.sha256, file=SHARD, **{"from": 0})
    with ExitStack() as held:
        for _ in range(most.of_one):
            held.enter_context(opened(port, path, key, room=4096))  # its bytes wait, unread
        status, answer = port.get(path, key)
        assert (status, answer["info"]["code"]) == (429, "Throttled")
        assert port.get(asked("/model", name=NAME), key)[0] == 200, "only files are counted"
        assert len([s for s in fetchd.client.status().segments if s.holders]) == 1, "all of them read one piece"
        with opened(port, path, key_of(valkey_url, "team-b")) as other:
            assert len(other.read()) == {f.name: f.n_bytes for f in pushed.files}[SHARD]
    wait_until(lambda: not fetchd.client.descriptor_sockets())
    with opened(port, path, key):
        pass


@contextmanager
def opened(port: ModelPortProcess, path: str, key: str, *, room: int = 0) -> Iterator[http.client.HTTPResponse]:
    """An answer of which the head is read.  ``room``: so many bytes may come before they are read."""
    with closing(http.client.HTTPConnection(*port.address.split(":"), timeout=60)) as connection:  # type: ignore[arg-type]
        connection.connect()
        if room:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
        with connection.getresponse() as answer:
            assert answer.status == 200
            yield answer


@pytest.mark.parametrize(
    ("pool_mb", "of_one", "of_all"), [(1, 1, 1), (256, 1, 1), (1024, 2, 4), (4096, 8, 16), (1 << 20, 32, 64)]
)
def test_all_readers_together_hold_half_of_the_pool(pool_mb: int, of_one: int, of_all: int) -> None:
    assert places(pool_mb << 20, 128 << 20) == Places(of_one, of_all)


def test_a_scheduler_that_came_later_stops_no_reader(
    port: ModelPortProcess, key: str, pushed: ModelIndex, valkey_url: str
) -> None:
    path = asked("/file", name=NAME, version=pushed.sha256, file="config.json", **{"from": 0})
    assert port.get(path, key)[0] == 200
    set_epoch(valkey_url)
    assert port.get(path, key)[0] == 200


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("THAW_MODEL_PORT_PIECE_MB", "12"),
        ("THAW_MODEL_PORT_PIECE_MB", "0"),
        ("THAW_MODEL_PORT_STORE", "models"),
        ("THAW_MODELS", "models"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(shared_host: Host, valkey_url: str, variable: str, value: str) -> None:
    with pytest.raises(AssertionError, match=variable), model_port(shared_host[0], valkey_url, **{variable: value}):
        pass


def test_it_loads_no_engine_of_containers() -> None:
    """It has none of the invoker's rights, and none of the invoker's memory."""
    code = "import sys, invoker.model_port.main; print(sorted({'docker', 'kubernetes', 'botocore'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["", "/", "//", "/x", "..", "a/../b", "%2e%2e", "a\\b", "a#b", "x%zz"])
def test_a_name_leads_nowhere_else(name: str) -> None:
    with pytest.raises(BadRequest):
        uri_of("s3://models/shared", name)


def test_a_name_is_behind_the_store() -> None:
    assert uri_of("s3://models/", "team/a@0123456789abcdef") == "s3://models/team/a@0123456789abcdef"
    assert uri_of("s3://", "bucket/a") == "s3://bucket/a"


def test_small_files_are_one_piece_and_weights_are_cut_at_multiples() -> None:
    small = (FileRange("config.json", 0, 10), FileRange("vocab.json", 0, 5))
    assert piece_at(FILES, "vocab.json", 3, 100) == small
    assert [piece_at(FILES, "model.safetensors", at, 100) for at in (0, 99, 100, 249)] == [
        (FileRange("model.safetensors", 0, 100),),
        (FileRange("model.safetensors", 0, 100),),
        (FileRange("model.safetensors", 100, 100),),
        (FileRange("model.safetensors", 200, 50),),
    ]


def test_an_invoker_that_restarts_takes_nothing_from_a_reader(fetchd: Fetchd, valkey_url: str) -> None:
    """Its slabs would be another model's while the port still sends them."""
    for left in ("files-0123", "of-a-container"):
        fetchd.client.open_descriptor_socket(InstanceId(left))
    with platform.Host(valkey_url, Path(fetchd.short.name) / "run", fetchd_socket=fetchd.socket):
        assert fetchd.client.descriptor_sockets() == ("files-0123",)
