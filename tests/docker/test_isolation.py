"""A container reaches nothing from inside except, in a pipeline, the relay server.  Each test checks one claim."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis

from invoker.drivers.base import Handle, Spec
from invoker.drivers.docker import spec as docker_spec
from invoker.drivers.docker.driver import DockerDriver
from invoker.drivers.docker.uids import DEFAULT_RANGE, UidRange
from invoker.drivers.programs import PROGRAMS
from invoker.drivers.relay_socket import RelaySockets
from relay.clients.channel import Channel
from relay.protocol.messages import SegmentWanted, to_plain
from relay.state import credentials
from tests import function_imports
from tests.conftest import ValkeyServer, free_port, valkey_binary
from tests.docker.engine import DockerEngine
from tests.docker.inside import PROBES, WAIT_S, ask, load, up
from tests.fetchd.harness import Fetchd, write_model
from tests.fetchd.test_isolation import ATTACK, PRELUDE
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.errors import PlatformError
from thaw.ids import GroupId, InstanceId
from thaw.logs import Log

PROBE = """
def main(args):
    return {"tcp": tcp(args["host"], args["port"]), "udp": udp(args["host"], args["port"])}
"""
NOWHERE = "OSError Network is unreachable"


@pytest.fixture(scope="module")
def driver(docker_engine: DockerEngine) -> Iterator[DockerDriver]:
    with tempfile.TemporaryDirectory(prefix="thaw-", dir="/tmp") as directory:
        made = docker_engine.driver(Path(directory))
        yield made
        made.end(made.list_owned())
        made.close()


@pytest.fixture(scope="module")
def probe(driver: DockerDriver) -> Handle:
    handle = up(driver, "prober")
    load(handle, PROBE)
    return handle


@contextmanager
def listening(address: str) -> Iterator[int]:
    """A server on this machine that greets over TCP and UDP.  It must be reachable from outside the containers."""
    with socket.socket() as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        tcp.bind((address, 0))
        port = tcp.getsockname()[1]
        tcp.listen()
        udp.bind((address, port))

        def greet() -> None:
            try:
                while True:
                    connection, _ = tcp.accept()
                    connection.sendall(b"hello")
                    connection.close()
            except OSError:
                return

        def echo() -> None:
            while True:
                data, sender = udp.recvfrom(16)
                if data == b"end":
                    return
                udp.sendto(b"pong", sender)

        threads = [threading.Thread(target=greet), threading.Thread(target=echo)]
        for thread in threads:
            thread.start()
        try:
            here = "127.0.0.1" if address == "0.0.0.0" else address
            with socket.create_connection((here, port), timeout=5) as sock:
                assert sock.recv(16) == b"hello"
            yield port
        finally:
            tcp.shutdown(socket.SHUT_RDWR)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.sendto(b"end", (here, port))
            for thread in threads:
                thread.join(5)


def addresses() -> list[str]:
    """All addresses of this machine except loopback."""
    shown = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    return [a for a in shown if ":" not in a] or ["192.0.2.1"]


def test_not_the_host_nor_a_gateway_on_it_at_any_address(probe: Handle) -> None:
    with listening("0.0.0.0") as port:
        for address in addresses():
            assert ask(probe, host=address, port=port) == {"tcp": NOWHERE, "udp": NOWHERE}


def test_its_loopback_is_its_own(probe: Handle) -> None:
    with listening("127.0.0.1") as port:
        found = ask(probe, host="127.0.0.1", port=port)
    assert found["tcp"] == "ConnectionRefusedError Connection refused"
    assert found["udp"].startswith("TimeoutError")  # the packet gets no answer, which is how UDP shows a closed port


def test_not_the_metadata_address(probe: Handle) -> None:
    assert ask(probe, host="169.254.169.254", port=80) == {"tcp": NOWHERE, "udp": NOWHERE}


def test_not_the_world_outside(probe: Handle) -> None:
    assert ask(probe, host="192.0.2.1", port=443) == {"tcp": NOWHERE, "udp": NOWHERE}


def test_not_another_function(driver: DockerDriver, probe: Handle) -> None:
    """The other function listens wherever it can: on TCP, on UDP, and on a unix socket in the abstract namespace."""
    other = up(driver, "other")
    load(
        other,
        """
import threading
kept = []
def main(args):
    tcp_server = socket.create_server(("0.0.0.0", 0))
    udp_server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp_server.bind(("0.0.0.0", tcp_server.getsockname()[1]))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\\0thaw-test-other")
    abstract.listen()
    kept.extend([tcp_server, udp_server, abstract])
    interfaces = [name for _, name in socket.if_nameindex()]
    return {"port": tcp_server.getsockname()[1], "interfaces": interfaces}
""",
    )
    listens = ask(other)
    assert listens["interfaces"] == ["lo"]
    for address in ("172.17.0.2", "172.17.0.3", "10.0.0.2"):  # addresses that an engine's bridge would give it
        assert ask(probe, host=address, port=listens["port"]) == {"tcp": NOWHERE, "udp": NOWHERE}
    third = up(driver, "third")
    load(
        third,
        """
def main(args):
    return {"abstract": unix("\\0thaw-test-other"), "seen": sorted(os.listdir("/run/thaw")),
            "layers": attempt(lambda: os.listdir("/run/thaw/packages")),
            "processes": [p for p in os.listdir("/proc") if p.isdigit()]}
""",
    )
    found = ask(third)
    assert found["abstract"] == "ConnectionRefusedError Connection refused"
    assert found["seen"] == ["io", "packages"]
    assert found["layers"] == "PermissionError Permission denied"
    assert len(found["processes"]) == 2  # the proxy and itself


def test_it_holds_no_power_over_the_host(driver: DockerDriver) -> None:
    handle = up(driver, "weak")
    load(
        handle,
        """
def main(args):
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    return {
        "uid": os.getuid(), "capabilities": status["CapBnd"].strip(), "no_new_privs": status["NoNewPrivs"].strip(),
        "root": attempt(lambda: open("/x", "w")), "code": attempt(lambda: open("/app/x", "w")),
        "its directory": attempt(lambda: open("/run/thaw/io/x", "w")),
        "its socket": attempt(lambda: os.unlink("/run/thaw/io/s")), "tmp": attempt(lambda: open("/tmp/x", "w").name),
        "devices": sorted(os.listdir("/dev")), "engine": unix("/var/run/docker.sock"),
        "mount": attempt(lambda: os.open("/proc/sys/kernel/hostname", os.O_WRONLY)),
        "environment": sorted(os.environ),
    }
""",
    )
    found = ask(handle)
    assert found["uid"] in range(DEFAULT_RANGE.first, DEFAULT_RANGE.last + 1)
    assert int(found["capabilities"], 16) == 0
    assert found["no_new_privs"] == "1"
    refusals = {"OSError Read-only file system", "PermissionError Permission denied"}
    assert {found["root"], found["code"], found["mount"]} <= refusals
    assert found["its directory"] == found["its socket"] == "PermissionError Permission denied"
    assert found["tmp"] == "reached /tmp/x"
    assert not {"sda", "vda", "mem", "kmsg", "kvm"} & set(found["devices"])
    assert found["engine"] == "FileNotFoundError No such file or directory"
    assert [name for name in found["environment"] if "THAW" in name or "REDIS" in name or "AWS" in name] == []


CALLS = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}
OF_X86 = {"userfaultfd": 323, "perf_event_open": 298, "bpf": 321, "keyctl": 250, "add_key": 248, "request_key": 249,
          "ptrace": 101, "process_vm_readv": 310, "unshare": 272, "setns": 308, "mount": 165, "clone3": 435,
          "open_by_handle_at": 304, "kexec_load": 246, "init_module": 175, "getpid": 39}
OF_ARM = {"userfaultfd": 282, "perf_event_open": 241, "bpf": 280, "keyctl": 219, "add_key": 217, "request_key": 218,
          "ptrace": 117, "process_vm_readv": 270, "unshare": 97, "setns": 268, "mount": 40, "clone3": 435,
          "open_by_handle_at": 265, "kexec_load": 104, "init_module": 105, "getpid": 172}

def outcome(number):
    ctypes.set_errno(0)
    result = libc.syscall(number, 0, 0, 0, 0, 0)
    return errno.errorcode[ctypes.get_errno()] if result == -1 else "allowed"

def family(number):
    try:
        socket.socket(number, socket.SOCK_STREAM).close()
    except OSError as e:
        return errno.errorcode[e.errno]
    return "allowed"

def pair(number):
    try:
        for one in socket.socketpair(number, socket.SOCK_STREAM):
            one.close()
    except OSError as e:
        return errno.errorcode[e.errno]
    return "allowed"

def main(args):
    numbers = NUMBERS | (OF_ARM if os.uname().machine == "aarch64" else OF_X86)
    return {"calls": {name: outcome(number) for name, number in numbers.items()},
            "vsock": family(40), "alg": family(38), "unix": family(1), "inet": family(2),
            "pair": pair(1), "inet pair": pair(2), "tipc pair": pair(30)}
"""


def test_calls_that_help_attacks_are_refused_whatever_the_engine_allows(driver: DockerDriver) -> None:
    handle = up(driver, "caller")
    load(handle, CALLS)
    found = ask(handle)
    calls = found.pop("calls")
    assert calls.pop("getpid") == "allowed"
    assert calls.pop("clone3") == "ENOSYS", "libc then makes a thread with clone"
    assert set(calls.values()) == {"EPERM"}, calls
    families = {"vsock": "EPERM", "alg": "EPERM", "unix": "allowed", "inet": "allowed"}
    assert found == {**families, "pair": "allowed", "inet pair": "EPERM", "tipc pair": "EPERM"}


INSTANCES = """
import ctypes, errno, threading
libc = ctypes.CDLL(None, use_errno=True)
kept = []
def main(args):
    while len(kept) < args["n"] and (fd := libc.inotify_init1(0)) >= 0:
        kept.append(fd)
    return {"n": len(kept), "error": errno.errorcode.get(ctypes.get_errno(), "")}
"""


def test_a_function_that_takes_all_inotify_instances_takes_them_from_itself(driver: DockerDriver) -> None:
    greedy, neighbour = up(driver, "greedy"), up(driver, "neighbour")
    for handle in (greedy, neighbour):
        load(handle, INSTANCES)
    taken = ask(greedy, n=100_000)
    most = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    assert taken == {"n": most, "error": "EMFILE"}, "all that a uid may have, and not only what a process may open"
    assert ask(neighbour, n=8) == {"n": 8, "error": ""}


def test_containers_have_uids_of_their_own_also_after_a_restart_of_the_invoker(
    docker_engine: DockerEngine, run_dir: Path
) -> None:
    def uid_of(driver: DockerDriver, name: str) -> int:
        handle = up(driver, name)
        load(handle, "def main(args):\n    return {'uid': os.getuid(), 'gid': os.getgid()}\n")
        found = ask(handle)
        assert found["uid"] == found["gid"]
        return int(found["uid"])

    few = UidRange(3_000, 3_002)
    first = docker_engine.driver(run_dir, uids=few)
    uids = [uid_of(first, "a"), uid_of(first, "b")]
    first.close()
    second = docker_engine.driver(run_dir, uids=few)
    try:
        owned = {each.handle.container_id: each for each in second.list_owned()}
        for each in owned.values():
            second.adopt(each)
        uids.append(uid_of(second, "c"))
        assert sorted(uids) == [3_000, 3_001, 3_002]
        wanted = Spec("d", KIND_PYTHON)
        with pytest.raises(PlatformError, match="all 3 uids of THAW_CONTAINER_UIDS are taken"):
            second.create(wanted)
        (run_dir / "u").mkdir()
        with (
            closing(docker_engine.driver(run_dir / "u", "host-u", uids=few)) as other,
            pytest.raises(PlatformError, match="are taken"),
        ):
            other.create(wanted)
        second.end([owned["a"]])
        assert uid_of(second, "d") == uids[0]
    finally:
        second.end(second.list_owned())
        second.close()


def test_a_function_may_import_the_standard_library_and_nothing_of_the_image(driver: DockerDriver) -> None:
    """The same holds where containers are processes: tests/invoker/test_python_actions.py."""
    handle = up(driver, "importer")
    load(handle, function_imports.PROBE)
    function_imports.check(ask(handle, **function_imports.ARGUMENTS))


# an llm container, whose program is a probe here --------------------------------------------------------------------

STAGE = (
    PROBES
    + """
import sys, threading
def say(text):
    print(text, flush=True)
"""
)


def run_stage(
    driver: DockerDriver, monkeypatch: pytest.MonkeyPatch, code: str, *, descriptor_socket: str = ""
) -> list[str]:
    """Run ``code`` as the program of an llm container, and return the lines that it printed."""
    monkeypatch.setitem(PROGRAMS, KIND_LLM, ("-c", STAGE + code))
    ended = threading.Event()
    driver.on_exit(lambda end: ended.set() if end.container_id == "stage" else None)
    wanted = Spec("stage", KIND_LLM, descriptor_socket=descriptor_socket)
    handle = driver.start(driver.create(wanted), wanted)
    assert ended.wait(WAIT_S)
    errors = driver.logs(handle, "stderr", 0).data.decode()
    assert not errors, errors
    lines = driver.logs(handle, "stdout", 0).data.decode().splitlines()
    driver.remove(handle)
    return lines


RESP = """
def resp(sock, *words):
    sock.sendall(b"*%d\\r\\n" % len(words) + b"".join(b"$%d\\r\\n%b\\r\\n" % (len(w), w) for w in map(str.encode, words)))
    return sock.recv(4096).decode().splitlines()[0]
def relay():
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(URL.partition("?")[0].removeprefix("unix://"))
    return sock
"""


@pytest.fixture
def relay_server(tmp_path: Path) -> Iterator[tuple[str, redis.Redis]]:
    """A relay server as in production: with a password for the platform, and without persistence."""
    port = free_port()
    arguments = [valkey_binary(), "--port", str(port), "--bind", "127.0.0.1", "--requirepass", "platform", "--save", ""]
    process = subprocess.Popen(list(map(str, arguments)), stdout=subprocess.DEVNULL, cwd=tmp_path)
    retry = redis.retry.Retry(redis.backoff.ExponentialBackoff(cap=0.2, base=0.01), 100)
    client = redis.Redis(port=port, password="platform", retry=retry, retry_on_error=[redis.ConnectionError])
    client.ping()
    yield f"redis://127.0.0.1:{port}/0", client
    client.close()
    process.kill()
    process.wait(10)


def test_a_stage_reaches_the_relay_with_its_groups_credential_and_no_other_key(
    driver: DockerDriver,
    monkeypatch: pytest.MonkeyPatch,
    relay_server: tuple[str, redis.Redis],
    own_valkey: ValkeyServer,
) -> None:
    address, admin = relay_server
    state = redis.Redis.from_url(own_valkey.url)
    mine, theirs = GroupId("a" * 32), GroupId("b" * 32)
    secret = [credentials.read(state, credentials.issue(state, admin, g)) for g in (mine, theirs)]
    admin.set(f"{credentials.key_prefix(theirs)}secret", "hidden states")
    url = driver.relay_address(address)
    lines = run_stage(
        driver,
        monkeypatch,
        f"URL = {url!r}\n"
        + RESP
        + f"""
sock = relay()
say(resp(sock, "PING"))
say(resp(sock, "AUTH", {secret[0].username!r}, {secret[0].secret!r}))
say(resp(sock, "SET", {credentials.key_prefix(mine) + "x"!r}, "1"))
say(resp(sock, "GET", {credentials.key_prefix(theirs) + "secret"!r}))
say(resp(sock, "KEYS", "*"))
say(resp(sock, "CONFIG", "GET", "requirepass"))
""",
    )
    assert lines[0].startswith("-NOAUTH")
    assert lines[1:3] == ["+OK", "+OK"]
    assert [line.partition(" ")[0] for line in lines[3:]] == ["-NOPERM"] * 3
    state.close()


def test_a_stage_reaches_nothing_but_the_relay(
    driver: DockerDriver,
    monkeypatch: pytest.MonkeyPatch,
    relay_server: tuple[str, redis.Redis],
    own_valkey: ValkeyServer,
) -> None:
    """The stage reaches neither the relay server's own TCP port nor the state server."""
    address, _ = relay_server
    driver.relay_address(address)
    ports = [int(url.rpartition(":")[2].partition("/")[0]) for url in (address, own_valkey.url)]
    lines = run_stage(
        driver,
        monkeypatch,
        f"""
for host in {["127.0.0.1", *addresses()]!r}:
    for port in {ports!r}:
        say(tcp(host, port)); say(udp(host, port))
say(" ".join(os.listdir({docker_spec.RELAYS!r})))
say(attempt(lambda: open({docker_spec.RELAYS!r} + "/x", "w")))
""",
    )
    assert [line for line in lines[:-2] if "reached" in line or "timed out" in line] == []
    assert [name for name in lines[-2].split() if not re.fullmatch(r"[0-9a-f]{12}\.sock", name)] == [], "relays alone"
    assert lines[-1] == "OSError Read-only file system"


def test_a_relay_that_is_restarted_is_found_again_through_the_same_socket(
    driver: DockerDriver, own_valkey: ValkeyServer
) -> None:
    url = driver.relay_address(own_valkey.url)
    path = driver._relays.directory / url.partition("?")[0].rpartition("/")[2]
    with redis.Redis(unix_socket_path=str(path)) as client:
        assert client.ping()
        own_valkey.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        own_valkey.start()
        assert client.ping()


def test_a_relay_socket_of_a_killed_invoker_is_opened_again_by_the_next(
    own_valkey: ValkeyServer, run_dir: Path
) -> None:
    """The socket keeps its name, because running stages look for the relay server at the old place."""
    directory = run_dir / "relays"
    with closing(RelaySockets(directory, Log("invoker"))) as killed:
        name = killed.inside(own_valkey.url, "/there").partition("?")[0].rpartition("/")[2]
        with closing(RelaySockets(directory, Log("invoker"))) as following:
            assert not (directory / name).exists()
            following.reopen()
            with redis.Redis(unix_socket_path=str(directory / name)) as client:
                assert client.ping()
    third = RelaySockets(directory, Log("invoker"))
    third.reopen()  # an invoker that ended normally leaves no socket
    assert list(run_dir.rglob("*.*")) == []


class Wire(Channel):
    """A channel that keeps its messages instead of sending them."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        super().__init__(ours)


def request_bytes() -> bytes:
    wire = Wire()
    wire.send(to_plain(SegmentWanted()))
    data = wire.theirs.recv(65536)
    wire.theirs.close()
    wire.close()
    return data


TAKE_SEGMENT = f"""
import array, ctypes, fcntl, json, mmap, types
door = socket.socket(socket.AF_UNIX)
door.connect(os.environ["THAW_DOOR"])
door.sendall({request_bytes()!r})
data, ancillary, _, _ = door.recvmsg(1 << 16, socket.CMSG_SPACE(1000))
fds = array.array("i")
fds.frombytes(ancillary[0][2])
offer = types.SimpleNamespace(n_slabs=len(fds) - 1)
"""


def test_a_segment_comes_through_its_socket_as_descriptors_that_can_only_be_read(
    driver: DockerDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The attacks of fetchd's own tests, carried out from inside a container."""
    with Fetchd(tmp_path) as fetchd:
        started = fetchd.start(fetchd.client.inspect(write_model(tmp_path / "m").as_uri()))
        client, reader = fetchd.open(started.segment_id, "mine")
        reader.wait(reader.n_bytes, WAIT_S)
        before = bytes(reader.view(0, reader.n_bytes))
        theirs = fetchd.client.open_descriptor_socket(InstanceId("theirs"))
        path = fetchd.client.open_descriptor_socket(InstanceId("mine"))
        lines = run_stage(driver, monkeypatch, TAKE_SEGMENT + ATTACK.removeprefix(PRELUDE), descriptor_socket=path)
        assert [line for line in lines if "POSSIBLE" in line] == []
        assert len([line for line in lines if "refused" in line]) == 18
        assert bytes(reader.view(0, reader.n_bytes)) == before
        others = run_stage(
            driver, monkeypatch, f"say(unix({theirs!r})); say(unix({fetchd.socket!r}))", descriptor_socket=path
        )
        assert others == ["FileNotFoundError No such file or directory"] * 2
        reader.close()
        client.close()
