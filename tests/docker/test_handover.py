"""An invoker that leaves its containers to the next one, with a real engine."""

from __future__ import annotations

from pathlib import Path

from tests.docker.engine import DockerEngine
from tests.invoker.platform import HOST, Host
from thaw.instance import InstanceState

COUNTS = "n = 0\ndef main(args):\n    global n\n    n += 1\n    return {'n': n}\n"


def host_of(engine: DockerEngine, url: str, run_dir: Path) -> Host:
    image = engine.build("python")
    settings = {"driver": "docker", "docker_host": engine.url, "image_python": image, "image_pull_s": 0.0}
    return Host(url, run_dir, handover_s=60.0, **settings)


def test_a_functions_container_serves_the_next_invoker(
    docker_engine: DockerEngine, valkey_url: str, run_dir: Path
) -> None:
    first = host_of(docker_engine, valkey_url, run_dir)
    first.deploy(COUNTS)
    first.start()
    record = first.ready()
    assert first.run(record.instance_id, {}) == (200, {"n": 1})
    first.stop()
    second = host_of(docker_engine, valkey_url, run_dir)
    second.start()
    second.events.instance(record.instance_id, InstanceState.READY)
    assert second.run(record.instance_id, {}) == (200, {"n": 2})
    second.registry.drain_host(HOST, drain=True)
    second.stop()
    assert docker_engine.containers(f"thaw-{second.agent.driver.owner}") == []  # type: ignore[attr-defined]
