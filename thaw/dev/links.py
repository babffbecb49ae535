"""Hosts with real links on one machine: each host has a network namespace whose link is shaped at both ends.

::

    this machine ──veth── hub namespace: bridge .1, state and relay servers, store
                             ├──veth, tbf both ends── host 0 namespace .10
                             └──veth, tbf both ends── host 1 namespace .11

Below each shaper is a queue with two ranks, if the kernel has such a queue: packets with DSCP CS1 (from fetchd's
sockets) are sent after all others.  The hub's servers answer with the mark of the SYN, so the bytes of a model carry
the mark as well.

Only root can make namespaces; :func:`available` says whether this process may make them, and if not, why.  Every name
begins with the platform's own prefix, so that ``thaw dev down`` finds the namespaces after a crash.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from thaw.errors import PlatformError

_BURST_FACTOR: Final = 2
"""tbf's burst in kbit per Mbit/s.  A smaller burst does not reach the rate with this kernel's timer, and a larger one
exceeds the rate.
"""

_QUEUE_S: Final = 0.05
_REFLECT: Final = "/proc/sys/net/ipv4/tcp_reflect_tos"
_CS1: Final = ("0x20", "0xfc")
_RANKS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "prio": (("qdisc", "replace", "parent", "1:1", "handle", "10:", "prio", "bands", "2", "priomap", *("0" * 16)),),
    "htb": (
        ("qdisc", "replace", "parent", "1:1", "handle", "10:", "htb", "default", "1"),
        ("class", "replace", "parent", "10:", "classid", "10:1", "htb", "rate", "100gbit", "prio", "0"),
        ("class", "replace", "parent", "10:", "classid", "10:2", "htb", "rate", "100gbit", "prio", "1"),
    ),
}
"""The two ranks under tbf (1:).  htb serves a class that never reaches its own rate strictly by its ``prio``."""

_NETNS: Final = Path("/run/netns")


@dataclass(frozen=True, slots=True)
class Links:
    """The namespaces of a platform."""

    prefix: str
    network: str  # "10.231.7": the first three numbers
    n_hosts: int
    rate_mbit: int
    ranks: str = ""  # the qdisc that sends inference before fetches; empty if this kernel has none

    @property
    def hub(self) -> str:
        return f"{self.prefix}-hub"

    @property
    def hub_address(self) -> str:
        return f"{self.network}.1"

    def host(self, index: int) -> str:
        return f"{self.prefix}-h{index}"

    def host_address(self, index: int) -> str:
        return f"{self.network}.{10 + index}"


def available() -> str:
    """An empty string if this process can make namespaces; otherwise the reason why it cannot."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)} (apt install iproute2 util-linux)" if missing else ""


def create(prefix: str, n_hosts: int, rate_mbit: int) -> Links:
    """Make the namespaces and shape their links.  On a PlatformError, the namespaces made so far are deleted again."""
    links = Links(prefix, f"10.231.{_free_network()}", n_hosts, rate_mbit)
    try:
        _create_hub(links)
        for index in range(n_hosts):
            links = replace(links, ranks=_create_host(links, index))
    except PlatformError:
        destroy(prefix)
        raise
    return links


def destroy(prefix: str) -> None:
    """Delete every namespace of ``prefix`` and thereby its devices.  The processes in them must have ended."""
    for name in names(prefix):
        _run("ip", "netns", "delete", name)
    # The veth's outer end disappears with the hub, but only after the kernel has released the namespace.
    subprocess.run(["ip", "link", "delete", _outer(prefix)], capture_output=True, check=False)


def names(prefix: str) -> list[str]:
    return sorted(p.name for p in _NETNS.glob(f"{prefix}-*")) if _NETNS.is_dir() else []


def inside(namespace: str, command: tuple[str, ...]) -> tuple[str, ...]:
    """The command line that runs ``command`` in ``namespace``.  nsenter becomes the command by exec, so signals and
    exit codes are those of the command.
    """
    return ("nsenter", f"--net={_NETNS / namespace}", *command)


def _create_hub(links: Links) -> None:
    outer = _outer(links.prefix)
    _run("ip", "netns", "add", links.hub)
    _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "outside", "netns", links.hub)
    _run("ip", "address", "add", f"{links.network}.254/24", "dev", outer)
    _run("ip", "link", "set", outer, "up")
    _in(links.hub, "ip", "link", "add", "bridge", "type", "bridge")
    _in(links.hub, "ip", "address", "add", f"{links.hub_address}/24", "dev", "bridge")
    _in(links.hub, "ip", "link", "set", "outside", "master", "bridge")
    for device in ("lo", "outside", "bridge"):
        _in(links.hub, "ip", "link", "set", device, "up")
    _in(links.hub, "sh", "-c", f"! test -e {_REFLECT} || echo 1 > {_REFLECT}")


def _create_host(links: Links, index: int) -> str:
    """Make a host's namespace and link; return the kind of qdisc that ranks its packets in both directions."""
    name, port = links.host(index), f"port{index}"
    _run("ip", "netns", "add", name)
    _in(links.hub, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
    _in(links.hub, "ip", "link", "set", port, "master", "bridge")
    _in(links.hub, "ip", "link", "set", port, "up")
    _in(name, "ip", "address", "add", f"{links.host_address(index)}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _in(name, "ip", "link", "set", device, "up")
    _shape(name, "eth0", links.rate_mbit)
    return _shape(links.hub, port, links.rate_mbit)


def _shape(namespace: str, device: str, rate_mbit: int) -> str:
    """Set the rate, then the ranks; return the qdisc that implements the ranks, or "" if this kernel has none."""
    burst_bytes = _BURST_FACTOR * rate_mbit * 1000
    _in(
        namespace,
        "tc",
        "qdisc",
        "replace",
        "dev",
        device,
        "root",
        "handle",
        "1:",
        "tbf",
        "rate",
        f"{rate_mbit}mbit",
        "burst",
        str(burst_bytes),
        "latency",
        f"{_QUEUE_S * 1000:.0f}ms",
    )
    limit = str(round(rate_mbit * 125_000 * _QUEUE_S) + burst_bytes)  # the same limit that tbf would use
    queues = tuple(("qdisc", "replace", "parent", f"10:{n}", "handle", f"2{n}:", "bfifo", "limit", limit) for n in "12")
    mark = (
        "filter",
        "replace",
        "parent",
        "10:",
        "protocol",
        "ip",
        "u32",
        "match",
        "ip",
        "dsfield",
        *_CS1,
        "flowid",
        "10:2",
    )
    for kind, commands in _RANKS.items():
        try:
            for what, how, *rest in (*commands, *queues, mark):
                _in(namespace, "tc", what, how, "dev", device, *rest)
        except PlatformError:
            continue  # this kernel does not have this qdisc
        return kind
    return ""


def _outer(prefix: str) -> str:
    return f"{prefix}-out"[-15:]  # the kernel's limit for a device name


def _free_network() -> int:
    used = subprocess.run(["ip", "-o", "-4", "address"], capture_output=True, text=True, check=True).stdout
    free = (n for n in range(1, 255) if f" 10.231.{n}." not in used)
    number = next(free, None)
    if number is None:
        raise PlatformError("no free 10.231.x.0/24 network", hint="thaw dev down the platforms you no longer use")
    return number


def _in(namespace: str, *command: str) -> None:
    _run(*inside(namespace, command))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PlatformError(
            f"{' '.join(command)}: {done.stderr.strip()}", hint="are namespaces allowed here? leave --link out"
        )
