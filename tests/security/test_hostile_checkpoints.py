"""A tenant's checkpoint that is made to cost: numbers, headers and indexes without an end, and stores that trickle."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fetchd import inspections, places
from fetchd.marks import connect_marked
from fetchd.sources.http import HttpConnection, HttpSource
from tests.fetchd.harness import Fetchd, Request, Store, digest, wait_until, write_index, write_model
from thaw.checkpoints import checkpoint, hash_tree, model_json
from thaw.errors import ModelCorrupt, StoreUnavailable, Throttled
from thaw.ids import GroupId
from thaw.model import INDEX_NAME, FileRange, ModelFile, TensorInfo

WEIGHTS = "model.safetensors"
SHARDS = "model.safetensors.index.json"
MOST_MIB = 640
N_EXPERTS = 60 * 384
Spoil = Callable[[Path], object]
"""A function that writes something hostile into a model's directory."""


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    model = write_model(tmp_path / "honest")
    write_index(model)
    return model


def with_header(header: bytes, n_data: int = 0) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(n_data)


def empty_tensors(n: int, prefix: str = "") -> bytes:
    entries = (f'"{prefix}{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(n))
    return ("{" + ",".join(entries) + "}").encode()


def sharded(model: Path, headers: list[bytes]) -> None:
    names = [f"model-{i}.safetensors" for i in range(len(headers))]
    for name, header in zip(names, headers, strict=True):
        (model / name).write_bytes(with_header(header))
    (model / SHARDS).write_text(json.dumps({"weight_map": {name: name for name in names}}))


def index(data: Callable[[], bytes]) -> Spoil:
    """The index has these bytes, which are made when they are needed."""
    return lambda model: (model / INDEX_NAME).write_bytes(data())


def weights(header: Callable[[], bytes]) -> Spoil:
    return lambda model: (model / WEIGHTS).write_bytes(with_header(header()))


def first_tensor(**changes: Callable[[], Any]) -> Spoil:
    """The index says something else of its first tensor."""

    def spoil(model: Path) -> None:
        write_index(model)
        plain = json.loads((model / INDEX_NAME).read_bytes())
        plain["tensors"][0].update({name: value() for name, value in changes.items()})
        (model / INDEX_NAME).write_text(json.dumps(plain))

    return spoil


def shards(n: int, header: Callable[[int], bytes]) -> Spoil:
    return lambda model: sharded(model, [header(i) for i in range(n)])


def weight_map(data: Callable[[], bytes]) -> Spoil:
    return lambda model: (model / SHARDS).write_bytes(b'{"weight_map":{' + data() + b"}}")


def an_index_of_gigabytes(model: Path) -> None:
    write_index(model)
    with (model / INDEX_NAME).open("r+b") as f:
        f.truncate(3 * 2**30)


def a_config_of_lists(model: Path) -> None:
    (model / "config.json").write_bytes(b'{"a":[' + b"[]," * 1_300_000 + b"[]]}")


LONG = [int("9" * 4000)] * 1500
LONG_HEADER = {"t": {"dtype": "U8", "shape": LONG, "data_offsets": [0, 0]}}
FILES = b'{"version":2,"files":['
WIDE = rb"\ud83d\ude00"
HOSTILE: dict[str, Spoil] = {
    "long dimensions in the index": first_tensor(shape=lambda: LONG),
    "long dimensions in a header": weights(lambda: json.dumps(LONG_HEADER).encode()),
    "many dimensions": first_tensor(shape=lambda: [2**47] * 500_000),
    "one dimension of many digits": weights(
        lambda: b'{"t":{"dtype":"U8","shape":[' + b"9" * 10_000_000 + b'],"data_offsets":[0,0]}}'
    ),
    "three headers of 40 MB": shards(3, lambda i: empty_tensors(40_000_000 // 60, f"{i}.")),
    "headers that are too long together": shards(7, lambda i: empty_tensors(100, f"{i}.") + b" " * (15 * 1024 * 1024)),
    "headers of wide names": shards(5, lambda i: empty_tensors(8_000, f"{i}{'x' * 900}\U0001f600")),
    "too many tensors together": shards(6, lambda i: empty_tensors(90_000, f"{i}.")),
    "too many files": weight_map(lambda: b",".join(b'"%d":"m-%d.safetensors"' % (i, i) for i in range(5000))),
    "lists of nothing": index(lambda: FILES + b"[]," * 15_000_000 + b"[]]}"),
    "texts of nothing": index(lambda: FILES + b'"ab",' * 5_200_000 + b'""]}'),
    "numbers of nothing": index(lambda: FILES + b"12345678901," * 5_200_000 + b"1]}"),
    "a name without an end": first_tensor(name=lambda: "x" * 160_000_000),
    "a name that one character makes wide": index(lambda: b'{"' + b"x" * 160_000_000 + "\U0001f600".encode() + b'":1}'),
    "a name that one escape makes wide": index(lambda: b'{"' + b"x" * 160_000_000 + WIDE + b'":1}'),
    "wide names of shards": weight_map(lambda: b'"' + b"x" * 80_000_000 + WIDE + b'":"m.safetensors"'),
    "an index of gigabytes": an_index_of_gigabytes,
    "a config of lists": a_config_of_lists,
    "nested without an end": index(lambda: b"[" * 1_000_000),
}
IN_FULL = {"too many tensors together"}


def resident_mib(fetchd: Fetchd, *, peak: bool) -> int:
    """Memory of the process; the pool is populated at start and part of it."""
    status = Path(f"/proc/{fetchd.process.pid}/status").read_text()
    found = re.search(rf"{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", status)
    assert found
    return int(found[1]) // 1024


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in IN_FULL else []) for name in HOSTILE]
)
def test_a_checkpoint_that_is_made_to_cost_is_refused_in_bounded_memory_while_others_are_served(
    fetchd: Fetchd, honest: Path, tmp_path: Path, name: str
) -> None:
    model = write_model(tmp_path / "hostile")
    HOSTILE[name](model)
    fetchd.client.inspect(honest.as_uri(), ("b",))
    before = resident_mib(fetchd, peak=False)
    Path(f"/proc/{fetchd.process.pid}/clear_refs").write_text("5")  # the peak begins anew
    with ThreadPoolExecutor(3) as pool:
        attacks = [pool.submit(fetchd.client.inspect, f"{model.as_uri()}{'/' * i}", ("a",)) for i in range(3)]
        assert fetchd.client.inspect(honest.as_uri(), ("b",), deadline_s=20).n_layers == 3
        errors = [attack.exception() for attack in attacks]
    assert [type(e) for e in errors] == [ModelCorrupt] * 3, errors
    assert resident_mib(fetchd, peak=True) - before < MOST_MIB


@pytest.mark.full
def test_models_as_large_as_may_be_are_remembered_in_bounded_memory(tmp_path: Path) -> None:
    models = [write_model(tmp_path / f"m{i}") for i in range(4)]
    for model in models:
        sharded(
            model, [empty_tensors(model_json.MAX_TENSORS // 4, f"model.layers.0.mlp.experts.{i}.") for i in range(4)]
        )
    # a slow machine reads four at once for longer than one inspection may take
    with Fetchd(tmp_path, THAW_FETCHD_INSPECTION_S=600) as fetchd, ThreadPoolExecutor(4) as pool:
        before = resident_mib(fetchd, peak=False)
        facts = list(pool.map(lambda m: fetchd.client.inspect(m.as_uri(), ("a",), deadline_s=600), models))
        assert [f.weight_bytes for f in facts] == [0] * 4
        assert resident_mib(fetchd, peak=True) - before < MOST_MIB


def with_index_of_experts(model: Path) -> None:
    """Write an index like that of a quantised mixture of experts of 600 GB: each matrix has two scales and an input
    scale."""
    kinds = {
        "weight": ("U8", (2048, 3584), 2048 * 3584),
        "weight_scale": ("F8_E4M3", (2048, 448), 2048 * 448),
        "weight_scale_2": ("F32", (), 4),
        "input_scale": ("F32", (), 4),
    }
    tensors: list[TensorInfo] = []
    ends: dict[str, int] = {}
    for expert in range(N_EXPERTS):
        layer, file = expert // 384, f"model-{expert // 384:05}-of-00060.safetensors"
        for matrix in ("down_proj", "gate_proj", "up_proj"):
            for kind, (dtype, shape, n_bytes) in kinds.items():
                name = f"model.layers.{layer}.mlp.experts.{expert % 384}.{matrix}.{kind}"
                plain = TensorInfo(name, file, ends.setdefault(file, 100_000), n_bytes, dtype, shape)
                ends[file] += n_bytes
                tensors.append(replace(plain, edges_blake3=("ab" * 32,) * len(hash_tree.edges(plain))))
    files = [ModelFile(name, n, False, ("cd" * 32,) * hash_tree.n_chunks(n)) for name, n in ends.items()]
    config = (model / "config.json").read_bytes()
    files.append(ModelFile("config.json", len(config), True, (digest(config),)))
    (model / INDEX_NAME).write_bytes(checkpoint.write_index(checkpoint.build_index(files, tensors)))


@pytest.mark.full
def test_two_of_the_largest_models_that_there_are_are_read_once_each_in_bounded_memory(
    fetchd: Fetchd, tmp_path: Path
) -> None:
    models = [write_model(tmp_path / name, n_layers=60, layer_bytes=1) for name in "ab"]
    for model in models:
        with_index_of_experts(model)
    before = resident_mib(fetchd, peak=False)
    facts = [fetchd.client.inspect(m.as_uri(), deadline_s=60) for m in models]
    assert [(f.n_layers, f.verified) for f in facts] == [(60, True)] * 2
    assert min(f.weight_bytes for f in facts) > 500 * 2**30
    assert resident_mib(fetchd, peak=True) - before < MOST_MIB


def test_a_model_whose_parts_lie_in_no_order_is_not_divided(fetchd: Fetchd, tmp_path: Path) -> None:
    """Each range of its plan would be one tensor, so the plan would take megabytes in every scheduler."""
    model = write_model(tmp_path / "m")
    n = 40_000
    entries = {f"model.layers.{i % 2}.{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(n)}
    (model / WEIGHTS).write_bytes(with_header(json.dumps(entries).encode(), n))
    facts = fetchd.client.inspect(model.as_uri())
    assert (facts.n_layers, facts.weight_bytes, facts.parts) == (3, n, None)


def test_the_shards_of_an_honest_model_behind_a_long_way_are_asked_for_together(tmp_path: Path) -> None:
    """At 150 ms each, the answers for 163 shards would miss the deadline if they came one after the other."""
    model = write_model(tmp_path / "m")
    (model / WEIGHTS).unlink()
    pad = b" " * 70_000  # the first read of a file does not bring its whole header
    sharded(model, [empty_tensors(2, f"model.layers.{i}.") + pad for i in range(16)])
    together = {what: threading.Event() for what in ("HEAD", "the beginning", "the rest")}
    on_their_way = dict.fromkeys(together, 0)
    lock = threading.Lock()

    def fault(request: Request) -> bool:
        what = request.method if request.method == "HEAD" else "the rest" if request.first else "the beginning"
        if request.name.startswith("model-") and not together[what].is_set():
            with lock:
                on_their_way[what] += 1
                if on_their_way[what] > 1:
                    together[what].set()
            together[what].wait(1)
            with lock:
                on_their_way[what] -= 1
        return False

    with Store(tmp_path, fault) as store, Fetchd(tmp_path, THAW_FETCHD_READ_TIMEOUT_S=20) as fetchd:
        facts = fetchd.client.inspect(f"{store.uri}/m", deadline_s=300)
        assert len(facts.files) == 18
        assert [what for what, seen in together.items() if not seen.is_set()] == []


# ── stores that trickle ───────────────────────────────────────────────────────────────────────────────────────────────


POINTER = b"HTTP/1.1 206 OK\r\nETag: e\r\nContent-Range: bytes 0-89/90\r\nContent-Length: 90\r\n\r\n"
TRICKLES = {
    "head": ("http", b"HTTP/1.1 200 OK\r\nX: "),
    "body": ("http", POINTER),
    "tls": ("https", b"\x16\x03\x03\x40\x00\x02"),
}


class Trickle:
    """A server that begins an answer and then sends a byte now and then, always before a reader loses its patience."""

    def __init__(self, where: str) -> None:
        self.scheme, self._begin = TRICKLES[where]
        self._over = threading.Event()
        self._came = threading.Semaphore(0)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def uri(self, name: object) -> str:
        return f"{self.scheme}://127.0.0.1:{self._listener.getsockname()[1]}/{name}"

    def wait_for(self, n: int) -> None:
        for _ in range(n):
            assert self._came.acquire(timeout=30)

    def close(self) -> None:
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._trickle, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _trickle(self, sock: socket.socket) -> None:
        with sock:
            try:
                sock.recv(1)
                self._came.release()
                sock.sendall(self._begin)
                while not self._over.wait(0.1):
                    sock.sendall(b"x")
            except OSError:
                pass  # the reader has had enough


@pytest.fixture(params=TRICKLES)
def trickle(request: pytest.FixtureRequest) -> Iterator[Trickle]:
    made = Trickle(request.param)
    yield made
    made.close()


def test_an_inspection_has_one_deadline_whatever_a_store_sends_now_and_then(tmp_path: Path, trickle: Trickle) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_INSPECTION_S=1.5, THAW_FETCHD_READ_TIMEOUT_S=20) as fetchd:
        with pytest.raises(StoreUnavailable) as told:
            fetchd.client.inspect(trickle.uri("m"), deadline_s=20)
        assert "the description of the model did not come within 1.5 s" in fetchd.reason(told.value)["error"]


@pytest.mark.parametrize("begin", [b"", b"Content-Length: 5\r\n"], ids=["cut", "another length"])
def test_a_look_at_a_known_model_has_one_deadline_too_and_leaves_no_large_text_behind(
    tmp_path: Path, honest: Path, begin: bytes
) -> None:
    """The store sends bytes slowly until the deadline, so the next read would have to end by itself."""
    over = threading.Event()
    is_hostile = threading.Event()

    def fault(request: Request) -> bool:
        if not is_hostile.is_set():
            return False
        if request.name == INDEX_NAME and request.method == "HEAD":
            request.sock.sendall(request.head("200 OK"))
            return True
        answer = request.head() if request.name == INDEX_NAME else b"HTTP/1.1 200 OK\r\n" + begin + b"X: "
        request.sock.sendall(answer)
        for _ in iter(lambda: over.wait(0.1), True):
            request.sock.sendall(b" ")
        return True

    model = write_model(tmp_path / "m", layer_bytes=100)
    large = write_model(tmp_path / "large")
    (large / INDEX_NAME).write_bytes(b" " * (4 * 1024 * 1024))
    with Store(tmp_path, fault) as store, Fetchd(tmp_path, THAW_FETCHD_INSPECTION_S=4) as fetchd:
        assert fetchd.client.inspect(f"{store.uri}/m").n_layers == 3
        (model / INDEX_NAME).write_bytes(b" " * (4 * 1024 * 1024))
        is_hostile.set()
        with pytest.raises(StoreUnavailable) as told:
            fetchd.client.inspect(f"{store.uri}/m", deadline_s=20)
        over.set()
        assert "the description of the model did not come within 4 s" in fetchd.reason(told.value)["error"]
        with pytest.raises(ModelCorrupt, match="cannot be read"):
            fetchd.client.inspect(large.as_uri(), deadline_s=10)
        assert fetchd.client.inspect(honest.as_uri(), deadline_s=10).n_layers == 3


def test_a_connection_that_is_interrupted_while_it_is_made_shakes_no_hands(trickle: Trickle) -> None:
    """An interrupt during the connect finds no socket to close, and the handshake that follows may take for ever."""
    made: list[HttpConnection] = []

    def connect(*args: Any) -> socket.socket:
        sock = connect_marked(*args)
        made[0].interrupt()
        return sock

    source = HttpSource(trickle.uri("m"), 60, connect=connect)
    made.append(source.connect())
    with pytest.raises(StoreUnavailable, match="interrupted"):
        made[0].stat("config.json")


def test_a_tenant_whose_stores_trickle_has_some_places_and_everybody_else_is_served(
    tmp_path: Path, honest: Path, trickle: Trickle
) -> None:
    n = 1_080  # fetchd has 1,024 conversations
    with Fetchd(tmp_path, THAW_FETCHD_INSPECTION_S=600) as fetchd, ThreadPoolExecutor(24) as pool:
        attack = partial(fetchd.client.inspect, namespaces=("a",), deadline_s=300)
        held = [pool.submit(attack, trickle.uri(i)) for i in range(places.INSPECTIONS)]
        trickle.wait_for(places.INSPECTIONS)
        others = [pool.submit(attack, trickle.uri(i)) for i in range(places.INSPECTIONS, n)]
        assert {type(other.exception(300)) for other in others} == {Throttled}
        assert fetchd.client.inspect(honest.as_uri(), ("b",), deadline_s=20).n_layers == 3
        shared = fetchd.client.inspect(honest.as_uri(), ("a", "b"), deadline_s=20)
        assert shared.n_layers == 3, "a model of several namespaces takes the place of one that has some"
        assert not any(one.done() for one in held), "they trickle still"
        with pytest.raises(Throttled, match=r"^too many inspections of models on this host: namespace a has 8 that"):
            fetchd.client.inspect(honest.as_uri(), ("a",), deadline_s=20)
        fetchd.process.terminate()
        assert all(one.exception(60) is not None for one in held)


def test_one_store_that_trickles_has_one_place_however_often_its_model_is_asked_for(
    tmp_path: Path, honest: Path, trickle: Trickle
) -> None:
    """A scheduler asks again every few seconds, while the first inspection waits for its deadline."""
    with Fetchd(tmp_path, THAW_FETCHD_INSPECTION_S=600) as fetchd, ThreadPoolExecutor(24) as pool:
        ask = partial(fetchd.client.inspect, trickle.uri("m"), ("a",), deadline_s=300)
        asked = [pool.submit(ask) for _ in range(inspections.WAITING + 3)]
        refused = [next(done) for done in [as_completed(asked, 120)] for _ in range(2)]
        with pytest.raises(
            Throttled, match=r"^too many questions about models that are being inspected: 16 about http"
        ):
            refused[0].result()
        assert fetchd.client.inspect(honest.as_uri(), ("a",), deadline_s=20).n_layers == 3
        assert sum(not one.done() for one in asked) == inspections.WAITING + 1
        fetchd.process.terminate()
        assert all(one.exception(60) is not None for one in asked)


def test_a_large_text_that_trickles_delays_no_small_one(tmp_path: Path, honest: Path) -> None:
    """One large text is read at a time, within the deadline of its inspection."""
    over = threading.Event()
    began = threading.Event()

    def fault(request: Request) -> bool:
        if request.name != INDEX_NAME or request.method == "HEAD":
            return False
        request.sock.sendall(request.head())
        for _ in iter(lambda: over.wait(0.1), True):
            request.sock.sendall(b" ")
            began.set()
        return True

    model = write_model(tmp_path / "m")
    (model / INDEX_NAME).write_bytes(b" " * (40 * 1024 * 1024))
    large = write_model(tmp_path / "large")
    (large / INDEX_NAME).write_bytes(b" " * (40 * 1024 * 1024))
    with (
        Store(tmp_path, fault) as store,
        Fetchd(tmp_path, THAW_FETCHD_INSPECTION_S=5) as fetchd,
        ThreadPoolExecutor(1) as pool,
    ):
        attack = pool.submit(fetchd.client.inspect, f"{store.uri}/m", ("a",))
        assert began.wait(20)
        assert fetchd.client.inspect(honest.as_uri(), ("b",), deadline_s=20).n_layers == 3
        assert isinstance(attack.exception(60), StoreUnavailable)
        with pytest.raises(ModelCorrupt, match="cannot be read"):  # it is read, and is none
            fetchd.client.inspect(large.as_uri(), ("b",), deadline_s=20)
        over.set()


def test_a_namespace_has_so_many_fetches_at_once(tmp_path: Path, honest: Path) -> None:
    """Each fetch holds a conversation.  Fetches of other namespaces begin at once; the namespace's own begin when some
    have ended."""
    stuck = threading.Event()

    def fault(request: Request) -> bool:
        return request.name == WEIGHTS and request.method == "GET" and stuck.wait(60)

    model = write_model(tmp_path / "m", layer_bytes=1000)
    write_index(model)
    with (
        Store(tmp_path, fault) as store,
        Fetchd(tmp_path, THAW_FETCHD_POOL_MB=512, THAW_FETCHD_READ_TIMEOUT_S=60) as fetchd,
    ):
        facts = fetchd.client.inspect(f"{store.uri}/m", ("a",))

        def start(number: int, namespace: str) -> None:
            fetchd.start(facts, f"g{number}", (FileRange(WEIGHTS, number, 1),), namespace=namespace)

        for number in range(places.FETCHES):
            start(number, "a")
        with pytest.raises(Throttled, match=f"too many fetches on this host: namespace a has {places.FETCHES} that"):
            start(100, "a")
        start(0, "a")  # a repeat begins nothing
        start(101, "b")
        fetchd.client.cancel(GroupId("g3"), 1)

        def has_room() -> bool:
            try:
                start(102, "a")
            except Throttled:
                return False
            return True

        wait_until(has_room)
        stuck.set()


def test_a_fetch_that_was_cancelled_counts_until_it_has_ended(tmp_path: Path, honest: Path) -> None:
    """The fetch keeps its slabs until it has ended.  Here it waits for a connection, which only a time limit ends."""
    model = write_model(tmp_path / "m", layer_bytes=1000)
    write_index(model)
    with Fetchd(tmp_path, THAW_FETCHD_POOL_MB=512, THAW_FETCHD_READ_TIMEOUT_S=60) as fetchd, ExitStack() as stack:
        with Store(tmp_path) as store:
            facts = fetchd.client.inspect(f"{store.uri}/m", ("a",))
        port = int(store.uri.rpartition(":")[2])
        silent = stack.enter_context(socket.create_server(("127.0.0.1", port), backlog=0))
        for _ in range(3):  # the kernel leaves a SYN unanswered from then on
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        for number in range(places.FETCHES):
            fetchd.start(facts, f"g{number}", (FileRange(WEIGHTS, number, 1),), namespace="a")
        syn_sent = f":{port:04X} 02 "
        wait_until(lambda: Path("/proc/net/tcp").read_text().count(syn_sent) >= places.FETCHES)
        for number in range(places.FETCHES):
            fetchd.client.cancel(GroupId(f"g{number}"), 1)
        with pytest.raises(Throttled, match=f"too many fetches on this host: namespace a has {places.FETCHES} that"):
            fetchd.start(facts, "another", (FileRange(WEIGHTS, 100, 1),), namespace="a")
        local = fetchd.client.inspect(honest.as_uri(), ("b",))
        fetchd.start(local, "b", namespace="b")
        fetchd.client.wait(GroupId("b"), 0, deadline_s=20)
        fetchd.kill()
