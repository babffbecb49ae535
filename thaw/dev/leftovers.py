"""Find everything that a platform has left on the machine: the last check of the demo and of the tests.

Models lie in memory files without a name (docs/decisions), so they disappear with the processes that held them.
"""

from __future__ import annotations

from pathlib import Path

from thaw.dev.components import host_name, weed_sockets
from thaw.dev.layout import Layout, Platform
from thaw.dev.ports import is_free
from thaw.dev.processes import belonging_to
from thaw.host import name_on_machine

_CGROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))  # version 1, version 2
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  this path is only read, never written


def find(layout: Layout, platform: Platform | None) -> list[str]:
    """One sentence for each thing that is left; the list should be empty."""
    found = [f"process {p.pid}: {_command(p.pid)}" for p in sorted(belonging_to(layout.homes), key=lambda p: p.pid)]
    found += [f"shared memory {path}" for path in _SHARED_MEMORY.glob(f"*{layout.run_dir.name}*")]
    found += [f"control group {path}" for path in cgroups(layout, platform.hosts if platform is not None else 1)]
    if layout.run_dir.exists():
        found.append(f"the run directory {layout.run_dir}")
    if platform is not None:
        own = [*platform.ports, int(platform.apihost.rsplit(":", 1)[1])]
        found += [f"port {port} is still bound" for port in own if not is_free(port)]
        found += [f"socket {path}" for path in weed_sockets(platform) if not platform.store_dir and path.exists()]
    return found


def cgroups(layout: Layout, n_hosts: int) -> list[Path]:
    """The cgroups in which the invokers of the platform's hosts limited their containers."""
    names = [host_name(number) for number in range(n_hosts)]
    groups = [f"thaw-{name_on_machine(name, str(layout.run_dir / name))}" for name in names]
    return [root / group for root in _CGROUPS for group in groups if (root / group).is_dir()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except (FileNotFoundError, ProcessLookupError):
        return "(ended by now)"
