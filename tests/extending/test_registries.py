"""The rules that hold for all four registries."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from fetchd.settings import FetchdSettings
from fetchd.sources.registry import SOURCES, open_source
from gateway.scheduler.policy.transports import transport_of
from gateway.scheduler.settings import SchedulerSettings
from invoker.drivers.base import DriverContext
from invoker.drivers.registry import DRIVERS, make_driver
from invoker.settings import InvokerSettings
from relay.protocol.messages import GroupCredential, GroupLink
from relay.transports.connect import connect
from relay.transports.registry import TRANSPORTS
from tests.extending.packages import ROOT, Package, on_page
from tests.scheduler.world import chat
from thaw import wire
from thaw.config import parse_llm_config
from thaw.dev.options import Options
from thaw.errors import BadRequest, ConfigError, ModelNotFound, PlatformError
from thaw.extensions import Registry
from thaw.ids import GroupId
from thaw.logs import Log
from thaw.plan import PlanTransport, TransportKind
from thaw.settings import SettingError
from thaw_runtime.engine.registry import ENGINES, find_engine

REGISTRIES: dict[str, Registry[Any]] = {
    "thaw.sources": SOURCES,
    "thaw.drivers": DRIVERS,
    "thaw.engines": ENGINES,
    "thaw.transports": TRANSPORTS,
}
CONFIG = {"kind": "llm:vllm", "model": {"uri": "s3://models/m"}}


@pytest.mark.parametrize("group", REGISTRIES)
def test_every_part_of_thaw_is_where_its_table_says(group: str) -> None:
    for name in REGISTRIES[group].known().split(", "):
        assert REGISTRIES[group].find(name) is not None


def test_every_transport_of_a_plan_is_in_the_registry() -> None:
    assert TRANSPORTS.known() == ", ".join(sorted(set(TransportKind) - {TransportKind.NONE}))


@pytest.mark.parametrize("title", on_page())
def test_the_page_installs_one_short_part_of_each_kind(title: str, installed: Path) -> None:
    package = on_page()[title]
    assert package.n_lines <= 34  # an engine has eleven methods
    ((group, points),) = package.entry_points.items()
    (name,) = points
    assert REGISTRIES[group].find(name) is not None
    assert name in REGISTRIES[group].known().split(", ")


def test_the_page_shows_a_part_for_every_registry() -> None:
    assert {group for package in on_page().values() for group in package.entry_points} == set(REGISTRIES)


def install_source(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with a source that cannot be imported."""
    Package("", {"thaw.sources": {name: "no_such_module:open"}}).install(tmp_path)
    (tmp_path / "no_such_module.py").unlink()
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_part_that_cannot_be_imported_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_source("broken", tmp_path, monkeypatch)
    with pytest.raises(PlatformError, match="'broken' of thaw.sources is at 'no_such_module:open'"):
        open_source("broken://x/y", FetchdSettings("s", "d"))


def test_thaws_own_part_is_never_replaced_by_an_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = SOURCES.find("file")
    install_source("file", tmp_path, monkeypatch)
    assert SOURCES.find("file") is own


def test_an_unknown_driver_is_refused_with_those_that_there_are(installed: Path, tmp_path: Path) -> None:
    settings = InvokerSettings("redis://x", "h", str(tmp_path), "f", driver="podman")
    with pytest.raises(SettingError, match="THAW_DRIVER='podman' is not a driver") as caught:
        make_driver(DriverContext(settings, tmp_path, Log("test")))
    assert caught.value.hint == "set it to one of: confined, docker, kubernetes, process"
    with pytest.raises(BadRequest, match="--driver podman") as refused:
        Options(driver="podman")
    assert refused.value.hint == "use --driver with one of: process, docker, confined"
    assert Options(driver="confined").driver == "confined"


def test_an_unknown_source_is_refused_with_those_that_there_are(installed: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model store of this host serves 'ftp://x/y'") as caught:
        open_source("ftp://x/y", FetchdSettings("s", "d"))
    assert caught.value.hint == "a uri begins with one of these schemes: file, hf, http, https, s3, zip"


def test_an_unknown_engine_is_refused_with_those_that_there_are(installed: Path) -> None:
    with pytest.raises(SettingError, match="THAW_LLM_ENGINE='nonsense' is not an engine") as caught:
        find_engine("nonsense")
    assert caught.value.hint == "set it to one of: echo, vllm"


def test_an_unknown_transport_is_refused_with_those_that_there_are(installed: Path) -> None:
    link = GroupLink("pigeon", "redis://relay:1/0", GroupCredential("", ""))
    with pytest.raises(PlatformError, match="transport 'pigeon', which this container does not have") as caught:
        connect(link, GroupId("0" * 32), 0, 2)
    assert caught.value.hint == "known transports: memory, object, redis, tcp"


def test_a_functions_config_may_name_what_is_installed_and_nothing_else(installed: Path) -> None:
    config = parse_llm_config(CONFIG | {"transport": "memory", "model": {"uri": "zip:///models/m.zip"}})
    assert (config.transport, config.model.uri) == ("memory", "zip:///models/m.zip")
    for change in ({"transport": "pigeon"}, {"model": {"uri": "ftp://x"}}):
        with pytest.raises(ConfigError):
            parse_llm_config(CONFIG | change)


@pytest.mark.parametrize("change", [{"transport": "memory"}, {"model": {"uri": "zip:///models/m.zip"}}])
def test_a_functions_config_cannot_name_what_is_not_installed(change: dict[str, Any]) -> None:
    assert importlib.util.find_spec("thaw_memory") is None
    with pytest.raises(ConfigError):
        parse_llm_config(CONFIG | change)


def test_a_plan_carries_the_name_of_an_installed_transport_and_the_relays_address() -> None:
    settings = SchedulerSettings("redis://state/0", relay_url="redis://user:secret@relay:6379/0")
    planned = transport_of(settings, chat(transport="memory"), GroupId("0" * 32))
    assert (planned.kind, planned.address) == ("memory", "redis://relay:6379/0")
    assert wire.loads(PlanTransport, wire.dumps(planned)) == planned


def test_no_other_code_asks_which_part_it_has() -> None:
    """Only the gateway asks, because it must not listen on a public address if functions are plain processes."""
    asks = re.compile(
        r"""(==|!=|\bis|\bnot) ("(process|docker|vllm)"|TransportKind\.(REDIS|TCP|OBJECT))|scheme == "(file|s3)\""""
    )
    assert [name for name, code in sources() if asks.search(code)] == ["gateway/main.py"]


def test_the_registry_alone_names_the_folder_of_an_engine() -> None:
    runtime = "runtime-python/thaw_runtime/engine"
    named = [name for name, code in sources() if re.search(r"engine\.vllm\b", code)]
    assert [name for name in named if not name.startswith(f"{runtime}/vllm/")] == [f"{runtime}/registry.py"]


@functools.cache
def sources() -> list[tuple[str, str]]:
    folders = ("fetchd", "gateway", "invoker", "relay", "runtime-python", "thaw")
    files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [(str(path.relative_to(ROOT)), path.read_text()) for path in files]
