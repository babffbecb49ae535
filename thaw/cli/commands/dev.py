"""``thaw dev up|down|status|logs|doctor``: the platform on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thaw.cli.context import err, out, say_ok

if TYPE_CHECKING:
    from thaw.dev.layout import Platform
    from thaw.dev.status import Running

app = typer.Typer(no_args_is_help=True, help="Run a whole platform on this machine.")


@app.command()
def up(
    hosts: Annotated[int, typer.Option(help="Number of hosts, each with a fetchd and an invoker.")] = 1,
    link: Annotated[
        str,
        typer.Option(
            help="Rate of each host's link, for example 200mbit. Root shapes it; otherwise fetchd paces its reads."
        ),
    ] = "",
    driver: Annotated[str, typer.Option(help="What runs containers: process or docker.")] = "process",
    port: Annotated[int, typer.Option(help="Port of the API on loopback; 0 takes a free one.")] = 3233,
    store: Annotated[
        Path | None, typer.Option(help="Directory to use as model store, instead of S3 on loopback.")
    ] = None,
    memory_mb: Annotated[int | None, typer.Option(help="Device memory that each host declares, in MiB.")] = None,
    pool_mb: Annotated[int, typer.Option(help="Shared memory of each host for models, in MiB.")] = 1024,
    stem_cells: Annotated[
        str, typer.Option(help="With on, a process that has imported the engine is kept; off keeps none.")
    ] = "on",
    direct: Annotated[
        bool, typer.Option("--direct/--no-direct", help="Let the stages of a pipeline reach one another by TCP.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when the platform is ready.")] = False,
) -> None:
    """Start the platform.  In the foreground, Ctrl-C ends it."""
    from thaw.dev import up as starting
    from thaw.dev.layout import default_layout
    from thaw.dev.options import Options
    from thaw.errors import BadRequest

    if stem_cells not in ("on", "off"):
        raise BadRequest(
            f"--stem-cells {stem_cells} is neither on nor off", hint="use --stem-cells on or --stem-cells off"
        )
    options = Options(hosts, link, port, store, memory_mb, pool_mb, stem_cells == "on", driver, direct)
    layout = default_layout()
    screen = _Screen()
    if detach:
        with screen:
            platform = starting.detach(layout, options, screen.report)
        _welcome(platform, already=screen.n_started == 0)
        return
    with screen:
        already = starting.run(layout, options, screen.report, lambda p: screen.ready(p))
    if already is not None:
        _welcome(already, already=True)


class _Screen:
    """Prints which components start and how long each takes; after that, which ones crash and stop."""

    def __init__(self) -> None:
        self._console = out()
        self._status = self._console.status("starting") if self._console.is_terminal else None
        self._begun: dict[str, float] = {}
        self.n_started = 0

    def __enter__(self) -> _Screen:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def report(self, component: str, event: str) -> None:
        import time

        if event == "starting":
            self._begun[component] = time.monotonic()
        elif event == "ready":
            self.n_started += 1
            took = time.monotonic() - self._begun.pop(component, time.monotonic())
            self._console.print(f"  [green]ready[/green]    {component:<18} {took:5.1f} s")
        elif event == "stopped":
            self._console.print(f"  stopped  {component}")
        else:
            self._console.print(f"  [red]{event}[/red]  {component}; it is started again")
        if self._status is not None and self._begun:
            self._status.update("starting " + ", ".join(self._begun))

    def ready(self, platform: Platform) -> None:
        if self._status is not None:
            self._status.stop()
        _welcome(platform, already=False)
        self._console.print("Ctrl-C ends it.", style="dim")


def _welcome(platform: Platform, *, already: bool) -> None:
    from thaw.cli.platform_api.property_file import user_file
    from thaw.dev.drivers import dev_driver
    from thaw.dev.layout import default_layout

    if already:
        say_ok(f"the platform is up already, at {platform.apihost} (thaw dev down ends it)")
        return
    n = platform.hosts
    say_ok(f"the platform is up at {platform.apihost}: {n} host{'s' if n != 1 else ''}")
    if platform.link:
        out().print(f"links: {platform.link} for each host, {_kind_of_link(platform)}")
    if dev_driver(platform.driver).plain_processes:
        out().print("containers are plain processes (driver process): deploy only code that you trust")
    if user_file().exists():
        out().print(
            f"[yellow]note:[/yellow] {user_file()} exists, so thaw talks to the platform named there; this "
            f"one's key: export WSK_CONFIG_FILE={default_layout().wskprops}",
            soft_wrap=True,
        )
    out().print(
        "your key (thaw property get --auth) is an operator's; one for somebody else: thaw key create --namespace NAME "
        f"(yours is also in {default_layout().first_key})",
        soft_wrap=True,
    )
    out().print(
        "next: thaw model demo; thaw action create chat --config examples/chat/chat.json; thaw chat chat",
        soft_wrap=True,
    )


def _kind_of_link(platform: Platform) -> str:
    from thaw.dev.links import available

    if platform.network is not None:
        return "shaped: each host is a network namespace"
    return f"paced by its fetchd, not a shaped network ({available()})"


@app.command()
def down(
    purge: Annotated[bool, typer.Option(help="Also delete its functions, models and logs.")] = False,
) -> None:
    """End the platform and all its processes, even if its supervisor was killed."""
    import shutil

    from thaw.dev import sweep
    from thaw.dev.layout import default_layout

    layout = default_layout()
    platform = layout.read_platform()
    with err().status("stopping"):
        supervised = platform is not None and sweep.stop_supervisor(platform)
        left = sweep.sweep(layout, platform)
    if purge:
        shutil.rmtree(layout.root, ignore_errors=True)
    if platform is None and not left:
        say_ok("no platform was up" + ("; its state is deleted" if purge else ""))
        return
    orphans = f" ({left} processes had lost their supervisor)" if left and not supervised else ""
    say_ok(f"the platform is down{orphans}" + ("; its state is deleted" if purge else ""))


@app.command()
def status() -> None:
    """Show each component: its state, memory and restarts.  The exit code is 1 when the platform is not up."""
    from thaw.cli.output.tables import duration, show, size, table
    from thaw.dev.layout import default_layout
    from thaw.dev.status import components

    layout = default_layout()
    platform = layout.read_platform()
    if platform is None:
        out().print("no platform is up on this machine (thaw dev up)")
        raise typer.Exit(1)
    rows = table("component", "state", "pid", "up", "memory", "cpu", "restarts")
    found = components(layout, platform)
    for c in found:
        state = "[green]running[/green]" if c.running else "[red]not running[/red]"
        rows.add_row(
            c.name,
            state,
            str(c.pid),
            duration(c.up_s) if c.running else "",
            size(c.rss_bytes),
            duration(c.cpu_s) if c.running else "",
            _restarts(c),
        )
    show(rows)
    for c in found:
        if c.ends_again_and_again:
            out().print(
                f"[red]{c.name} ends again and again[/red]: {c.in_a_row} times in a row, the last time by "
                f"{c.cause} (thaw dev logs {c.name})",
                soft_wrap=True,
            )
    where = platform.store_dir or platform.s3_endpoint
    out().print(f"api {platform.apihost} · store {where} · logs {layout.logs}", soft_wrap=True)
    if not all(c.running for c in found):
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Show what this machine has for a platform.  The exit code is 1 where something is missing that it needs."""
    from thaw.dev.doctor import examine

    with err().status("looking"):
        findings = examine()
    for finding in findings:
        colour = "red" if finding.fatal else "yellow" if finding.problem else "green"
        out().print(f"[{colour}]●[/{colour}] {finding.line()}", soft_wrap=True)
    if any(finding.fatal for finding in findings):
        raise typer.Exit(1)


def _restarts(component: Running) -> str:
    return f"{component.n_restarts} ({component.cause})" if component.n_restarts else ""


@app.command()
def logs(
    component: Annotated[
        str | None, typer.Argument(help="A component, for example host-0/fetchd. Without it, all.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Also print new lines as they are written.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Number of lines at the end of each log.")] = 20,
) -> None:
    """Print the logs of the components."""
    from thaw.dev.layout import default_layout
    from thaw.dev.watch import follow as following
    from thaw.errors import NotFound

    layout = default_layout()
    paths = sorted(layout.logs.glob("*.log")) if component is None else [layout.log(component)]
    if not paths or not all(p.exists() for p in paths):
        known = ", ".join(p.stem for p in sorted(layout.logs.glob("*.log"))) or "none: thaw dev up"
        raise NotFound(f"{component or 'this machine'} has no log", hint=f"there are logs of: {known}")
    for path, line in following(paths, lines, forever=follow):
        print(line if component is not None else f"{path.stem}: {line}", flush=follow)
