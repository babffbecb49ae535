"""A small image with this machine's Python, for engines that reach no registry: python:3.11.14-slim-bookworm in tests.

    scripts/base_image.py [TAG]     builds the image unless the engine has TAG already

A statically linked busybox is its shell.  Python, its modules and the libraries that they need are copied from this
machine, and ``docker import`` makes an image of them.  Never ship this image: it contains this machine's certificates
and pip settings, so that the product's own Dockerfiles can use it unchanged.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

TAG = "python:3.11.14-slim-bookworm"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
LEFT_OUT = (
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "lib2to3",
    "site-packages",
    "config-*",
    "_tkinter*",
)
BY_NAME = (
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libnss_files.so.2",
    "libnss_dns.so.2",
    "libresolv.so.2",
    "libgomp.so.1",
    "librt.so.1",
    "libpthread.so.0",
    "libdl.so.2",
    "libutil.so.1",
    "libanl.so.1",
    "libnuma.so.1",
)
"""Libraries that ldd does not show: those of name resolution, and those that wheels with C, C++ or Rust code need."""


PROGRAMS = ("lscpu",)


def main() -> int:
    tag = sys.argv[1] if len(sys.argv) > 1 else TAG
    if subprocess.run(["docker", "image", "inspect", tag], capture_output=True).returncode != 0:
        build(tag)
    return 0


def build(tag: str) -> None:
    with tempfile.TemporaryDirectory(prefix="thaw-base-", dir="/var/tmp") as directory:
        root = Path(directory)
        fill(root)
        _settings(root)
        tar = subprocess.Popen(["tar", "-C", directory, "--owner=0", "--group=0", "-c", "."], stdout=subprocess.PIPE)
        assert tar.stdout is not None  # noqa: S101  asked for above
        change = [
            "-c",
            "LABEL thaw.stand-in=",
            "-c",
            "ENV PATH=/usr/local/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE= LANG=C.UTF-8",
        ]
        for name in ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"):
            change += ["-c", f"ENV {name}=/etc/ssl/certs/ca-certificates.crt"]
        result = subprocess.run(["docker", "import", *change, "-", tag], stdin=tar.stdout, stdout=subprocess.DEVNULL)
        tar.stdout.close()  # otherwise tar would wait for a reader when the engine is not there
        if tar.wait() or result.returncode:
            sys.exit(f"base_image: {tag} could not be made; is the engine up? (docker version)")


def fill(root: Path) -> None:
    """Put the image's file system into an empty directory, without this machine's settings."""
    _skeleton(root)
    _busybox(root)
    _python(root)
    _programs(root)


def _skeleton(root: Path) -> None:
    for path in (
        "bin",
        "etc/ssl/certs",
        "usr/bin",
        "usr/local/bin",
        "usr/local/lib",
        LIBRARIES,
        "root",
        "var/tmp",
        "proc",
        "sys",
        "dev",
        "run",
        "home",
    ):
        (root / path).mkdir(parents=True)
    for path in ("tmp", "var/tmp"):
        (root / path).mkdir(exist_ok=True)
        (root / path).chmod(0o1777)
    (root / "lib").symlink_to("usr/lib")
    (root / "lib64").symlink_to(LIBRARIES)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (root / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")


def _busybox(root: Path) -> None:
    program = shutil.which("busybox")
    if program is None:
        sys.exit("base_image: busybox is missing: apt-get install -y busybox-static")
    shutil.copy2(program, root / "bin/busybox")
    applets = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in applets:
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")


def _python(root: Path) -> None:
    prefix, version = Path(sys.base_prefix), f"{sys.version_info.major}.{sys.version_info.minor}"
    library = f"lib/python{version}"
    ignore = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(prefix / library, root / "usr/local" / library, ignore=ignore, symlinks=True)
    binary = (prefix / f"bin/python{version}").resolve()
    shutil.copy2(binary, root / f"usr/local/bin/python{version}")
    for name in ("python3", "python"):
        (root / "usr/local/bin" / name).symlink_to(f"python{version}")
    import pip  # from the environment of this script; the images' dependency layers are made with it

    packages = root / "usr/local" / library / "site-packages"
    packages.mkdir()
    shutil.copytree(Path(pip.__file__).parent, packages / "pip")
    # the libraries are copied to the place that the loader searches first, independent of the Python's own prefix
    copied = [binary, *(root / "usr/local" / library).glob("lib-dynload/*.so")]
    _copy_libraries(root, copied)


def _copy_libraries(root: Path, programs: Iterable[Path]) -> None:
    needed = set()
    for program in programs:
        listing = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        needed |= {Path(found) for found in re.findall(r"(/\S+) \(0x", listing)}
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    for name in BY_NAME:
        found = re.search(rf"{re.escape(name)} \(libc6,x86-64\S*.*=> (\S+)", cache)
        if found:
            needed.add(Path(found[1]))
    for path in needed:
        target = root / LIBRARIES / path.name
        if not target.exists():
            shutil.copy2(path.resolve(), target)


def _programs(root: Path) -> None:
    """Copy the programs that the real image has and vLLM needs: lscpu, which lists the CPUs."""
    for name in PROGRAMS:
        found = Path(shutil.which(name) or sys.exit(f"base_image: {name} is missing"))
        (root / "bin" / name).unlink(missing_ok=True)  # busybox may have a program of this name
        shutil.copy2(found.resolve(), root / "bin" / name)
        _copy_libraries(root, [found])


def _settings(root: Path) -> None:
    """Write the settings with which pip and uv in the image reach the index that this machine uses."""
    certificates = Path(os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt"))
    if certificates.exists():
        shutil.copy2(certificates, root / "etc/ssl/certs/ca-certificates.crt")
    index = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    ).stdout.strip() or os.environ.get("PIP_INDEX_URL", "")
    if index:
        (root / "etc/pip.conf").write_text(f"[global]\nindex-url = {index}\n")


if __name__ == "__main__":
    sys.exit(main())
