"""The facts that ``thaw dev`` must know about a container driver to run it on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from thaw import extensions
from thaw.dev import containers
from thaw.errors import BadRequest


@dataclass(frozen=True, slots=True)
class DevDriver:
    """The defaults hold for a driver that a package has added.

    ``plain_processes``: the driver's containers are processes with the files, addresses and rights of this user.
    ``passed_on``: further variables of this environment that the driver's invokers get.
    ``remove_left``: removes the containers that killed invokers left; it gets the names of the owners.
    """

    plain_processes: bool = False
    passed_on: tuple[str, ...] = ()
    remove_left: Callable[[Sequence[str]], None] | None = None


_DRIVERS: Final[Mapping[str, DevDriver]] = {
    "process": DevDriver(plain_processes=True),
    "docker": DevDriver(
        passed_on=(
            "DOCKER_HOST",
            "DOCKER_CONFIG",
            "THAW_IMAGE_PYTHON",
            "THAW_IMAGE_LLM",
            "THAW_IMAGE_PULL_S",
            "THAW_IMAGES_MB",
        ),
        remove_left=containers.remove,
    ),
}


def dev_driver(name: str) -> DevDriver:
    return _DRIVERS.get(name, DevDriver())


def check_driver(name: str) -> None:
    """Raises BadRequest for a driver that neither Thaw nor an installed package has."""
    if name not in _DRIVERS and name not in (added := extensions.installed(extensions.DRIVERS)):
        known = ", ".join([*_DRIVERS, *added])
        raise BadRequest(f"--driver {name} is not in this version", hint=f"use --driver with one of: {known}")
