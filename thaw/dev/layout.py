"""Where the platform on one machine keeps its files.

The state directory (``THAW_STATE_DIR``, else ``thaw/dev`` below the XDG state directory) survives ``down``.  It holds
the deployed functions, the model store, the logs and the key.  The run directory holds sockets.  Its path is short (a
socket's path has room for 107 bytes), it lies in the machine's temporary directory, and it is deleted with the
platform.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import platformdirs

from thaw import wire
from thaw.dev.links import Links, inside
from thaw.dev.processes import ProcessId
from thaw.errors import PlatformError

_LONGEST_BASE = 25  # the longest socket below it is thaw-<10 digits>-<8>/host-15/doors/<32 digits>.sock: 81 bytes


@dataclass(frozen=True, slots=True)
class Platform:
    """A started platform.  ``platform.json`` describes it for the CLI and for ``down``; the file has mode 0600, because
    it holds secrets.
    """

    supervisor: ProcessId
    apihost: str
    state_url: str
    relay_url: str
    run_dir: str
    store_dir: str  # empty: the S3 store is used
    s3_endpoint: str
    s3_access_key: str
    s3_secret_key: str
    ports: tuple[int, ...]
    hosts: int
    link: str
    driver: str
    started_wall_ms: int
    network: Links | None = None  # namespaces with shaped links; None: everything runs on loopback

    @property
    def address(self) -> str:
        """The address on which the servers listen."""
        return "127.0.0.1" if self.network is None else self.network.hub_address

    def in_hub(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        """The command line that runs ``argv`` in the servers' network."""
        return argv if self.network is None else inside(self.network.hub, argv)

    def in_host(self, number: int, argv: tuple[str, ...]) -> tuple[str, ...]:
        """The command line that runs ``argv`` behind the link of host ``number``."""
        return argv if self.network is None else inside(self.network.host(number), argv)

    def host_address(self, number: int) -> str:
        return "127.0.0.1" if self.network is None else self.network.host_address(number)

    def model_uri(self, name: str) -> str:
        return f"file://{quote(self.store_dir)}/{name}" if self.store_dir else f"s3://models/{name}"

    def store_env(self) -> dict[str, str]:
        """The variables that make botocore and fetchd use this platform's store."""
        if self.store_dir:
            return {}
        return {
            "THAW_S3_ENDPOINT": self.s3_endpoint,
            "AWS_ACCESS_KEY_ID": self.s3_access_key,
            "AWS_SECRET_ACCESS_KEY": self.s3_secret_key,
            "AWS_REGION": "us-east-1",
        }


@dataclass(frozen=True, slots=True)
class Layout:
    root: Path

    @property
    def platform_file(self) -> Path:
        return self.root / "platform.json"

    @property
    def wskprops(self) -> Path:
        return self.root / "wskprops"

    @property
    def first_key(self) -> Path:
        """The operator's key that the platform was made with.  ``wskprops`` has the key that its user has chosen."""
        return self.root / "first-key"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def supervisor_log(self) -> Path:
        """A log with one line for each restart of a component, and with the messages of the supervisor itself."""
        return self.root / "supervisor.log"

    @property
    def pids(self) -> Path:
        return self.root / "pids"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def namespace_prefix(self) -> str:
        """The prefix of the network namespaces; like the run directory, it is the same for every run from this state
        directory.
        """
        return f"thaw{self._digest}"

    @property
    def run_dir(self) -> Path:
        """The path of the run directory, the same for every run from this state directory, so that ``down`` finds the
        remains of a crashed run.
        """
        base = Path(tempfile.gettempdir())
        if len(str(base)) > _LONGEST_BASE:
            base = Path("/tmp")  # noqa: S108  the directory is private by mode and owner, see make_run_dir
        return base / f"thaw-{os.getuid()}-{self._digest}"

    @property
    def _digest(self) -> str:
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:8]

    @property
    def homes(self) -> tuple[Path, Path]:
        """The working directories of the platform's processes: a process that works there belongs to the platform."""
        return self.run_dir, self.data

    def log(self, component: str) -> Path:
        return self.logs / (component.replace("/", "-") + ".log")

    def make(self) -> None:
        for directory in (self.root, self.logs, self.pids, self.data):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def make_run_dir(self) -> Path:
        """Make the run directory.  Other users may pass through it (a container's user must reach its own socket) but
        cannot list it.
        """
        run_dir = self.run_dir
        run_dir.mkdir(mode=0o711, exist_ok=True)
        found = run_dir.lstat()
        if found.st_uid != os.getuid() or run_dir.is_symlink():
            raise PlatformError(f"{run_dir} belongs to somebody else", hint="set TMPDIR to a directory of your own")
        run_dir.chmod(0o711)
        return run_dir

    def read_platform(self) -> Platform | None:
        try:
            data = self.platform_file.read_bytes()
        except FileNotFoundError:
            return None
        return wire.loads(Platform, data)

    def write_platform(self, platform: Platform) -> None:
        write_private(self.platform_file, wire.dumps(platform))

    @contextmanager
    def supervisor_lock(self) -> Iterator[bool]:
        """The supervisor holds this lock for its whole life; the kernel releases it however the supervisor dies.
        Yields False if another process holds it.
        """
        self.make()
        with (self.root / "lock").open("w") as f:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def default_layout() -> Layout:
    override = os.environ.get("THAW_STATE_DIR")
    return Layout(Path(override).absolute() if override else platformdirs.user_state_path("thaw") / "dev")


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read.  The file appears whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as f:
        f.write(data)
    temporary.replace(path)
