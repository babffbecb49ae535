"""The options that ``thaw dev up`` accepts."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

from tests.fetchd.harness import Fetchd, write_model
from thaw.cli.model_stores.stores import open_store
from thaw.cli.platform_api.property_file import read_properties, write_properties
from thaw.dev import components, ports, up
from thaw.dev.layout import Layout, Platform
from thaw.dev.options import Options, parse_rate
from thaw.dev.ports import free_ports, is_free
from thaw.dev.processes import ProcessId
from thaw.errors import BadRequest
from thaw.model_uri import policy_of
from thaw.settings import SettingError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "rate"),
    [("", None), ("200mbit", 25_000_000), ("1gbit", 125_000_000), ("500Kbit", 62_500), ("2.5gbit", 312_500_000)],
)
def test_a_link_is_written_as_tc_writes_it(text: str, rate: int | None) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["200", "fast", "0mbit", "-1mbit", "200 mbit"])
def test_another_rate_is_refused_with_examples(text: str) -> None:
    with pytest.raises(BadRequest, match="is not a rate") as e:
        Options(link=text)
    assert "200mbit" in e.value.hint


def test_a_driver_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadRequest, match="--driver podman is not in this version"):
        Options(driver="podman")


def platform_with(store_dir: str, run_dir: Path) -> Platform:
    return Platform(
        ProcessId(1, 1),
        "http://127.0.0.1:1",
        "redis://x",
        "redis://x",
        str(run_dir),
        store_dir,
        "",
        "",
        "",
        (),
        1,
        "",
        "process",
        0,
    )


@pytest.mark.parametrize(("asked", "address"), [({}, ""), ({"direct": True}, "127.0.0.1")])
def test_stages_reach_one_another_only_if_that_was_asked_for(
    tmp_path: Path, asked: dict[str, bool], address: str
) -> None:
    started = components.host(platform_with("/store", tmp_path), Options(**asked), 0)
    assert {c.env["THAW_STAGE_ADDRESS"] for c in started} == {address}


def test_the_store_may_lie_in_a_directory_of_any_name(tmp_path: Path) -> None:
    """``thaw model push`` writes to the directory that gateways allow and fetchd reads."""
    store_dir = tmp_path / "a b#c?d%2f:e,é"
    platform = platform_with(str(store_dir), tmp_path)
    uri = platform.model_uri("m")
    policy_of(",".join(components.models(platform))).check("guest", uri, ())
    made = write_model(tmp_path / "made")
    for path in made.iterdir():
        open_store(uri).write(path.name, path.read_bytes())
    assert sorted(p.name for p in (store_dir / "m").iterdir()) == sorted(p.name for p in made.iterdir())
    (fetchd_env,) = [c.env for c in components.host(platform, Options(), 0) if c.name.endswith("fetchd")]
    roots = fetchd_env["THAW_FETCHD_FILE_ROOTS"]
    with Fetchd(tmp_path, THAW_FETCHD_FILE_ROOTS=roots) as fetchd:
        assert fetchd.client.inspect(uri).n_layers == 3


def test_the_first_key_outlives_another_that_is_set_in_the_properties(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    first = up._first_key(layout, "http://127.0.0.1:1")
    assert read_properties(layout.wskprops)["AUTH"] == first
    assert layout.first_key.stat().st_mode & 0o777 == 0o600
    write_properties(layout.wskprops, {**read_properties(layout.wskprops), "AUTH": "somebody:else"})
    assert up._first_key(layout, "http://127.0.0.1:2") == first
    assert read_properties(layout.wskprops) == {
        "APIHOST": "http://127.0.0.1:2",
        "AUTH": "somebody:else",
        "NAMESPACE": "_",
    }


def test_a_first_key_that_an_earlier_version_kept_in_the_properties_stays(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    write_properties(layout.wskprops, {"AUTH": "the:first"})
    assert up._first_key(layout, "http://127.0.0.1:1") == "the:first"
    assert layout.first_key.read_text() == "the:first"


def test_memory_is_shared_by_the_hosts() -> None:
    assert Options(hosts=1, memory_mb=512).host_memory_mb == 512
    assert Options(hosts=16).host_memory_mb <= Options(hosts=1).host_memory_mb <= 8192


def test_free_ports_are_free_different_and_have_free_companions() -> None:
    found = free_ports(8)
    assert len(set(found)) == 8
    assert all(is_free(p) and is_free(p + 10_000) for p in found)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", found[0]))
        assert not is_free(found[0])


def test_no_two_processes_are_given_the_same_port_before_a_server_listens_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secrets, "randbelow", lambda _: 3_000)  # both begin to look at the same place
    ours = free_ports(2)
    code = "import secrets; secrets.randbelow = lambda _: 3000; from thaw.dev.ports import free_ports; print(free_ports(2))"
    theirs = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not set(json.loads(theirs)) & {*ours, *(port + 10_000 for port in ours)}
    assert ports._claim(json.loads(theirs)[0]), "a process that has ended claims nothing"


def test_a_process_claims_its_newest_ports_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_CLAIMS", 4)
    monkeypatch.setattr(ports, "_claimed", deque())
    first, *others = free_ports(3)
    code = f"from thaw.dev.ports import _claim; print([_claim(port) for port in {[first, *others]}])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.lower()) == [True, False, False]


def test_the_state_servers_memory_is_an_operators_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THAW_STATE_MAXMEMORY", raising=False)
    assert components.state_memory() == "1gb"
    monkeypatch.setenv("THAW_STATE_MAXMEMORY", "256mb")
    assert components.state_memory() == "256mb"
    monkeypatch.setenv("THAW_STATE_MAXMEMORY", "much\nrequirepass x")
    with pytest.raises(SettingError, match="THAW_STATE_MAXMEMORY=.* is no size"):
        components.state_memory()
