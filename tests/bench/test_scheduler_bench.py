"""bench/scheduler.py on a small cluster: requests start groups, heartbeats come, and each kind of event is timed."""

from __future__ import annotations

from bench import scheduler


def test_a_small_cluster_lives_and_its_decisions_are_timed() -> None:
    cluster = scheduler.Cluster(n_hosts=12, n_functions=40, seed=1)
    cluster.measuring = True
    cluster.run(30.0, rate=1.0)
    assert len(cluster.took["start"].cpu) > 5
    assert len(cluster.took["heartbeats"].cpu) == 30
    assert set(cluster.n_groups_of) <= {1, 2, 3, 4}
    assert sum(cluster.n_groups_of.values()) >= len(cluster.took["start"].cpu)
    assert 0.0 < cluster.taken <= 1.0
    for host in cluster.view.hosts.values():
        for device in host.devices.values():
            assert device.reserved <= device.device.memory_bytes


def test_links_of_their_own_are_measured_beside_fetches_in_progress() -> None:
    cluster = scheduler.Cluster(n_hosts=40, n_functions=40, seed=1, own_links=True)
    links = {host.ledger.bytes_per_s for host in cluster.view.hosts.values()}
    assert len(links) == 40
    row = scheduler.measured(cluster, [("own_links", 4.0)], before_s=10.0, seconds=10.0)["own_links"]
    assert len(row.starts) == row.facts["start"]["n"] > 5
    assert row.facts["links_busy"] > 0
