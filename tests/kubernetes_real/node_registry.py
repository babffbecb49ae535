"""A registry of images inside a node of a cluster of ``scripts/kubernetes.sh``, which reaches it as its own 127.0.0.1."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.kubernetes_real.own_cluster import OwnCluster

ADDRESS: Final = "127.0.0.1:5000"
_PROGRAMS: Final = Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "thaw/kubernetes-bookworm/bin"


@contextmanager
def registry(cluster: OwnCluster, node: str, directory: Path) -> Iterator[None]:
    program = shutil.which("docker-registry")
    assert program is not None, "this test needs a registry: apt-get install -y docker-registry"
    config = directory / "registry.yml"
    config.write_text(
        f"version: 0.1\nlog: {{accesslog: {{disabled: true}}}}\nhttp: {{addr: '{ADDRESS}', secret: none}}\n"
        f"storage: {{filesystem: {{rootdirectory: {directory / 'data'}}}}}\n"
    )
    inside = ["nsenter", "-t", _pid(cluster, node), "-n"]
    with subprocess.Popen([*inside, program, "serve", str(config)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("listening on" in line for line in process.stderr)
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        try:
            yield
        finally:
            process.terminate()
            reader.join()


def push(cluster: OwnCluster, node: str, archive: Path, name: str) -> str:
    """Move the image ``name`` of an archive to the node's registry, and return its name there."""
    there = f"{ADDRESS}/{name}"
    cluster.run("load", str(archive))
    ctr = ["nsenter", "-t", _pid(cluster, node), "-m", "-n", "-p", "-u", str(_PROGRAMS / "ctr")]
    images = [*ctr, "-a", "/run/containerd/containerd.sock", "-n", "k8s.io", "images"]
    for words in (("tag", f"docker.io/{name}", there), ("push", "--plain-http", there), ("rm", there)):
        subprocess.run([*images, *words], check=True, stdout=subprocess.DEVNULL)
    return there


def archive(directory: Path, name: str, files: dict[str, bytes], entrypoint: list[str]) -> Path:
    """An image in Docker's format.  Its programs are executable, and everybody may write to its folder /open."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        opened = tarfile.TarInfo("open")
        opened.type, opened.mode = tarfile.DIRTYPE, 0o777
        tar.addfile(opened)
        for path, content in files.items():
            _add(tar, path, content)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": entrypoint},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [f"docker.io/{name}"], "Layers": ["layer.tar"]}]
    target = directory / "own.tar"
    with tarfile.open(target, "w") as tar:
        _add(tar, "config.json", json.dumps(config).encode())
        _add(tar, "manifest.json", json.dumps(manifest).encode())
        _add(tar, "layer.tar", layer.getvalue())
    return target


def _add(tar: tarfile.TarFile, path: str, content: bytes) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(content), 0o755
    tar.addfile(entry, io.BytesIO(content))


def _pid(cluster: OwnCluster, node: str) -> str:
    return (Path(cluster.home) / node / "pid").read_text().strip()
