"""A tenant names a store in order to reach what only fetchd can reach, or to learn what listens there."""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fetchd.address_gate import Gate, _is_own
from fetchd.allowed_addresses import Place, Reach, parse
from fetchd.disclosure import disclosed
from fetchd.sources.http import HttpSource
from tests.conftest import free_port
from tests.fetchd.harness import Fault, Fetchd, Request, Store, wait_until, write_model
from thaw.errors import ModelCorrupt, ModelNotFound, ModelUnsupported, PlatformError, StoreUnavailable, ThawError
from thaw.ids import GroupId
from thaw.logs import Log
from thaw.settings import SettingError


class Trap:
    """Listens on every address of this machine, and notes every connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        self.port = self._listener.getsockname()[1]

    def caught(self) -> bool:
        self._listener.settimeout(0)
        try:
            self._listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def trap() -> Iterator[Trap]:
    made = Trap()
    yield made
    made.close()


@pytest.fixture(scope="module")
def careful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fetchd]:
    """A fetchd for which the operator has allowed no addresses."""
    with Fetchd(tmp_path_factory.mktemp("f"), THAW_FETCHD_ALLOW="", THAW_FETCHD_RETRIES=1) as running:
        yield running


def refusal(fetchd: Fetchd, uri: str) -> ThawError:
    with pytest.raises((StoreUnavailable, ModelNotFound)) as told:
        fetchd.client.inspect(uri)
    return told.value


def own_addresses() -> list[str]:
    """Return addresses of this machine's interfaces other than loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            return []
        return [sock.getsockname()[0]]


HERE = [
    *("127.0.0.1", "127.9.9.9", "localhost", "0.0.0.0", "127.1", "0x7f.1", "2130706433", "017700000001", "[::1]"),
    *("[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:127.0.0.1]"),
]


@pytest.mark.parametrize("host", [*HERE, *own_addresses()])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_no_way_to_write_this_machine_leads_to_it(careful: Fetchd, trap: Trap, scheme: str, host: str) -> None:
    told = refusal(careful, f"{scheme}://{host}:{trap.port}/m")
    assert not trap.caught()
    expected = "not a public address|address of this machine|Network is unreachable|has no address"
    assert re.search(expected, careful.reason(told)["error"])
    assert "not a public" not in told.message + told.hint


REFUSED = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1", "172.31.255.255"),
    *("192.0.0.1", "192.0.0.8", "192.0.0.9", "192.0.0.10", "192.0.0.192", "192.31.196.1", "192.52.193.1"),
    *("192.175.48.1", "168.63.129.16", "::ffff:168.63.129.16", "64:ff9b::168.63.129.16", "2620:4f:8000::1"),
    *("2001:4:112::1", "2001:20::1", "100:0:0:1::1", "4000::1", "192.0.2.1", "192.88.99.1", "192.168.0.1"),
    *("198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::7f00:1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:0:7f00:1", "64:ff9b::a00:1"),
    *("64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::", "2002:c0a8:1::", "fc00::1"),
    *("fd00:ec2::254", "fe80::1", "fe80::1%lo", "fec0::1", "ff02::1", "ff0e::1", "5f00::1", "3fff::1"),
]
PUBLIC = [
    *("1.1.1.1", "8.8.8.8", "168.63.129.17", "172.32.0.1", "192.0.1.1", "192.169.0.1", "::ffff:8.8.8.8"),
    *("64:ff9b::808:808", "2002:808:808::", "2606:4700::1111"),
]


def test_every_address_that_is_not_public_is_refused_however_it_is_written() -> None:
    assert [a for a in REFUSED if not Reach().problem(a, 80, is_own=False)] == []
    assert [a for a in PUBLIC if Reach().problem(a, 80, is_own=False)] == []
    assert "8.8.8.8 is an address of this machine" in Reach().problem("8.8.8.8", 80, is_own=True)
    assert all(map(_is_own, ("127.0.0.1", "::1", *own_addresses())))
    assert not _is_own("198.51.100.7")


def test_an_operator_allows_networks_and_single_ports_and_what_it_refuses_wins() -> None:
    reach = Reach(parse("A", "10.1.0.0/16, 127.0.0.1:9000, [fd00::]/8, [::1]:80"), parse("R", "10.1.9.0/24, 8.8.8.8"))
    allowed = [
        ("10.1.2.3", 1),
        ("127.0.0.1", 9000),
        ("fd12::1", 5),
        ("::1", 80),
        ("::ffff:10.1.2.3", 1),
        ("9.9.9.9", 1),
    ]
    refused = [("10.2.0.1", 1), ("127.0.0.1", 9001), ("127.0.0.2", 9000), ("::1", 81), ("10.1.9.1", 1), ("8.8.8.8", 1)]
    assert [reach.problem(a, p, is_own=a in ("127.0.0.1", "::1")) for a, p in allowed] == [""] * len(allowed)
    assert all(reach.problem(a, p, is_own=False) for a, p in refused)


def carriers(v4: str) -> list[str]:
    """The forms of IPv6 that carry an IPv4 address."""
    number = int(ipaddress.IPv4Address(v4))
    places = (0xFFFF << 32, 0, 0xFFFF << 48, 0x64FF9B << 96)
    return [*(str(ipaddress.IPv6Address(at | number)) for at in places), f"2002:{number >> 16:x}:{number & 0xFFFF:x}::"]


def test_each_rule_judges_the_address_that_another_one_carries() -> None:
    """By default, by what an operator allows and by what it refuses."""
    by_default, refusing = Reach(), Reach(parse("A", "10.0.0.0/8"), parse("R", "8.8.8.8, 10.1.9.0/24"))
    for form in carriers("8.8.8.8"):
        assert by_default.problem(form, 80, is_own=False) == ""
        assert refusing.problem(form, 80, is_own=False) == f"{form} port 80 is in THAW_FETCHD_REFUSE"
    for form in carriers("10.1.2.3"):
        assert by_default.problem(form, 80, is_own=False) == f"{form} is not a public address"
        assert refusing.problem(form, 80, is_own=False) == ""
    for form in carriers("10.1.9.1"):
        assert refusing.problem(form, 80, is_own=False) == f"{form} port 80 is in THAW_FETCHD_REFUSE"


def test_a_wide_network_that_is_allowed_does_not_open_this_machine() -> None:
    reach = Reach(parse("A", "10.1.0.0/16, 10.1.0.7:9000, 10.1.0.8, 127.0.0.0/8, 127.0.0.0/8:8000, [::]/0"))
    own = ["10.1.0.5", "127.0.0.1", "::ffff:10.1.0.5", "::ffff:127.0.0.1", "::1", "10.1.0.7"]
    assert [a for a in own if "address of this machine" not in reach.problem(a, 6379, is_own=True)] == []
    named = [("10.1.0.7", 9000), ("10.1.0.8", 6379), ("127.0.0.1", 8000)]
    assert [reach.problem(a, p, is_own=True) for a, p in named] == [""] * len(named)
    assert reach.problem("10.1.0.5", 6379, is_own=False) == "", "another machine of that network"


@pytest.mark.parametrize("text", ["10.0.0.1/8", "somewhere", "1.2.3.4:99999", "::1", "10.0.0.0/33", "1.2.3.4;5.6.7.8"])
def test_a_network_that_cannot_be_read_stops_the_start_with_the_settings_name(text: str) -> None:
    with pytest.raises(SettingError, match="THAW_FETCHD_ALLOW"):
        parse("THAW_FETCHD_ALLOW", text)


def test_fetchd_does_not_start_with_such_a_setting(tmp_path: Path) -> None:
    with Fetchd(tmp_path, THAW_FETCHD_REFUSE="somewhere") as fetchd:
        assert fetchd.events[-1]["event"] == "start_failed"
        assert "THAW_FETCHD_REFUSE: 'somewhere' is not a network" in fetchd.events[-1]["error"]


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A directory with nothing but an index, which is none."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thaw-index.json").write_text("{}")
    return tmp_path


def answering(data: bytes) -> Fault:
    def fault(request: Request) -> bool:
        request.sock.sendall(data)
        return True

    return fault


REDIRECT = b"HTTP/1.1 %b Go\r\nLocation: http://127.0.0.1:%d/m/config.json\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("status", [b"301", b"302", b"303", b"307", b"308"])
def test_a_redirect_leads_nowhere(odd: Path, trap: Trap, status: bytes) -> None:
    with Store(odd) as store:
        store.fault = answering(REDIRECT % (status, trap.port))
        port = store.uri.rpartition(":")[2]
        with Fetchd(odd, THAW_FETCHD_ALLOW=f"127.0.0.1:{port}", THAW_FETCHD_RETRIES=1) as fetchd:
            told = refusal(fetchd, f"{store.uri}/m")
            assert store.requests
            assert not trap.caught()
            assert str(trap.port) not in told.message + told.hint


def silent(request: Request) -> bool:
    request.sock.recv(1)  # until the other end hangs up
    return True


def honest(request: Request) -> bool:
    return False


def failing(status: bytes) -> Fault:
    return answering(b"HTTP/1.1 %b\r\nContent-Length: 0\r\n\r\n" % status)


def told_of(directory: Path, attacks: Callable[[str], list[tuple[str, Fault]]]) -> tuple[set[Any], list[str]]:
    """What a tenant is told of all attacks, without their URIs, and what the log says of each."""
    told, reasons = set(), []
    with Store(directory) as store, Fetchd(directory, THAW_FETCHD_ALLOW="127.0.0.1", THAW_FETCHD_RETRIES=1) as fetchd:
        for uri, fault in attacks(store.uri):
            store.fault = fault
            error = refusal(fetchd, uri)
            told.add((error.code, re.sub(r"\w{8}\)$", "ID)", error.message.removeprefix(uri)), error.hint))
            reasons.append(fetchd.reason(error)["error"])
    return told, reasons


def test_all_ways_to_fail_read_alike_and_the_log_tells_them_apart(odd: Path) -> None:
    """A scanner would like to distinguish: nothing listens, another service listens, the address is refused, it is
    silent."""
    hosts = [f"127.0.0.1:{free_port()}", "127.0.0.2:22", "169.254.169.254", "nobody.invalid", f"{'a' * 70}.invalid"]
    told, reasons = told_of(
        odd,
        lambda uri: [
            *((f"{uri}/m", fault) for fault in (failing(b"501 No"), answering(b"-ERR unknown command\r\n"), silent)),
            (f"{uri.replace('http', 'https')}/m", honest),
            *((f"http://{host}/m", honest) for host in hosts),
        ],
    )
    assert len(told) == 1, told
    assert len(set(reasons)) == len(reasons) == 9, reasons


def test_a_missing_a_forbidden_and_a_moved_model_read_alike(odd: Path) -> None:
    (odd / "n").mkdir()
    statuses = (b"401 No", b"403 No", b"302 Go")
    told, _ = told_of(odd, lambda uri: [*((f"{uri}/m", failing(s)) for s in statuses), (f"{uri}/n", honest)])
    assert len(told) == 1, told


SECRET = "hunter2-0xdeadbeef"
LEAKS = {
    "config.json": f'{SECRET}: "',
    "thaw-index.json": f'{{"{SECRET}": 1}}',
    "model.safetensors.index.json": f'{{"weight_map": {{"w": "{SECRET}"}}}}',
    "model.safetensors": SECRET * 5,
}
"""Contents that are found in place of a model's file, and that the tenant must not see."""


@pytest.mark.parametrize("name", LEAKS)
def test_no_error_quotes_what_a_server_answered(tmp_path: Path, name: str) -> None:
    write_model(tmp_path / "m", n_layers=1, layer_bytes=1000)
    (tmp_path / "m" / name).write_text(LEAKS[name])
    with Store(tmp_path) as store, Fetchd(tmp_path) as fetchd:
        with pytest.raises((ModelCorrupt, ModelUnsupported, ModelNotFound)) as told:
            fetchd.client.inspect(f"{store.uri}/m")
        fetchd.reason(told.value)
        words = told.value.message.removeprefix(f"{store.uri}/m: ") + told.value.hint
        for quoted in (SECRET, "JSON", "column", "bytes", "1000", name, *re.findall(r"0x\w+", words)):
            assert quoted not in words, words


def test_an_error_during_a_fetch_quotes_nothing_either(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", n_layers=1, layer_bytes=1000)
    with Store(tmp_path) as store, Fetchd(tmp_path, THAW_FETCHD_RETRIES=1) as fetchd:
        facts = fetchd.client.inspect(f"{store.uri}/m")
        n_bytes = (model / "model.safetensors").stat().st_size
        (model / "model.safetensors").write_bytes(b"x" * (n_bytes - 7))
        fetchd.start(facts)
        with pytest.raises(ModelCorrupt) as told:
            fetchd.client.wait(GroupId("g"), 0, deadline_s=20)
        assert str(n_bytes - 7) in fetchd.reason(told.value)["error"]
        assert str(n_bytes - 7) not in told.value.message + told.value.hint


ODD = {
    "superscript": b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
    "endless": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"7" * 5000 + b"\r\n\r\n",
    "range": b"HTTP/1.1 206 Partial\r\nContent-Length: 2\r\nContent-Range: bytes 0-" + b"7" * 5000 + b"/2\r\n\r\n{}",
}


@pytest.mark.parametrize("number", ODD)
def test_a_server_whose_numbers_are_none_is_told_of_as_every_other(odd: Path, fetchd: Fetchd, number: str) -> None:
    with Store(odd) as store:
        store.fault = lambda r: (r.method == "HEAD") == (number != "range") and answering(ODD[number])(r)
        with pytest.raises((ModelCorrupt, ModelUnsupported)) as told:
            fetchd.client.inspect(f"{store.uri}/m")
        assert re.search(r": [a-z ,]+ \(error id \w{8}\)$", told.value.message), told.value.message


@pytest.mark.parametrize("uri", ["HTTP://store.example/m", "hf://org/m"])
def test_an_error_that_nobody_foresaw_is_logged_and_not_told(capfd: pytest.CaptureFixture[str], uri: str) -> None:
    log = Log("fetchd")
    told = disclosed(uri, ValueError(SECRET), log)
    assert isinstance(told, PlatformError)
    assert SECRET not in str(told.info())
    assert SECRET in capfd.readouterr().err
    assert isinstance(disclosed("s3://models/m", ValueError(SECRET), log), ValueError)


class Rebinding:
    """A resolver whose owner changes its mind after each answer."""

    def __init__(self, *addresses: str) -> None:
        self.answers = list(addresses)

    def __call__(self, host: str, port: int, *_: Any) -> list[Any]:
        assert host == "store.example"
        address = self.answers.pop(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]


ONLY_THE_STORE = Reach((Place(ipaddress.ip_network("127.0.0.2")),))


def test_a_name_is_resolved_once_for_a_connection_and_each_connection_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name leads to the store when it is checked, and to the state server when it is used: there is no such gap."""
    port = free_port()
    with socket.create_server(("127.0.0.3", port)) as victim, socket.create_server(("127.0.0.2", port)) as store:
        served = threading.Thread(target=_serve_one, args=(store,))
        served.start()
        resolver = Rebinding("127.0.0.2", "127.0.0.3", "127.0.0.3")
        monkeypatch.setattr(socket, "getaddrinfo", resolver)
        source = HttpSource(f"http://store.example:{port}/m", 2.0, connect=Gate(ONLY_THE_STORE).connect)
        connection = source.connect()
        assert connection.stat("config.json").n_bytes == 7
        assert resolver.answers == ["127.0.0.3", "127.0.0.3"], "one resolution for one connection"
        served.join(60)  # the store closes the kept connection, so the next request makes another
        for one in (connection, source.connect()):
            with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.3 is not a public address"):
                one.stat("config.json")
            one.close()
        victim.settimeout(0)
        with pytest.raises(BlockingIOError):
            victim.accept()


def _serve_one(listener: socket.socket) -> None:
    accepted, _ = listener.accept()
    with accepted:
        accepted.recv(4096)
        accepted.sendall(b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 7\r\n\r\n')


def test_the_platforms_own_store_needs_no_leave(tmp_path: Path) -> None:
    """An operator has configured the store, and on a single machine it is on loopback."""
    write_model(tmp_path / "models" / "m")
    environ = {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_REGION": "us-east-1",
        "THAW_FETCHD_ALLOW": "",
    }
    with Store(tmp_path) as store, Fetchd(tmp_path, THAW_S3_ENDPOINT=store.uri, **environ) as fetchd:
        assert fetchd.client.inspect("s3://models/m").n_layers == 3
        store.requests.clear()
        refusal(fetchd, f"{store.uri}/models/m")
        assert store.requests == [], "the same address, named by a tenant"


def test_a_name_and_password_in_a_uri_are_refused(careful: Fetchd, trap: Trap) -> None:
    for uri in (f"http://store.example@127.0.0.1:{trap.port}/m", f"http://u:p@localhost:{trap.port}/m"):
        assert "is not a model's uri" in refusal(careful, uri).message
    wait_until(lambda: not trap.caught())
