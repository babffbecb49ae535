"""The directory of the small files: its place, and its remains when its process is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.thaw_runtime.conftest import ROOT
from tests.thaw_runtime.fake_descriptor_socket import FakeDescriptorSocket
from tests.thaw_runtime.models import read_segment, write_tiny_model
from thaw.errors import ModelCorrupt
from thaw_runtime.weights.sidecars import materialised

ENGINE = """
import os, sys, tempfile
from tests.thaw_runtime.fake_descriptor_socket import FakeDescriptorSocket
from relay.clients.fetch import DescriptorClient
from thaw_runtime.engine import main as engine_main
from thaw_runtime.weights.sidecars import materialised
tempfile.gettempdir()  # as a zygote may have done before it forked
os.environ["TMPDIR"] = sys.argv[2]
engine_main.use_own_tmp()
client = DescriptorClient.connect(sys.argv[1])
with materialised(client.segment(deadline_s=10)) as directory:
    print(directory, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_engine_leaves_lies_in_its_containers_directory(
    descriptor_socket: FakeDescriptorSocket, tmp_path: Path
) -> None:
    own = tmp_path / "container"
    own.mkdir()
    descriptor_socket.arrive(descriptor_socket.n_bytes)
    env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'runtime-python'}")
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, descriptor_socket.path, own],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        text=True,
        cwd=ROOT,
    ) as engine:
        assert engine.stdout is not None
        directory = Path(engine.stdout.readline().strip())
        engine.kill()
    assert directory.parent == own, "the invoker removes this one and no other"
    assert (directory / "config.json").exists(), "nobody else removes it"


def test_the_directory_is_gone_when_the_block_ends(descriptor_socket: FakeDescriptorSocket) -> None:
    descriptor_socket.arrive(descriptor_socket.n_bytes)
    client, segment = read_segment(descriptor_socket)
    with materialised(segment) as directory:
        assert {p.name for p in directory.iterdir()} == {"config.json", "tokenizer.json", "tokenizer_config.json"}
        assert directory.stat().st_mode & 0o077 == 0, "a private one"
    assert not directory.exists()
    segment.close()
    client.close()


def test_a_file_outside_the_checkpoint_is_refused(tmp_path: Path) -> None:
    descriptor_socket = FakeDescriptorSocket(write_tiny_model(tmp_path / "model"), tmp_path / "socket")
    client, segment = read_segment(descriptor_socket)
    for placed in segment.offer.layout:
        object.__setattr__(placed, "file", "../" + placed.file)
    with pytest.raises(ModelCorrupt, match="outside itself"), materialised(segment):
        raise AssertionError("written")
    segment.close()
    client.close()
    descriptor_socket.close()
