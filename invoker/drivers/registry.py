"""The container driver that the settings name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from invoker.drivers.base import Driver
from invoker.drivers.cpu_shares import NoShares, Shares, find_shares
from invoker.drivers.process.driver import ProcessDriver
from invoker.settings import InvokerSettings
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.host import name_on_machine
from thaw.logs import Log
from thaw.settings import SettingError


def find_host_shares(settings: InvokerSettings) -> Shares:
    """What bounds processes' shares; a container engine does that itself."""
    if settings.driver != "process":
        return NoShares()
    return find_shares(name_on_machine(settings.host_id, settings.run_dir), enabled=settings.cpu_share == "on")


def make_driver(settings: InvokerSettings, run_dir: Path, shares: Shares, log: Log,
                cut_off: Callable[[], None]) -> Driver:  # fmt: skip
    """``cut_off`` is for an engine that only a new process can reach again.  Raises SettingError for a driver that does
    not exist, PlatformError when its engine cannot be used."""
    if settings.driver == "process":
        return ProcessDriver(run_dir, shares, settings.n_cores, log, zygote_parent=settings.zygote_parent)
    if settings.driver == "docker":
        return _docker(settings, run_dir, log, cut_off)
    raise SettingError(f"THAW_DRIVER={settings.driver!r} is not a driver", hint="set it to process or docker")


def _docker(settings: InvokerSettings, run_dir: Path, log: Log, cut_off: Callable[[], None]) -> Driver:
    # the SDK is imported by those who use it: it takes a third of a second
    from invoker.drivers.docker.client import Engine
    from invoker.drivers.docker.driver import DockerDriver, Images
    from invoker.drivers.docker.spec import Limits

    images = Images({KIND_PYTHON: settings.image_python, KIND_LLM: settings.image_llm}, settings.image_pull_s)
    limits = Limits(settings.n_cores, settings.pids, settings.tmp_mb, max(2048, 2 * settings.stem_cell_mb))
    return DockerDriver(Engine(settings.docker_host), run_dir, settings.host_id, images, limits, log, cut_off)
