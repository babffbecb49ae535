"""Two programs: one finds the versions of packages, the other puts their files into a folder.  Both are uv's.

uv is run with ``--no-build``, so only wheels are installed and no code of a package is run; it refuses a package that
depends on another one by URL.  It runs as a user of its own where the invoker can change users, within limits of CPU
time, memory and file size, and is killed when its folder grows beyond its bound or the deadline passes.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from uv import find_uv_bin

from invoker.packages.index import OFF, index_environment
from thaw.errors import BadRequest, PlatformError, Unavailable
from thaw.logs import Log
from thaw.requirements import bounded

LAYER_BYTES: Final = 2 << 30
"""The most bytes that one installation may have on the disk, the downloaded wheels included."""
MOST_FILES: Final = 100_000
UID: Final = 1_999_999_999
"""The programs' user, where the invoker may change users; just below the uids of containers."""
PYTHON: Final = "3.11"
"""The version in the name of the kind python:3.11, and of the images' Python."""
_LOOK_S: Final = 0.5
"""The pause between two checks of how much was written.  A file system without project quotas does not report that a
folder grows; one file is bounded by RLIMIT_FSIZE."""
_CPU_S: Final = 300
_MOST_SAID: Final = 1500
_PATIENCE_S: Final = 15
_CAP_CHOWN, _CAP_SETGID, _CAP_SETUID = 0, 6, 7
_NO_NETWORK: Final = re.compile(
    r"error sending request|Failed to fetch|Request failed|dns error|Connection refused|timed out|status code 5\d\d"
)
_FULL: Final = re.compile(r"No space left|os error 28\b|Disk quota exceeded")
_TOO_LARGE: Final = re.compile(r"File too large|os error 27\b")
_CREDENTIALS: Final = re.compile(r"://[^/\s@]{1,500}@")


@dataclass(frozen=True, slots=True)
class _End:
    status: int
    said: str


class Installer:
    def __init__(self, index: str, log: Log) -> None:
        """``index``: THAW_PACKAGE_INDEX."""
        self._index, self._log = index, log

    def resolve(self, asked: Sequence[str], work: Path, *, deadline_s: float) -> tuple[str, ...]:
        """Each package that is needed, with its version and its hashes.  ``work``: an empty folder.  Raises BadRequest,
        which names a package that does not exist, Unavailable, PlatformError."""
        given, found = work / "requirements.in", work / "requirements.txt"
        given.write_text("\n".join(asked) + "\n", encoding="utf-8")
        self._run(
            ("compile", str(given), "--output-file", str(found), "--generate-hashes", "--no-header", "--no-annotate"),
            work,
            deadline_s,
        )
        lines = found.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
        return bounded(tuple(" ".join(line.split()) for line in lines if line.strip()))

    def install(self, locked: Sequence[str], work: Path, *, deadline_s: float) -> Path:
        """The folder with the packages, which belongs to the invoker and holds plain files only.  Raises as resolve()
        does."""
        given, target = work / "requirements.txt", work / "layer"
        given.write_text("\n".join(locked) + "\n", encoding="utf-8")
        self._run(
            (
                "install",
                "--target",
                str(target),
                "--require-hashes",
                "--compile-bytecode",
                "-r",
                str(given),
            ),
            work,
            deadline_s,
        )
        _make_plain(target)
        return target

    # one program ---------------------------------------------------------------------------------------------------

    def _uid(self, work: Path) -> int:
        """The programs' user; 0: the invoker's own, because it cannot change users, or others cannot use its files."""
        if may_change_users() and all(map(others_can_reach, (_python(), find_uv_bin(), str(work.parent)))):
            return UID
        self._log.event("packages_without_own_user", uid=os.geteuid())
        return 0

    @cached_property
    def _environment(self) -> Mapping[str, str]:
        return index_environment(self._index)

    def _run(self, words: Sequence[str], work: Path, deadline_s: float) -> None:
        if self._index == OFF:
            raise BadRequest(
                "This host installs no packages: its operator has turned that off (THAW_PACKAGE_INDEX).",
                hint="bring them in the zip's folder virtualenv (docs/functions.md)",
            )
        uid = self._uid(work)
        if uid:
            os.chown(work, uid, uid)
        end = self._ended(self._command(uid, words), work, deadline_s)
        if end.status != 0:
            raise _why(end)

    def _command(self, uid: int, words: Sequence[str]) -> list[str]:
        confined = Path(__file__).with_name("confined.py")
        return [
            *(sys.executable, "-I", str(confined), str(uid), str(LAYER_BYTES), str(_CPU_S)),
            *(find_uv_bin(), "--no-config", "pip", words[0], "--no-build", "--quiet"),
            *("--python", _python(), "--python-version", PYTHON, *_platform()),
            *words[1:],
        ]

    def _ended(self, command: Sequence[str], work: Path, deadline_s: float) -> _End:
        ends_s = time.monotonic() + deadline_s
        said = work.parent / f"{work.name}.said"  # not the program's own: it is read by us
        environment = {
            "PATH": os.defpath,
            "HOME": str(work),
            "TMPDIR": str(work),
            "LANG": "C.UTF-8",
            "UV_CACHE_DIR": str(work / "cache"),
            "UV_NO_PROGRESS": "1",
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_KEYRING_PROVIDER": "disabled",
            "UV_HTTP_TIMEOUT": str(_PATIENCE_S),
            "UV_HTTP_RETRIES": "2",
            "NO_COLOR": "1",
            **self._environment,
        }
        try:
            with said.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    cwd=work,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                try:
                    status = _wait_within(process, work, ends_s)
                finally:
                    _kill(process)
            with said.open("rb") as text:
                return _End(status, text.read(64 * 1024).decode("utf-8", "replace"))
        except OSError as e:
            raise PlatformError(f"packages cannot be installed: {e.strerror}", hint="look at THAW_RUN_DIR") from e
        finally:
            said.unlink(missing_ok=True)


def _wait_within(process: subprocess.Popen[bytes], work: Path, ends_s: float) -> int:
    while True:
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            raise Unavailable("The packages of requirements.txt were not installed in time.", hint="try again")
        try:
            return process.wait(min(_LOOK_S, left_s))
        except subprocess.TimeoutExpired:
            n_bytes, n_files = usage(work)
            if n_bytes > LAYER_BYTES or n_files > MOST_FILES:
                raise _too_large() from None


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()


def _why(end: _End) -> BadRequest | PlatformError:
    said = _CREDENTIALS.sub("://", end.said)
    if _FULL.search(said):
        return Unavailable("The host's disk is full.", hint="free space below THAW_RUN_DIR")
    if _TOO_LARGE.search(said):
        return _too_large()
    if end.status == 2 and _NO_NETWORK.search(said):
        return Unavailable(
            "The package index does not answer.", hint="try again; operators: look at THAW_PACKAGE_INDEX"
        )
    if end.status not in (1, 2):
        return PlatformError(f"The program that installs packages ended with status {end.status}.", hint="try again")
    lines = (line.strip().removeprefix("error: ").removeprefix("cause: ") for line in said.splitlines())
    sentences = [line for line in lines if line and not line.startswith("No solution found")]
    text = " ".join(sentences)[:_MOST_SAID] or "the installer says no reason"
    return BadRequest(
        f"The packages of requirements.txt cannot be installed: {text}",
        hint="only wheels of the package index are installed, for Python 3.11 on Linux (docs/functions.md)",
    )


def _too_large() -> BadRequest:
    return BadRequest(
        f"The packages of requirements.txt are larger than {LAYER_BYTES >> 20} MiB, or more than {MOST_FILES} files.",
        hint="use an image with the packages (docs/functions.md)",
    )


def _platform() -> tuple[str, ...]:
    """Wheels that run in every image and on every host with glibc 2.28; a host with another C library takes its own."""
    if platform.libc_ver()[0] != "glibc" or platform.machine() not in ("x86_64", "aarch64"):
        return ()
    return ("--python-platform", f"{platform.machine()}-manylinux_2_28")


def usage(directory: Path) -> tuple[int, int]:
    """The bytes on the disk and the number of files below a directory that may be changing."""
    n_bytes = n_files = 0
    seen: set[int] = set()
    for parent, folders, files in os.walk(directory):
        for name in (*folders, *files):
            try:
                found = os.lstat(os.path.join(parent, name))
            except OSError:
                continue
            n_files += 1
            if found.st_ino not in seen:  # a file of uv's cache is linked into the layer
                seen.add(found.st_ino)
                n_bytes += found.st_blocks * 512
    return n_bytes, n_files


def _make_plain(target: Path) -> None:
    """Make the files the invoker's, which everybody may read.  Raises BadRequest for an entry that is neither a file
    nor a folder: a link would lead out of the layer."""
    target.mkdir(exist_ok=True)  # nothing was asked for that is not there already
    for parent, folders, files in os.walk(target):
        for path in (parent, *(os.path.join(parent, name) for name in (*folders, *files))):
            mode = os.lstat(path).st_mode
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                raise BadRequest(
                    "The packages of requirements.txt cannot be installed: one of them brings a link, "
                    f"{os.path.relpath(path, target)}."
                )
            if os.geteuid() == 0:
                os.chown(path, 0, 0)
            os.chmod(path, 0o755 if stat.S_ISDIR(mode) or mode & 0o100 else 0o644)
    (target / ".lock").unlink(missing_ok=True)


def may_change_users() -> bool:
    if os.geteuid() != 0:
        return False
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            held = int(value, 16)
            return all(held >> cap & 1 for cap in (_CAP_CHOWN, _CAP_SETGID, _CAP_SETUID))
    return False


def _python() -> str:
    """The Python that uv uses, which runs nothing of a package: ours, or one of the system that others can run, too."""
    system = f"/usr/bin/python{PYTHON}"
    return sys.executable if others_can_reach(sys.executable) or not os.path.exists(system) else system


def others_can_reach(path: str) -> bool:
    """Whether a user without any rights can run the program, or go into the folder, where it really is."""
    return all(
        one.stat().st_mode & stat.S_IXOTH
        for start in (Path(path).absolute(), Path(os.path.realpath(path)))
        for one in (start, *start.parents)
    )
