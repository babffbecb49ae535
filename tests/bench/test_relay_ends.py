"""The two processes of bench/hops.py: neither ends before the other has received everything."""

from __future__ import annotations

import os
from pathlib import Path

from bench import _relay_ends


def test_a_large_last_message_arrives_whatever_the_other_end_does_after_it(tmp_path: Path) -> None:
    payload = os.urandom(8 << 20)
    with _relay_ends.Servers(tmp_path, s3=False) as servers:
        for _ in range(5):
            assert len(servers.ping_pong("tcp", payload, 2).one_way_us) == 2
