"""Blocks of links hold exactly the present hosts, divided by speed, after any changes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gateway.scheduler.view.links import MOST_IN_BLOCK, Links
from thaw.ids import HostId

changes_st = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from([0.0, 1.0, 1.0, 2.0]) | st.floats(0.1, 9.0)), max_size=150
)
"""(host, the rate of its link from now on; 0: the host leaves)."""


@given(changes_st)
def test_blocks_hold_every_host_once_by_speed_and_in_order(changes: list[tuple[int, float]]) -> None:
    links, there = Links(), dict[HostId, float]()
    for number, speed in changes:
        host = HostId(f"h{number:02d}")
        if host in there:
            links.drop((number % 3, host), there.pop(host))
        if speed:
            links.put((number % 3, host), speed)
            there[host] = speed
    blocks = links.fastest_first
    assert bool(links) == bool(there)
    assert {host: speed for block in blocks for host, speed in block.speeds.items()} == there
    assert not there or links.fastest == blocks[0].fastest >= max(there.values())
    for block in blocks:
        assert block.keys == sorted(block.keys)
        assert {host for _, host in block.keys} == set(block.speeds)
        assert all(block.slowest <= speed <= block.fastest for speed in block.speeds.values())
        assert len(block.keys) <= MOST_IN_BLOCK or len(set(block.speeds.values())) == 1
    for faster, slower in itertools.pairwise(blocks):
        assert min(faster.speeds.values()) > max(slower.speeds.values())
        assert faster.fastest >= slower.fastest


def test_equal_links_are_one_block_however_many() -> None:
    links = Links()
    for i in range(500):
        links.put((0, HostId(f"h{i:03d}")), 1e9)
    links.put((0, HostId("fast")), 2e9)
    assert [len(block.keys) for block in links.fastest_first] == [1, 500]
