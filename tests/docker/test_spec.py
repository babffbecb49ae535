"""The requests to an engine, tested without an engine."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from invoker.drivers.base import Spec
from invoker.drivers.confined import Limits
from invoker.drivers.docker.client import gpu_request
from invoker.drivers.docker.logs import _next_after
from invoker.drivers.docker.paths import EnginePaths, is_replaced, own_container_id
from invoker.drivers.docker.seccomp import profile
from invoker.drivers.docker.spec import Asked, Mounts, config, cpu_quota_us
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.errors import PlatformError

MOUNTS = Mounts("/there/io", "/there/doors/i.sock", "/there/relays")
ASKED = Asked("image", {}, MOUNTS, Limits(4), 2_000_000_007, "{}")


def host_config(spec: Spec, **asked: object) -> dict[str, object]:
    plain: dict[str, object] = config(spec, Asked("image", {}, MOUNTS, Limits(4), 2_000_000_007, "{}", **asked))[
        "HostConfig"
    ]  # type: ignore[arg-type]
    return plain


def test_every_container_is_hardened_and_without_a_network() -> None:
    for kind in (KIND_PYTHON, KIND_LLM):
        found = host_config(Spec("i", kind))
        assert found["NetworkMode"] == "none"
        assert found["ReadonlyRootfs"] is True
        assert found["CapDrop"] == ["ALL"]
        assert found["SecurityOpt"] == ["no-new-privileges:true", "seccomp={}"]
        assert found["PidsLimit"] == 512
        assert found["Memory"] == found["MemorySwap"] == 2048 << 20
        assert config(Spec("i", kind), ASKED)["User"] == "2000000007:2000000007"


def test_relays_are_mounted_into_llm_containers_only_and_nothing_but_its_own_directory_is_writable() -> None:
    def targets(kind: str) -> dict[str, bool]:
        mounts = host_config(Spec("i", kind, descriptor_socket="/here/i.sock"))["Mounts"]
        return {m["Target"]: m["ReadOnly"] for m in mounts}  # type: ignore[attr-defined]

    assert targets(KIND_LLM) == {"/run/thaw/io": False, "/run/thaw/door": True, "/run/thaw/relays": True}
    assert targets(KIND_PYTHON) == {"/run/thaw/io": False, "/run/thaw/door": True}


def test_a_share_is_a_part_of_the_hosts_cores() -> None:
    assert cpu_quota_us(1.0, 4) == 400_000
    assert cpu_quota_us(0.25, 4) == 100_000
    assert cpu_quota_us(0.0001, 1) == 1000


def test_one_gpu_is_asked_for_by_its_number() -> None:
    assert gpu_request("cuda:1")["DeviceIDs"] == ["1"]
    assert gpu_request("cuda:1")["Count"] == 0
    assert gpu_request("cuda")["Count"] == -1
    request = gpu_request("cuda:0")
    assert host_config(Spec("i", KIND_LLM), devices=(request,))["DeviceRequests"] == [dict(request)]


def test_a_path_is_found_where_the_engine_has_it() -> None:
    paths = EnginePaths({"/run/thaw": "/var/lib/docker/volumes/h/_data", "/run": "/elsewhere"})
    assert paths.there("/run/thaw/c/12/io") == "/var/lib/docker/volumes/h/_data/c/12/io"
    assert EnginePaths(None).there("/run/thaw/c") == "/run/thaw/c"
    with pytest.raises(PlatformError, match="is not mounted from the engine's machine"):
        paths.there("/tmp/x")


def test_a_process_knows_the_container_it_is(tmp_path: Path) -> None:
    line = f"1 2 8:1 /var/lib/docker/containers/{'a' * 64}/hostname /etc/hostname rw - ext4 /dev/sda1 rw\n"
    (tmp_path / "in").write_text(line)
    (tmp_path / "out").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    assert own_container_id(str(tmp_path / "in")) == "a" * 64
    assert own_container_id(str(tmp_path / "out")) == ""


def test_a_socket_that_is_another_one_now_where_it_was_mounted_from_is_known(tmp_path: Path) -> None:
    mountinfo = tmp_path / "mountinfo"
    line = "31 22 8:1 /run/{} /{}/docker.sock rw,relatime master:1 - tmpfs tmpfs rw\n"
    inside = str(tmp_path).lstrip("/")
    mountinfo.write_text(line.format("docker.sock", inside) + line.format("other//deleted", "elsewhere"))
    assert not is_replaced(f"{tmp_path}/docker.sock", str(mountinfo))
    mountinfo.write_text(line.format("docker.sock//deleted", inside))
    assert is_replaced(f"{tmp_path}/docker.sock", str(mountinfo))


def test_a_log_goes_on_behind_the_last_line_that_was_seen() -> None:
    assert _next_after("2026-01-02T03:04:05.000000001Z") == "1767323045.000000002"
    assert _next_after("2026-01-02T03:04:05.999999999Z") == "1767323046.000000000"
    assert _next_after("no time") == ""


def test_the_profile_allows_no_call_by_which_others_were_attacked() -> None:
    """tests/docker/test_isolation.py makes the calls."""
    plain = json.loads(profile())
    allowed = {name for rule in plain["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}
    assert plain["defaultAction"] == "SCMP_ACT_ERRNO"
    refused = "bpf userfaultfd perf_event_open keyctl add_key request_key ptrace mount setns unshare init_module"
    assert not allowed & {*refused.split(), *(f"io_uring_{call}" for call in ("setup", "enter", "register"))}

    def conditions(name: str) -> list[dict[str, object]]:
        return [arg for rule in plain["syscalls"] if name in rule["names"] for arg in rule.get("args") or [{}]]

    families = {arg["value"] for arg in conditions("socket")}
    assert families == {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}
    one = {"index": 0, "value": socket.AF_UNIX, "valueTwo": 0, "op": "SCMP_CMP_EQ"}
    assert conditions("socketpair") == [one]
    no_namespace = {"index": 0, "value": 0x7E020000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    assert conditions("clone") == [no_namespace]
