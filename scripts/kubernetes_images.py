"""Make Thaw's images from this checkout, without an engine, for a cluster that reaches no registry.

    scripts/kubernetes_images.py FILE.tar        load it: ctr -n k8s.io images import FILE.tar

All of them share one file system: this machine's Python (base_image.py), the packages of the components' locks, the
code, and the programs of Valkey and SeaweedFS from their wheels.  The engine's image has a second layer with the
packages of .venv.  The archive has Docker's format.  It holds the images that deploy/kubernetes names, and thaw/pause,
the container that keeps a pod's network in a cluster of scripts/kubernetes.sh.  Never ship these images.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from dataclasses import dataclass
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
_ENGINE = [_PATH, "PYTHONPATH=/app-of-functions:/packages-of-engine", "PYTHONUNBUFFERED=1", "HF_HUB_OFFLINE=1"]


@dataclass(frozen=True, slots=True)
class Image:
    command: list[str]
    environment: list[str]
    entrypoint: list[str] | None = None
    has_engine: bool = False


IMAGES = {
    "thaw/gateway:0.1.0": Image(
        ["python", "-m", "gateway.main"], [*_COMMON, "THAW_GATEWAY_BIND=0.0.0.0:3233", "THAW_DRIVER=docker"]
    ),
    "thaw/invoker:0.1.0": Image(["python", "-m", "invoker.main"], [*_COMMON, *_RUN, "THAW_INVOKER_BIND=0.0.0.0:7000"]),
    "thaw/fetchd:0.1.0": Image(["python", "-m", "fetchd.main"], [*_COMMON, *_RUN]),
    "thaw/python:0.1.0": Image(["python", "-m", "thaw_runtime.action.proxy"], [_PATH, "PYTHONPATH=/app-of-functions"]),
    "thaw/vllm-cpu:0.1.0": Image(["python", "-m", "thaw_runtime.llm.main"], _ENGINE, has_engine=True),
    "thaw/pause:0.1.0": Image(["/bin/busybox", "tail", "-f", "/dev/null"], [_PATH]),
    stand_ins.VALKEY: Image(["valkey-server"], [_PATH]),
    stand_ins.SEAWEEDFS: Image([], [_PATH], entrypoint=["weed"]),
}


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit("usage: scripts/kubernetes_images.py FILE.tar")
    subprocess.run(["make", "-s", "-C", str(ROOT / "csrc"), "all"], check=True)
    with tempfile.TemporaryDirectory(prefix="thaw-images-", dir="/var/tmp") as directory:
        root = Path(directory) / "root"
        root.mkdir()
        fill(root)
        layer, engine = Path(directory) / "layer.tar", Path(directory) / "engine.tar"
        subprocess.run(["tar", "-C", root, "--owner=0", "--group=0", "--sort=name", "-cf", layer, "."], check=True)
        packages = sysconfig.get_paths()["purelib"]
        renamed = "--transform=s,^[.],packages-of-engine,"
        subprocess.run(["tar", "-C", packages, "--owner=0", "--group=0", renamed, "-cf", engine, "."], check=True)
        archive(layer, Path(sys.argv[1]), engine)
    return 0


def fill(root: Path) -> None:
    base_image.fill(root)
    (root / "root").chmod(0o700)
    (root / "data").mkdir()
    for name in CODE:
        _copy(ROOT / name, root / "app" / name)
    for name in ("thaw", "relay", "runtime-python/thaw_runtime"):
        _copy(ROOT / name, root / "app-of-functions" / Path(name).name)
    shutil.copy(ROOT / "build/native/plain/libthaw_params.so", root / "app-of-functions/thaw_runtime")
    locks = [word for name in LOCKS for word in ("-r", str(ROOT / f"deps/{name}.lock"))]
    packages = ["--target", str(root / "packages-of-thaw"), "--no-deps"]
    subprocess.run([Path(sys.executable).with_name("uv"), "pip", "install", "-q", *packages, *locks], check=True)
    stand_ins.put_valkey(root / "usr/local/bin")
    stand_ins.put_seaweedfs(root / "usr/local/bin")


def archive(layer: Path, target: Path, engine: Path) -> None:
    digests = {path: _digest(path) for path in (layer, engine)}
    listed = []
    with tarfile.open(target, "w") as tar:
        for name, image in IMAGES.items():
            layers = [layer, engine] if image.has_engine else [layer]
            config = f"{hashlib.sha256(name.encode()).hexdigest()}.json"
            _add(tar, config, _config(image, [digests[path] for path in layers]))
            listed.append(
                {"Config": config, "RepoTags": [f"docker.io/{name}"], "Layers": [path.name for path in layers]}
            )
        _add(tar, "manifest.json", listed)
        for path in digests:
            tar.add(path, path.name)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _config(image: Image, digests: list[str]) -> object:
    return {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {
            "Entrypoint": image.entrypoint,
            "Cmd": image.command,
            "Env": image.environment,
            "WorkingDir": "/tmp",  # noqa: S108  the container's own
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        "history": [{"created_by": "scripts/kubernetes_images.py"} for _ in digests],
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
