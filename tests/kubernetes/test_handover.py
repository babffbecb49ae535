"""One invoker of a node follows another: what waits and what is warm stays.  The invokers are processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from invoker.drivers.socket_wait import listens
from relay.protocol.messages import DemandAdded, InstanceChanged, SetStemCells
from tests.invoker.platform import HOST, opened, until
from tests.kubernetes.cluster import FakeCluster
from tests.kubernetes.invokers import Invoker, Invokers, directory_of
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.clock import wall_ms
from thaw.ids import ActionName, ActivationId, GatewayId, Namespace, random_hex_id
from thaw.instance import InstanceRecord, InstanceState

GATEWAY = GatewayId("g")
COUNTS = """
n = 0
def main(args):
    global n
    n += 1
    if 'waits_for' in args:
        open(args['waits_for']).read()
    return {'n': n}
"""


@pytest.fixture
def host(cluster: FakeCluster, valkey_url: str, run_dir: Path) -> Iterator[Invokers]:
    made = Invokers(cluster, valkey_url, run_dir)
    made.deploy(COUNTS)
    yield made
    made.close()


def warm(host: Invokers, n_runs: int = 1) -> InstanceRecord:
    record = host.ready()
    for n in range(1, n_runs + 1):
        assert host.call(record, {}) == {"n": n}
    return record


def one_cell(host: Invokers) -> str:
    """The stem cell that waits, when it answers and its invoker knows that it does."""

    def waits() -> bool:
        cells = list(host.pods("stem-cell"))
        known = any(report.stem_cells == 1 for report in host.registry.hosts())
        return len(cells) == 1 and known and listens(str(directory_of(host.run_dir, cells[0]) / "io" / "s"))

    until(waits)
    (name,) = host.pods("stem-cell")
    host.cluster.api.wait_pod(lambda p: p["metadata"]["name"] == name and p["status"].get("phase") == "Running")
    return name


def the_end(host: Invokers, invoker: Invoker) -> None:
    """A host that its operator drained is not handed over: nothing is left after an invoker without a successor."""
    host.registry.drain_host(HOST, drain=True)
    invoker.end()
    assert host.cluster.api.left() == set()
    assert list((host.run_dir / "c").iterdir()) == []
    assert host.registry.instances() == []


def is_noted(host: Invokers, pod: str) -> bool:
    """Whether it is written beside a container that it is ready.  That comes after everybody has heard it, so that no
    first token waits for a disk; an invoker that is killed in between leaves a container that nobody adopts.
    """
    labels = json.loads((directory_of(host.run_dir, pod) / "owner.json").read_bytes())["labels"]
    return '"ready"' in labels["record"]


def hands_over(host: Invokers, invoker: Invoker) -> None:
    """Ask the invoker to end, and wait until it says that it hands the host over."""
    invoker.ask_to_end()
    until(lambda: any(report.handing_over for report in host.registry.live_hosts()))


@pytest.fixture
def fifo(host: Invokers) -> Path:
    """A run that gets this path in ``waits_for`` goes on when the test has opened and closed it."""
    os.mkfifo(host.run_dir / "fifo")
    return host.run_dir / "fifo"


def test_the_next_invoker_has_what_was_warm_and_what_waited(host: Invokers) -> None:
    first = host.begin()
    record, cell = warm(host), one_cell(host)
    (pod,) = host.pods("instance")
    first.end()
    assert first.named("handed_over")[0] | {"instances": 1, "stem_cells": 1} == first.named("handed_over")[0]
    assert (host.pods("instance"), host.pods("stem-cell")) == ({pod}, {cell})
    assert host.registry.instance(record.instance_id) is not None, "the scheduler goes on counting it"
    second = host.begin()
    now = host.adopted(record)
    expected = (InstanceState.READY, record.instance_id, record.reserve_bytes)
    assert (now.state, now.instance_id, now.reserve_bytes) == expected
    assert host.call(now, {}) == {"n": 2}
    assert second.wait("stem_cell_adopted")["container_id"] == cell.removeprefix("thaw-")
    assert (host.pods("instance"), host.pods("stem-cell")) == ({pod}, {cell})
    used = host.ready()  # it takes the cell that the first invoker made
    assert host.call(used, {}) == {"n": 1}
    assert cell in host.pods("instance")
    the_end(host, second)


def test_as_many_stem_cells_wait_on_as_the_scheduler_wanted(host: Invokers) -> None:
    first = host.begin()
    host.send(SetStemCells(KIND_PYTHON, 3))
    until(lambda: any(report.stem_cells == 3 for report in host.registry.hosts()))
    cells = host.pods("stem-cell")
    first.end()
    second = host.begin()
    assert len(second.named("stem_cell_adopted")) == 3
    (report,) = host.registry.live_hosts()
    assert [(t.kind, t.count) for t in report.stem_targets] == [(KIND_PYTHON, 3), (KIND_LLM, 1)]
    assert host.pods("stem-cell") == cells
    the_end(host, second)


def test_a_host_that_is_handed_over_says_so_until_the_next_invokers_first_report(host: Invokers) -> None:
    first = host.begin()
    record = warm(host)
    first.end()
    (left,) = host.registry.live_hosts()
    assert (left.handing_over, left.draining, left.takes_starts) == (True, False, False)
    assert record.instance_id in left.instances
    second = host.begin()
    (taken,) = host.registry.live_hosts()
    assert taken.takes_starts
    assert record.instance_id in taken.instances
    assert {d.free_bytes for d in taken.devices} == {d.free_bytes for d in left.devices}, "its memory is held once"
    the_end(host, second)


def test_a_run_in_progress_may_finish_before_the_host_is_handed_over(host: Invokers, fifo: Path) -> None:
    first = host.begin()
    record = warm(host)
    run = host.calling(record, {"waits_for": str(fifo)})
    with opened(fifo):
        hands_over(host, first)
        assert "take this host over" in str(host.call(record, {}))
    assert json.loads(run.getresponse().read()) == {"n": 2}
    run.close()
    first.end()
    second = host.begin()
    assert host.call(host.adopted(record), {}) == {"n": 3}
    the_end(host, second)


def test_a_function_that_does_not_finish_is_ended_and_the_others_stay(host: Invokers, fifo: Path) -> None:
    first = host.begin(THAW_DRAIN_S="0.2")
    slow, quick = warm(host), warm(host)
    run = host.calling(slow, {"waits_for": str(fifo)})
    with opened(fifo):
        first.end()
    run.close()
    host.events.instance(slow.instance_id, InstanceState.GONE)
    second = host.begin()
    assert host.call(host.adopted(quick), {}) == {"n": 2}
    the_end(host, second)


def killed_before(host: Invokers, first: Invoker, fifo: Path) -> None:
    first.kill()


def killed_meanwhile(host: Invokers, first: Invoker, fifo: Path) -> None:
    """It waits for a run when it is killed."""
    busy = warm(host)
    one_cell(host)  # it took the one that waited
    run = host.calling(busy, {"waits_for": str(fifo)})
    with opened(fifo):
        hands_over(host, first)
        first.kill()
    run.close()


def killed_after(host: Invokers, first: Invoker, fifo: Path) -> None:
    first.end()


@pytest.mark.parametrize("killed", [killed_before, killed_meanwhile, killed_after])
def test_the_next_invoker_has_them_whenever_the_first_one_was_killed(
    host: Invokers, fifo: Path, killed: Callable[[Invokers, Invoker, Path], None]
) -> None:
    first = host.begin()
    record = warm(host)
    one_cell(host)
    (pod,) = host.pods("instance")
    until(lambda: is_noted(host, pod))
    killed(host, first, fifo)
    second = host.begin()
    assert host.call(host.adopted(record), {}) == {"n": 2}
    assert len(second.named("instance_adopted")) == 1, "a run that nobody waits for ends its container"
    assert len(second.named("stem_cell_adopted")) == 1
    until(lambda: len(host.registry.instances()) == 1)
    the_end(host, second)


def ends_while_no_invoker_is_there(host: Invokers, name: str) -> None:
    host.cluster.kubelet.kill(name)
    host.cluster.api.wait_until(lambda: host.cluster.api.pods()[name]["status"].get("phase") in ("Succeeded", "Failed"))


def is_of_another_contract(host: Invokers, name: str) -> None:
    """Change what is written beside a container, as another version would have written it."""
    path = directory_of(host.run_dir, name) / "owner.json"
    owner = json.loads(path.read_bytes())
    owner["labels"]["contract"] = "2"
    path.write_text(json.dumps(owner))


@pytest.mark.parametrize("change", [ends_while_no_invoker_is_there, is_of_another_contract])
def test_containers_that_cannot_be_adopted_are_reported_ended_and_replaced(
    host: Invokers, change: Callable[[Invokers, str], None]
) -> None:
    first = host.begin()
    record, cell = warm(host), one_cell(host)
    (pod,) = host.pods("instance")
    first.end()
    for name in (pod, cell):
        change(host, name)
    second = host.begin()
    host.events.instance(record.instance_id, InstanceState.GONE)
    assert one_cell(host) != cell
    assert second.named("instance_adopted") == second.named("stem_cell_adopted") == []
    assert not {pod, cell} & host.cluster.api.left()
    the_end(host, second)


def test_a_stem_cell_of_another_image_is_ended_and_an_instance_of_it_serves_on(host: Invokers) -> None:
    first = host.begin()
    record, cell = warm(host), one_cell(host)
    first.end()
    second = host.begin(THAW_IMAGE_PYTHON="thaw/python:newer")
    assert host.call(host.adopted(record), {}) == {"n": 2}
    assert one_cell(host) != cell
    the_end(host, second)


def test_nothing_is_handed_over_unless_it_is_wanted(host: Invokers) -> None:
    first = host.begin(THAW_HANDOVER_S="0")
    warm(host)
    one_cell(host)
    first.end()
    assert host.cluster.api.left() == set()
    assert host.registry.hosts() == []


# with a scheduler ----------------------------------------------------------------------------------------------------


@pytest.fixture
def scheduler(host: Invokers) -> Iterator[None]:
    settings = {"THAW_STATE_URL": host.url, "THAW_HOSTS_REFRESH_S": "0.2"}
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.scheduler.loop"], env={**os.environ, **settings}, stderr=subprocess.DEVNULL
    )
    yield
    process.kill()
    process.wait()


def waits(host: Invokers) -> DemandAdded:
    """A request that a gateway holds because it has no route."""
    host.registry.gateway_alive(GATEWAY)
    activation_id = ActivationId(random_hex_id())
    demand = DemandAdded(activation_id, ActionName("guest/hello"), Namespace("guest"), GATEWAY, wall_ms())
    host.registry.add_demand(demand)
    return demand


def reports_pass(host: Invokers, n_ms: int = 2_500) -> None:
    """The scheduler reads several reports of the host."""
    since_ms = wall_ms()
    until(lambda: any(r.seen_wall_ms - since_ms > n_ms for r in host.registry.live_hosts()))


def test_a_scheduler_starts_nothing_instead_of_what_is_handed_over(scheduler: None, host: Invokers, fifo: Path) -> None:
    first = host.begin()
    served = waits(host)
    record: InstanceRecord = host.events.wait(
        lambda e: isinstance(e, InstanceChanged) and e.instance.state is InstanceState.READY
    ).instance
    host.registry.drop_demand(served.activation_id, served.action, GATEWAY)
    assert host.call(record, {}) == {"n": 1}
    (pod,), cell = host.pods("instance"), one_cell(host)
    run = host.calling(record, {"waits_for": str(fifo)})
    with opened(fifo):
        hands_over(host, first)
        waiting = waits(host)
        reports_pass(host)
    assert json.loads(run.getresponse().read()) == {"n": 2}
    run.close()
    first.end()
    second = host.begin()
    now = host.adopted(record)
    host.registry.drop_demand(waiting.activation_id, waiting.action, GATEWAY)  # its gateway has a route again
    reports_pass(host)
    assert host.call(now, {}) == {"n": 3}
    assert (host.pods("instance"), host.pods("stem-cell")) == ({pod}, {cell})
    assert [r.instance_id for r in host.registry.instances()] == [record.instance_id]
    the_end(host, second)
