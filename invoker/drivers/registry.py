"""The container drivers, by the name that THAW_DRIVER gives them."""

from __future__ import annotations

from typing import Final

from invoker.drivers.base import Driver, DriverContext, MakeDriver
from invoker.drivers.process.driver import ProcessDriver
from thaw import extensions
from thaw.extensions import Registry
from thaw.settings import SettingError

DRIVERS: Final = Registry[MakeDriver](
    extensions.DRIVERS,
    {
        "process": ProcessDriver.make,
        "docker": "invoker.drivers.docker.driver:DockerDriver.make",  # its SDK takes a third of a second to import
        "kubernetes": "invoker.drivers.kubernetes.driver:KubernetesDriver.make",  # its client takes half a second
    },
)


def make_driver(context: DriverContext) -> Driver:
    """Make the driver that the settings name.  Raises SettingError for a driver that does not exist, and the errors of
    MakeDriver.
    """
    name = context.settings.driver
    make = DRIVERS.find(name)
    if make is None:
        raise SettingError(f"THAW_DRIVER={name!r} is not a driver", hint=f"set it to one of: {DRIVERS.known()}")
    return make(context)
