"""Remove everything that a platform leaves behind, no matter which process died and how: processes, sockets, cgroups,
network namespaces and directories.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from thaw.dev import containers, links
from thaw.dev.components import host_name, weed_sockets
from thaw.dev.drivers import dev_driver
from thaw.dev.layout import Layout, Platform
from thaw.dev.leftovers import cgroups
from thaw.dev.processes import ProcessId, belonging_to, is_alive, send, wait_gone
from thaw.dev.restarts import read_pid_file

_ORDERLY_S = 15.0  # components whose supervisor has died are already ending
_SUPERVISOR_S = 60.0


def stop_supervisor(platform: Platform) -> bool:
    """Ask the supervisor to end everything, and wait.  Return False if no supervisor was running."""
    if not is_alive(platform.supervisor):
        return False
    send([platform.supervisor], signal.SIGTERM)
    for left in wait_gone([platform.supervisor], _SUPERVISOR_S):
        send([left], signal.SIGKILL)
        wait_gone([left], 5.0)
    return True


def sweep(layout: Layout, platform: Platform | None) -> int:
    """End every process of the platform and remove its files; return how many processes were still running."""
    seeds = _recorded(layout)
    left = belonging_to(layout.homes, seeds)
    send(left, signal.SIGTERM)
    still = wait_gone(left, _ORDERLY_S) | belonging_to(layout.homes, seeds)
    send(still, signal.SIGKILL)
    wait_gone(still, 5.0)
    _remove_cgroups(cgroups(layout, platform.hosts if platform is not None else 1))
    if platform is not None and (remove_left := dev_driver(platform.driver).remove_left) is not None:
        hosts = map(host_name, range(platform.hosts))
        remove_left([containers.owner(name, layout.run_dir / name) for name in hosts])
    for path in weed_sockets(platform) if platform is not None and not platform.store_dir else []:
        path.unlink(missing_ok=True)
    links.destroy(layout.namespace_prefix)
    shutil.rmtree(layout.run_dir, ignore_errors=True)
    shutil.rmtree(layout.pids, ignore_errors=True)
    layout.platform_file.unlink(missing_ok=True)
    return len(left)


def _recorded(layout: Layout) -> list[ProcessId]:
    recorded = map(read_pid_file, layout.pids.glob("*"))
    return [one.process for one in recorded if one is not None]


def _remove_cgroups(paths: list[Path]) -> None:
    """Remove the cgroups.  The kernel removes only empty ones, so no process is affected."""
    for path in paths:
        for group in sorted((p for p in path.glob("**/") if p.is_dir()), reverse=True):
            try:
                group.rmdir()
            except OSError:
                continue  # processes are still in this group
