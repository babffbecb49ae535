"""The output of many containers, read from the node's files."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from invoker.drivers import log_files
from invoker.drivers.base import Handle
from invoker.drivers.kubernetes.log_watch import LogWatch
from invoker.drivers.kubernetes.logs import PodLogs
from tests.kubernetes.cluster import WAIT_S, FakeCluster, Node, up
from thaw.action import KIND_PYTHON


@pytest.fixture
def watch() -> Iterator[LogWatch]:
    made = LogWatch()
    yield made
    made.close()


def place(tmp_path: Path, name: str = "one") -> tuple[Path, Handle]:
    """An empty file of the node, and a container whose output is copied from it."""
    directory, copies = tmp_path / f"{name}-node", tmp_path / f"{name}-copies"
    directory.mkdir()
    copies.mkdir()
    (directory / "0.log").touch()
    return directory / "0.log", Handle(name, KIND_PYTHON, copies)


def write(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(f"2026-01-01T00:00:00Z stdout F {text}\n")


def inotify_instances() -> int:
    names = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
    return sum(name.endswith("anon_inode:inotify") for name in names)


def test_many_containers_share_one_inotify_instance(tmp_path: Path, watch: LogWatch) -> None:
    before = inotify_instances()
    places = [place(tmp_path, f"c{i}") for i in range(5)]
    followers = [PodLogs(watch, *one) for one in places]
    assert inotify_instances() == before + 1
    for i, (path, handle) in enumerate(places):
        write(path, f"line {i}")
        assert followers[i].wait_grown((0, 0), WAIT_S)
        assert log_files.read(handle, "stdout", 0).data == f"line {i}\n".encode()
    for follower in followers:
        follower.close()


def test_an_end_that_is_reported_late_writes_into_no_file_of_others(tmp_path: Path, watch: LogWatch) -> None:
    follower = PodLogs(watch, *place(tmp_path))
    numbers = follower._ending, follower._changed
    follower.close()
    others = [os.memfd_create("another") for _ in range(4)]
    assert set(numbers) & set(others)
    follower.wait_ended(0.1)
    follower.close()
    assert [os.pread(fd, 100, 0) for fd in others] == [b""] * 4
    for fd in others:
        os.close(fd)


def test_the_last_line_before_a_rotation_is_kept(tmp_path: Path, watch: LogWatch) -> None:
    """It is written after the old file was read, and before the new one is found."""
    path, handle = place(tmp_path)
    rotated = threading.Event()

    class Rotating(PodLogs):
        def _renamed(self, out: FileIO, err: FileIO) -> bool:
            if not rotated.is_set():
                write(path, "last")
                path.rename(path.with_name("0.log.1"))
                write(path, "first")
                rotated.set()
            return super()._renamed(out, err)

    follower = Rotating(watch, path, handle)
    write(path, "begin")
    assert rotated.wait(WAIT_S)
    follower.wait_ended(WAIT_S)
    assert log_files.read(handle, "stdout", 0).data == b"begin\nlast\nfirst\n"
    follower.close()


@pytest.mark.usefixtures("simple")
def test_lines_are_told_apart_by_stream_and_survive_a_rotation(node: Node) -> None:
    handle = node.up()
    kubelet = node.kubelet
    assert node.driver.more_logs(handle, (0, 1 << 20), WAIT_S)  # the container's own line comes first
    kubelet.log("thaw-one", "stdout", "P", "a long ")
    kubelet.log("thaw-one", "stdout", "F", "line")
    kubelet.log("thaw-one", "stderr", "F", "an error")
    kubelet.rotate("thaw-one")
    kubelet.log("thaw-one", "stdout", "F", "after it")
    wanted = b"up\na long line\nafter it\n"
    assert node.driver.more_logs(handle, (len(wanted) - 1, 1 << 20), WAIT_S)
    assert node.driver.logs(handle, "stdout", 0).data == wanted
    assert node.driver.logs(handle, "stderr", 0).data == b"an error\n"


@pytest.mark.usefixtures("simple")
def test_a_node_whose_logs_cannot_be_read_still_runs_functions(cluster: FakeCluster, run_dir: Path) -> None:
    driver = cluster.driver(run_dir, pod_logs=Path("/nonexistent"))
    handle = up(driver)
    assert driver.logs(handle, "stdout", 0).data == b""
    driver.remove(handle)
    driver.close()
