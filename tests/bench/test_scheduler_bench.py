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
