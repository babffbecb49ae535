"""``thaw dev up``: the whole platform, in the foreground or (``--detach``) as a process of its own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from thaw import wire
from thaw.clock import wall_ms
from thaw.dev import components, links, ports, sweep
from thaw.dev.layout import Layout, Platform, write_private
from thaw.dev.options import Options, parse_rate
from thaw.dev.processes import ProcessId, identify
from thaw.dev.supervisor import Report, Supervisor
from thaw.errors import ErrorInfo, PlatformError, ThawError, from_info

_N_PORTS = 6  # state server, relay server, and four for the store


def run(layout: Layout, options: Options, report: Report, on_ready: Callable[[Platform], None]) -> Platform | None:
    """Start everything and run until a signal.  If a platform is already running, return it instead."""
    with layout.supervisor_lock() as free:
        if not free:
            return wait_platform(layout)
        sweep.sweep(layout, layout.read_platform())  # removes the remains of a run whose supervisor was killed
        _rotate_logs(layout)
        platform = _prepare(layout, options)
        try:
            with Supervisor(layout, report) as supervisor:
                try:
                    _start(supervisor, layout, platform, options)
                    on_ready(platform)
                    supervisor.run()
                except KeyboardInterrupt:
                    pass  # the platform was asked to stop while it started
        finally:
            sweep.sweep(layout, platform)
    return None


def detach(layout: Layout, options: Options, report: Report) -> Platform:
    """Start a supervisor as its own process and wait until it is ready.  Raises the error that it reports."""
    with layout.supervisor_lock() as free:
        already = None if free else wait_platform(layout)
    if already is not None:
        return already
    argv = [sys.executable, "-m", "thaw.dev.up", str(layout.root), json.dumps(wire.to_plain(_plain(options)))]
    with layout.supervisor_log.open("ab") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True, cwd=layout.root
        )
    assert process.stdout is not None  # noqa: S101  asked for above
    with process.stdout as lines:
        for line in lines:
            message = json.loads(line)
            if "error" in message:
                process.wait()
                raise from_info(wire.from_plain(ErrorInfo, message["error"]))
            if "ready" in message:
                process.returncode = 0  # the supervisor keeps running without us
                return wire.from_plain(Platform, message["ready"])
            report(message["component"], message["event"])
    raise PlatformError("the supervisor ended without a word", hint=f"its log: {layout.supervisor_log}")


def wait_platform(layout: Layout) -> Platform:
    """The running platform, from its file, which is written early in a start.  Raises PlatformError without a file."""
    platform = layout.read_platform()
    if platform is None:
        raise PlatformError("a platform is starting or stopping here", hint="try again in a moment")
    return platform


def _plain(options: Options) -> dict[str, object]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name in options.__slots__
        for value in [getattr(options, name)]
    }


def _prepare(layout: Layout, options: Options) -> Platform:
    port = options.port or ports.free_ports(1)[0]
    if not ports.is_free(port):
        raise PlatformError(f"port {port} is taken", hint="choose another: --port N, or --port 0 for any free one")
    run_dir = layout.make_run_dir()
    chosen = tuple(p for p in ports.free_ports(_N_PORTS + 1) if p != port)[:_N_PORTS]
    if options.store is not None:
        options.store.mkdir(parents=True, exist_ok=True)
    me = identify(os.getpid()) or ProcessId(os.getpid(), 0)
    secret = _secret(layout)
    network = _network(layout, options)
    address = "127.0.0.1" if network is None else network.hub_address
    platform = Platform(
        supervisor=me,
        apihost=f"http://127.0.0.1:{port}",
        state_url=f"redis://:{secret}@{address}:{chosen[0]}/0",
        relay_url=f"redis://:{secret}@{address}:{chosen[1]}/0",
        run_dir=str(run_dir),
        store_dir=str(options.store.absolute()) if options.store else "",
        s3_endpoint=f"http://{address}:{chosen[2]}",
        s3_access_key="thaw",
        s3_secret_key=secret,
        ports=chosen,
        hosts=options.hosts,
        link=options.link,
        driver=options.driver,
        started_wall_ms=wall_ms(),
        network=network,
    )
    layout.write_platform(platform)
    return platform


def _network(layout: Layout, options: Options) -> links.Links | None:
    """Make shaped namespaces if this process may; otherwise (None) fetchd limits itself to the link's rate."""
    rate = parse_rate(options.link)
    if rate is None or links.available():
        return None
    return links.create(layout.namespace_prefix, options.hosts, max(1, round(rate * 8 / 1e6)))


def _secret(layout: Layout) -> str:
    """The password of all servers on loopback.  It is generated once, because the store's files are bound to it."""
    path = layout.root / "secret"
    if not path.exists():
        write_private(path, secrets.token_hex(24).encode())
    return path.read_text()


def _start(supervisor: Supervisor, layout: Layout, platform: Platform, options: Options) -> None:
    servers = components.servers(layout, platform, _secret(layout))
    control = components.control_plane(platform, _first_key(layout, platform.apihost))
    hosts = [c for n in range(options.hosts) for c in components.host(platform, options, n)]
    fetchds = [c for c in hosts if c.name.endswith("/fetchd")]
    redis_servers = [c for c in servers if c.name != "store"]
    supervisor.start(servers)
    supervisor.wait_ready(redis_servers)
    common = components.stem_cells(platform, options)
    supervisor.start([*control, *common, *fetchds])  # these need no store to start, and the store starts slowest
    supervisor.wait_ready(fetchds)
    supervisor.start([c for c in hosts if c not in fetchds])
    supervisor.wait_ready([*servers, *control, *common, *hosts])
    if not platform.store_dir:
        from thaw.cli.model_stores.s3 import make_bucket

        make_bucket(platform.store_env(), "models")


def _first_key(layout: Layout, apihost: str) -> str:
    """The operator's key of the namespace ``guest``, generated once and kept in a file of its own: the wskprops file,
    from which the commands take a key, may get another one (``thaw property set --auth``)."""
    from thaw.cli.platform_api.property_file import read_properties

    chosen = read_properties(layout.wskprops).get("AUTH")
    if layout.first_key.exists():
        first = layout.first_key.read_text()
    else:  # an earlier version kept it in wskprops only
        first = chosen or f"{uuid.uuid4()}:{secrets.token_urlsafe(48)}"
        write_private(layout.first_key, first.encode())
    write_private(layout.wskprops, f"APIHOST={apihost}\nAUTH={chosen or first}\nNAMESPACE=_\n".encode())
    return first


def _rotate_logs(layout: Layout) -> None:
    for path in layout.logs.glob("*.log"):
        path.replace(path.with_suffix(".log.old"))


def _say(message: dict[str, object]) -> None:
    try:
        print(json.dumps(message), flush=True)
    except BrokenPipeError:
        pass  # the process that requested the start has ended; the platform keeps running


def _detached_main(root: str, plain: str) -> int:
    layout = Layout(Path(root))
    fields = json.loads(plain)
    options = Options(**{**fields, "store": Path(fields["store"]) if fields["store"] else None})
    started = time.monotonic()

    def ready(platform: Platform) -> None:
        _say({"ready": wire.to_plain(platform), "seconds": time.monotonic() - started})
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)  # closes the pipe, so the starting process stops reading

    def report(component: str, event: str) -> None:
        _say({"component": component, "event": event})

    try:
        already = run(layout, options, report, ready)
    except ThawError as e:
        _say({"error": wire.to_plain(e.info())})
        return 1
    if already is not None:
        ready(already)
    return 0


if __name__ == "__main__":
    sys.exit(_detached_main(sys.argv[1], sys.argv[2]))
