"""KServe's storage initializer with ``thaw://``: the whole path, from the store to the directory of a model server."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import botocore.session
import pytest

from relay.clients.fetch import FetchClient
from tests.fetchd.harness import Fetchd, wait_until
from tests.kserve.conftest import NAME, shards_of
from tests.kserve.harness import (
    SHARD,
    SHARD_BYTES,
    Between,
    ModelPortProcess,
    initializer,
    key_of,
    load,
    model_port,
    of_store,
    store_bytes,
    write_checkpoint,
)
from tests.seaweed import KEY, SECRET
from thaw.checkpoints.versions import short
from thaw.cli.model_stores import checkpoints
from thaw.cli.model_stores.stores import open_store
from thaw.ids import InstanceId
from thaw.model import CHUNK_BYTES, ModelIndex

pytestmark = pytest.mark.usefixtures("pushed")


def written(directory: Path) -> dict[str, bytes]:
    return {
        p.relative_to(directory).as_posix(): p.read_bytes()
        for p in directory.rglob("*")
        if p.is_file() and p.name != "model.safetensors.index.json"
    }


def check_loaded(process: subprocess.Popen[str], directory: Path, files: dict[str, bytes]) -> str:
    """Wait for an initializer, and check the files.  Return what it printed."""
    printed = process.communicate(timeout=120)[1]
    assert process.returncode == 0, printed
    assert written(directory) == files
    return printed


def check_loads(url: str, key: str, uri: str, directory: Path, files: dict[str, bytes]) -> str:
    return check_loaded(initializer(url, key, uri, str(directory)), directory, files)


def last_line(url: str, key: str, *arguments: str, **patience: float) -> str:
    """The last line of an initializer that fails."""
    status, printed = load(url, key, *arguments, **patience)
    assert status == 1
    return printed.splitlines()[-1]


@contextmanager
def s3_client(endpoint: str) -> Iterator[Any]:
    keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
    session = botocore.session.get_session()
    with closing(session.create_client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)) as client:
        yield client


def test_a_model_arrives_byte_by_byte_and_again_without_the_store(
    own_port: ModelPortProcess,
    fetchd: Fetchd,
    key: str,
    files: dict[str, bytes],
    checkpoint_dir: Path,
    tmp_path: Path,
    pushed: ModelIndex,
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    check_loads(own_port.url, key, f"thaw://{NAME}", first, files)
    assert shards_of(first) == shards_of(checkpoint_dir)  # transformers reads it
    read = store_bytes(fetchd)
    assert read == sum(map(len, files.values()))
    check_loads(own_port.url, key, f"thaw://{NAME}", second, files)
    assert store_bytes(fetchd) == read
    assert fetchd.client.descriptor_sockets() == ()
    checkpoints.verify(open_store(second.as_uri()), pushed, lambda _: None)  # as thaw model verify does


def test_a_pin_stays_when_its_name_has_a_newer_version(
    port: ModelPortProcess, key: str, tmp_path: Path, store: str
) -> None:
    uri, old, new = "s3://models/moving", *(write_checkpoint(tmp_path / f"v{n}", seed=n) for n in (2, 3))
    first = checkpoints.push(old, open_store(uri), lambda _: None)
    checkpoints.push(new, open_store(uri), lambda _: None)
    pinned = f"thaw://moving@{short(first.sha256)}"
    status, printed = load(port.url, key, pinned, str(tmp_path / "a"), "thaw://moving", str(tmp_path / "b"))
    assert status == 0, printed
    assert written(tmp_path / "a") == written(old)
    assert written(tmp_path / "b") == written(new)


def test_a_push_during_a_download_gives_no_mixture(
    port: ModelPortProcess, key: str, tmp_path: Path, store: str
) -> None:
    """The version that the download began with is still there, so the download ends with it."""
    uri, old, new = "s3://models/pushed-again", *(write_checkpoint(tmp_path / f"v{n}", seed=n) for n in (4, 5))
    checkpoints.push(old, open_store(uri), lambda _: None)

    def push(between: Between, asked: dict[str, str], answer: Any, wfile: Any) -> bool:
        if not between.reached.is_set():
            between.reached.set()
            checkpoints.push(new, open_store(uri), lambda _: None)
        return False

    with Between(port.url, push) as between:
        check_loads(between.url, key, "thaw://pushed-again", tmp_path / "m", written(old))


def test_a_killed_initializer_goes_on_where_it_was(
    own_port: ModelPortProcess, fetchd: Fetchd, key: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    n_sent = CHUNK_BYTES + CHUNK_BYTES // 2

    def stop_halfway(between: Between, asked: dict[str, str], answer: Any, wfile: Any) -> bool:
        if asked["file"] != SHARD:
            return False
        wfile.write(f"HTTP/1.1 200 OK\r\nContent-Length: {answer.length}\r\n\r\n".encode() + answer.read(n_sent))
        wfile.flush()
        between.reached.set()
        between.stopped.wait(60)
        return True

    target = tmp_path / "m"
    with Between(own_port.url, stop_halfway) as between:
        process = initializer(between.url, key, f"thaw://{NAME}", str(target))
        assert between.reached.wait(60)
        part = target / f"{SHARD}.part"
        wait_until(lambda: part.stat().st_size >= CHUNK_BYTES)
        process.kill()
        process.communicate(timeout=10)
        assert not (target / SHARD).exists()
    with Between(own_port.url) as between:
        check_loads(between.url, key, f"thaw://{NAME}", target, files)
    asked = {one["file"]: int(one["from"]) for one in between.asked}
    assert asked == {SHARD: CHUNK_BYTES, SHARD.replace("00001", "00002", 1): 0}, "the small files were whole already"
    assert store_bytes(fetchd) == sum(map(len, files.values())), "a reader that left cost the store nothing"


def test_what_lies_damaged_in_the_directory_is_fetched_again(
    port: ModelPortProcess, key: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    target = tmp_path / "m"
    check_loads(port.url, key, f"thaw://{NAME}", target, files)
    with (target / SHARD).open("r+b") as f:
        f.seek(CHUNK_BYTES)
        f.write(b"damaged")
    check_loads(port.url, key, f"thaw://{NAME}", target, files)


@pytest.mark.parametrize("n_times", [1, 3])
def test_a_chunk_that_was_changed_on_its_way_is_not_written(
    port: ModelPortProcess, key: str, files: dict[str, bytes], tmp_path: Path, n_times: int
) -> None:
    """Once: it is asked for again.  Each time: the initializer says so, and the file never gets its name."""

    def lie(between: Between, asked: dict[str, str], answer: Any, wfile: Any) -> bool:
        n_asked = sum(one["file"] == SHARD for one in between.asked)
        if asked["file"] != SHARD or n_asked > n_times:
            return False
        data = bytearray(answer.read())
        data[-1] ^= 1  # of the last chunk
        wfile.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return True

    with Between(port.url, lie) as between:
        status, printed = load(between.url, key, f"thaw://{NAME}", str(tmp_path / "m"))
        offsets = [int(one["from"]) for one in between.asked if one["file"] == SHARD]
    assert offsets[1:] == [2 * CHUNK_BYTES] * (len(offsets) - 1), "the good chunks were kept"
    if n_times == 1:
        assert status == 0, printed
        assert written(tmp_path / "m") == files
    else:
        assert status == 1
        assert f"{SHARD}: the chunk at byte {2 * CHUNK_BYTES} is not the model's, 3 times" in printed
        assert not (tmp_path / "m" / SHARD).exists()


def test_bytes_that_somebody_changed_at_the_store_are_refused(
    port: ModelPortProcess, key: str, tmp_path: Path, store: str
) -> None:
    source = write_checkpoint(tmp_path / "source", seed=11)
    index = checkpoints.push(source, open_store("s3://models/changed"), lambda _: None)
    data = bytearray((source / SHARD).read_bytes())
    data[CHUNK_BYTES + 5] ^= 1
    with s3_client(store) as client:
        client.put_object(Bucket="models", Key=f"changed@{short(index.sha256)}/{SHARD}", Body=bytes(data))
    assert SHARD in last_line(port.url, key, "thaw://changed", str(tmp_path / "m"))
    assert not (tmp_path / "m" / SHARD).exists()


def test_a_model_larger_than_the_pool_arrives_in_pieces(
    s3: str, valkey_url: str, key: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    small = {"THAW_FETCHD_POOL_MB": 16, "THAW_FETCHD_SLAB_MB": 8}
    with (
        Fetchd(tmp_path, **of_store(s3), **small) as fetchd,
        model_port(fetchd, valkey_url) as port,
    ):
        assert fetchd.client.status().pool_bytes < SHARD_BYTES
        check_loads(port.url, key, f"thaw://{NAME}", tmp_path / "m", files)
        assert not [s for s in fetchd.client.status().segments if s.holders]


def test_a_model_without_an_index_comes_too(
    port: ModelPortProcess, key: str, files: dict[str, bytes], checkpoint_dir: Path, tmp_path: Path, store: str
) -> None:
    with s3_client(store) as client:
        for path in checkpoint_dir.iterdir():
            client.put_object(Bucket="models", Key=f"as copied/{path.name}", Body=path.read_bytes())
    printed = check_loads(port.url, key, "thaw://as copied", tmp_path / "m", files)
    assert '"verified": false' in printed


def test_a_port_that_is_killed_halfway_is_waited_for(
    fetchd: Fetchd, valkey_url: str, key: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    """The next port closes what the killed one held."""
    first = model_port(fetchd, valkey_url)
    port = first.__enter__()
    host_port = port.address

    def kill(between: Between, asked: dict[str, str], answer: Any, wfile: Any) -> bool:
        if asked["file"] != SHARD or between.reached.is_set():
            return False
        answer.read(10)
        port.end(signal.SIGKILL)
        between.reached.set()
        return True

    with Between(port.url, kill) as between:
        process = initializer(between.url, key, f"thaw://{NAME}", str(tmp_path / "m"))
        assert between.reached.wait(60)
        fetchd.client.open_descriptor_socket(InstanceId("files-left"))  # as if it had been killed while it read
        fetchd.client.open_descriptor_socket(InstanceId("container"))
        with model_port(fetchd, valkey_url, THAW_MODEL_PORT_BIND=host_port):
            assert fetchd.client.descriptor_sockets() == ("container",)
            check_loaded(process, tmp_path / "m", files)
    first.__exit__(None, None, None)


def test_fetchd_that_is_killed_halfway_is_waited_for(
    s3: str, valkey_url: str, key: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    with Fetchd(tmp_path, **of_store(s3)) as fetchd, model_port(fetchd, valkey_url) as port:

        def kill(between: Between, asked: dict[str, str], answer: Any, wfile: Any) -> bool:
            if asked["file"] == SHARD and not between.reached.is_set():
                fetchd.kill()
                between.reached.set()
            return False

        with Between(port.url, kill) as between:
            process = initializer(between.url, key, f"thaw://{NAME}", str(tmp_path / "m"))
            assert between.reached.wait(60)
            again = Fetchd(tmp_path, **of_store(s3))
            again.environ["THAW_FETCHD_SOCKET"] = fetchd.socket
            again.environ["THAW_FETCHD_DOORS"] = fetchd.environ["THAW_FETCHD_DOORS"]
            again.client = FetchClient(fetchd.socket)
            with again:
                check_loaded(process, tmp_path / "m", files)


REFUSED = [
    (("s3://models/team/two-shards", "DIR"), "is not a model of this platform"),
    (("file:///etc", "DIR"), "is not a model of this platform"),
    (("thaw://", "DIR"), "is not a model of this platform"),
    (("thaw://team/two-shards",), "give a URI and a directory"),
    (("thaw://../secrets", "DIR"), "must not be a part of its path"),
    (("thaw://%2e%2e/secrets", "DIR"), "must not be a part of its path"),
    (("thaw:///etc", "DIR"), "a part of its path is empty"),
    (("thaw://a?versionId=1", "DIR"), "is not a model's uri"),
    (("thaw://absent", "DIR"), "holds no model"),
]


def test_a_uri_that_names_no_model_of_the_platform_is_refused(port: ModelPortProcess, key: str, tmp_path: Path) -> None:
    target = tmp_path / "m"
    for arguments, sentence in REFUSED:
        given = [str(target) if one == "DIR" else one for one in arguments]
        assert sentence in last_line(port.url, key, *given)
        assert not target.exists()


def test_a_namespace_reads_what_it_may_deploy(
    fetchd: Fetchd, valkey_url: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    strict = key_of(valkey_url, "team-b")
    allowed = key_of(valkey_url, "team-c", "s3://models/team")
    with model_port(fetchd, valkey_url, THAW_MODELS="s3://models/for-all") as port:
        refused = last_line(port.url, strict, f"thaw://{NAME}", str(tmp_path / "b"))
        assert "the namespace team-b may not run s3://models/team/two-shards" in refused
        check_loads(port.url, allowed, f"thaw://{NAME}", tmp_path / "c", files)


def test_an_initializer_without_a_port_says_so_in_time(key: str, tmp_path: Path) -> None:
    said = last_line("http://127.0.0.1:9", key, f"thaw://{NAME}", str(tmp_path / "m"), patience_s=2)
    assert "the model port does not answer" in said
    assert "does a pod of Thaw run on this node" in said


def test_a_directory_that_cannot_be_written_is_named(port: ModelPortProcess, key: str, tmp_path: Path) -> None:
    (tmp_path / "m").write_text("a file")
    said = last_line(port.url, key, f"thaw://{NAME}", str(tmp_path / "m"))
    assert f"{tmp_path / 'm'} cannot be written" in said
