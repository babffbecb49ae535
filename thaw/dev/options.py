"""The options of ``thaw dev up``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from thaw.dev.drivers import check_driver
from thaw.errors import BadRequest

DEFAULT_PORT = 3233
_MIB = 1024 * 1024
_RATE_UNITS = {"kbit": 125, "mbit": 125_000, "gbit": 125_000_000}


@dataclass(frozen=True, slots=True)
class Options:
    hosts: int = 1
    link: str = ""  # the rate as the user wrote it, e.g. 200mbit; empty: unlimited
    port: int = DEFAULT_PORT  # 0: any free port
    store: Path | None = None
    memory_mb: int | None = None  # declared device memory of a host
    pool_mb: int = 1024  # fetchd's segment pool of a host
    stem_cells: bool = True
    driver: str = "process"
    direct: bool = False  # True: stages may connect to one another by TCP; False: they use only the relay server

    def __post_init__(self) -> None:
        check_driver(self.driver)
        if not 1 <= self.hosts <= 16:
            raise BadRequest(f"--hosts {self.hosts} is not between 1 and 16", hint="give a number from 1 to 16")
        parse_rate(self.link)

    @property
    def host_memory_mb(self) -> int:
        """``memory_mb`` if it is given, else an equal share of half of the machine's memory, at most 8 GiB per host."""
        if self.memory_mb is not None:
            return self.memory_mb
        machine_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MIB
        return min(8192, machine_mb // 2 // self.hosts)

    @property
    def threads(self) -> int:
        """The number of cores of a host, which is also the number of the engine's threads."""
        return max(1, len(os.sched_getaffinity(0)) // self.hosts)


def parse_rate(text: str) -> int | None:
    """``200mbit`` → bytes per second; None for no limit.  Raises BadRequest."""
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    if match is None or float(match[1]) <= 0:
        raise BadRequest(f"--link {text!r} is not a rate", hint="write it like 200mbit, 1gbit or 500kbit")
    return int(float(match[1]) * _RATE_UNITS[match[2]])
