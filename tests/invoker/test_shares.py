"""CPU quotas, with the machine's own cgroups where these can be written, and with a directory that looks like v2."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from invoker.drivers.cpu_shares import CgroupShares, NoShares, find_shares
from invoker.drivers.ownership import OwnedContainers
from invoker.drivers.process.driver import ProcessDriver, find_host_shares
from invoker.settings import InvokerSettings
from thaw.action import KIND_PYTHON
from thaw.logs import Log


def test_a_machine_without_cgroups_reports_none(tmp_path: Path) -> None:
    assert find_shares("h", base=tmp_path).name == "none"
    assert isinstance(find_shares("h", enabled=False), NoShares)


@pytest.fixture
def v2(tmp_path: Path) -> CgroupShares:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io")
    shares = find_shares("h", base=tmp_path)
    assert isinstance(shares, CgroupShares)
    return shares


def test_v2_writes_cpu_max(tmp_path: Path, v2: CgroupShares) -> None:
    assert (tmp_path / "thaw-h" / "cgroup.subtree_control").read_text() == "+cpu"
    v2.apply("c", 1, 0.5)
    assert (v2.path("c") / "cpu.max").read_text() == "50000 100000"
    assert (v2.path("c") / "cgroup.procs").read_text() == "1"


def test_a_quota_is_enforced_and_removed() -> None:
    shares = find_shares("test-shares")
    if not isinstance(shares, CgroupShares):
        pytest.skip("this machine's cgroups cannot be written")
    spin = (
        "import time\ninput()\nt = time.monotonic()\nwhile time.monotonic() < t + 1.0: pass\nprint(time.process_time())"
    )
    process = subprocess.Popen([sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    shares.apply("c", process.pid, 0.2)
    out, _ = process.communicate(b"\n", timeout=30)
    assert float(out) < 0.5  # 0.2 of a second, plus the time before the quota was set
    shares.close()
    assert not shares.path("c").exists()


def test_a_driver_removes_the_groups_of_containers_that_its_host_does_not_own_any_more(
    tmp_path: Path, v2: CgroupShares
) -> None:
    owned = OwnedContainers(tmp_path / "run")
    owned.write(owned.handle("kept", KIND_PYTHON), {})
    for name in ("kept", "old"):
        v2.path(name).mkdir()
    driver = ProcessDriver(tmp_path / "run", v2, 2, Log("test"))
    assert (v2.path("kept").exists(), v2.path("old").exists()) == (True, False)
    driver.close()
    assert not v2.path("kept").exists()


def test_shares_may_be_closed_when_another_process_has_removed_the_hosts_groups(
    tmp_path: Path, v2: CgroupShares
) -> None:
    shutil.rmtree(tmp_path / "thaw-h")
    v2.sweep(frozenset())
    v2.close()


def test_a_process_that_has_ended_is_no_error() -> None:
    shares = find_shares("test-shares-2")
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    shares.apply("c", process.pid, 0.2)
    shares.remove("c")
    if isinstance(shares, CgroupShares):
        shares.close()


def test_two_platforms_on_one_machine_share_no_group(tmp_path: Path) -> None:
    """A platform that goes down removes its groups, while the other's containers are made in groups of their own."""
    settings = [InvokerSettings("redis://x", "host-0", str(tmp_path / name), "fetchd.s") for name in "ab"]
    first, second = map(find_host_shares, settings)
    if not isinstance(first, CgroupShares) or not isinstance(second, CgroupShares):
        pytest.skip("no quotas here")
    first.close()
    child = subprocess.Popen(["sleep", "60"])
    try:
        second.apply("c", child.pid, 0.5)
        assert second.path("c").exists()
    finally:
        child.kill()
        child.wait()
        second.close()
