"""A fleet: the environment of each GPU's pair of services, and the addresses of its control plane."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from fetchd.settings import FetchdSettings
from invoker.settings import InvokerSettings
from thaw.settings import load

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = DEPLOY / "systemd"


def environment(unit: str, instance: str) -> dict[str, str]:
    """The environment as systemd makes it: the files come after the unit's own variables and override them."""
    text = (UNITS / f"{unit}@.service").read_text().replace("%i", instance)
    words = [word for line in re.findall(r"^Environment=(.*)$", text, re.M) for word in line.split()]
    for name in re.findall(r"^EnvironmentFile=/etc/thaw/(.*)$", text, re.M):
        file = UNITS / name.replace(f"gpu-{instance}.env", "gpu-0.env")  # the operator's files are copies of it
        words += [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return dict(word.split("=", 1) for word in words)


def runtime_directory(unit: str, instance: str) -> str:
    text = (UNITS / f"{unit}@.service").read_text()
    (name,) = re.findall(r"^RuntimeDirectory=(.*)$", text, re.M)
    return f"/run/{name.replace('%i', instance)}"


def test_the_two_services_of_a_gpu_meet_in_its_directory() -> None:
    invoker = load(InvokerSettings, environment("thaw-invoker", "3"))
    fetchd = load(FetchdSettings, environment("thaw-fetchd", "3"))
    assert invoker.device == "cuda:3"
    assert invoker.host_id == fetchd.host_id
    assert invoker.fetchd_socket == fetchd.socket
    directory = runtime_directory("thaw-invoker", "3")
    assert directory == runtime_directory("thaw-fetchd", "3")
    assert invoker.run_dir == directory  # all other directories are read-only for the services
    assert {str(Path(p).parent) for p in (fetchd.socket, fetchd.descriptor_sockets)} == {directory}


def test_two_gpus_share_no_path_and_no_device() -> None:
    one, two = (environment("thaw-invoker", n) | environment("thaw-fetchd", n) for n in "01")
    own = {"THAW_DEVICE", "THAW_RUN_DIR", "THAW_FETCHD_SOCKET", "THAW_FETCHD_DOORS"}
    assert {name for name in one if one[name] != two[name]} == own
    named = {line.partition("=")[0] for line in (UNITS / "gpu-0.env").read_text().splitlines() if line[0] != "#"}
    assert named == {"THAW_HOST_ID", "THAW_INVOKER_BIND"}  # each GPU's own file must set these


def test_plans_name_the_relay_where_it_is_published() -> None:
    text = re.sub(r"\$\{(\w+)[^}]*\}", r"\1", (DEPLOY / "fleet/docker-compose.fleet.yml").read_text())
    services = yaml.safe_load(text)["services"]
    relay = urlsplit(services["scheduler"]["environment"]["THAW_RELAY_URL"])
    assert services["relay"]["ports"] == [f"THAW_CONTROL_ADDRESS:{relay.port}:6379"]
    assert relay.netloc.rpartition("@")[2] == f"THAW_CONTROL_ADDRESS:{relay.port}"
