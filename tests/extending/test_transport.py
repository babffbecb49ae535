"""The transport of docs/extending.md keeps the promises of every transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.test_transport import (  # noqa: F401  pytest collects them
    another_group,
    test_a_group_whose_receivers_are_dead_stays_within_its_quota_and_another_group_goes_on,
    test_a_message_arrives_whole_with_what_its_header_says,
    test_a_sender_a_window_ahead_waits_and_goes_on_when_the_receiver_reads,
    test_a_transport_says_what_carries_the_next_message,
    test_both_directions_at_once,
    test_close_wakes_a_thread_that_receives,
    test_eight_stages_hand_a_message_round,
    test_inference_goes_past_a_bulk_message_that_is_half_sent,
    test_inference_overtakes_kv_and_kv_overtakes_bulk,
    test_order_holds_within_a_priority_and_empty_messages_count,
    test_several_senders_are_told_apart,
    test_the_sender_may_use_its_buffer_again_at_once,
)
from tests.conformance.transports import Group, group_in_store


@pytest.fixture
def group(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setenv("MEMORY_TRANSPORT_DIRECTORY", str(tmp_path / "groups"))
    with group_in_store("memory", "redis://relay:6379/0") as made:
        yield made
