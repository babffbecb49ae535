"""The assembly of chunks to messages, with chunks that are repeated, early, or of a false size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.protocol.frames import FrameHeader, FrameKind, decode_header
from relay.transports.assembly import Assembly
from relay.transports.base import Flow, Message, split
from thaw.errors import ProtocolError

HIDDEN = FrameHeader(FrameKind.HIDDEN_STATES, stream_id=4, step=9)


def frames_of(seq: int, payload: bytes, chunk_bytes: int = 10) -> list[tuple[FrameHeader, bytes]]:
    flow = Flow(chunk_bytes=chunk_bytes)
    return [(decode_header(head), bytes(part)) for _, head, part in split(HIDDEN, bytes(16), seq, payload, flow)]


def give(assembly: Assembly, header: FrameHeader, payload: bytes) -> list[Message]:
    assembly.place(header)[:] = payload
    place = assembly.place(header)
    place[:] = payload
    return list(assembly.take(header, place))


def test_every_chunk_is_received_into_its_message() -> None:
    assembly = Assembly(3)
    got = [give(assembly, *frame) for frame in frames_of(0, b"0123456789abcdefghijXYZ")]
    assert [len(g) for g in got] == [0, 0, 1]
    message = got[2][0]
    assert bytes(message.payload) == b"0123456789abcdefghijXYZ"
    assert (message.sender, message.seq, message.step, message.stream_id) == (3, 0, 9, 4)
    assert assembly.position == (1, 0)


def test_a_messages_memory_is_used_again_when_nobody_looks_at_it_any_more() -> None:
    assembly = Assembly(0)

    def message(seq: int) -> Message:
        return next(m for frame in frames_of(seq, bytes([seq]) * 20) for m in give(assembly, *frame))

    kept = message(0).payload[:3]
    seen = message(1).payload.obj
    assert bytes(kept) == bytes(3)
    assert message(2).payload.obj is seen
    assert bytes(kept) == bytes(3)


def test_a_repeated_chunk_goes_to_waste() -> None:
    assembly = Assembly(0)
    frames = frames_of(0, b"0123456789abc")
    for frame in (frames[0], frames[0], frames[0]):
        assert give(assembly, *frame) == []
    (message,) = give(assembly, *frames[1])
    assert bytes(message.payload) == b"0123456789abc"
    assert give(assembly, *frames[1]) == []


def test_a_gap_is_refused_unless_there_is_another_way() -> None:
    first, second = frames_of(0, b"a")[0], frames_of(1, b"b")[0]
    with pytest.raises(ProtocolError, match=r"message 1 chunk 0 came, expected \(0, 0\)"):
        Assembly(0).place(second[0])
    assembly = Assembly(0, hold_bytes=1)
    assert give(assembly, *second) == []
    assert [bytes(m.payload) for m in give(assembly, *first)] == [b"a", b"b"]
    with pytest.raises(ProtocolError, match="message 9 chunk 0"):
        assembly.place(second[0]._replace(seq=9, n_bytes=2))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"n_chunks": 0xFFFFFFFF}, {}, "a message of more than 1000 bytes"),
        ({"n_chunks": 102}, {}, "a message of more than 1000 bytes"),
        ({"n_bytes": 0}, {}, "begins with an empty one"),
        ({}, {"n_bytes": 11}, "chunk 1 has 11 bytes, the first has 10"),
        ({}, {"n_bytes": 9}, "chunk 1 has 9 bytes, the first has 10"),
        ({}, {"n_chunks": 4}, "chunk 1 belongs to another message"),
    ],
)
def test_a_chunk_that_lies_about_its_message_is_refused(
    first: dict[str, int], second: dict[str, int], message: str
) -> None:
    assembly = Assembly(0, max_message_bytes=1000)
    frames = frames_of(0, bytes(25))
    with pytest.raises(ProtocolError, match=message):
        for change, (header, payload) in zip((first, second), frames, strict=False):
            changed = header._replace(**change)  # type: ignore[arg-type]
            give(assembly, changed, payload[: changed.n_bytes])


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=6), st.randoms())
def test_frames_of_two_ways_make_the_same_messages_in_any_order(payloads: list[bytes], random: object) -> None:
    frames = [frame for seq, payload in enumerate(payloads) for frame in frames_of(seq, payload)]
    shuffled = frames * 2  # every frame came on both paths
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assembly = Assembly(0, hold_bytes=10_000)
    got = [message for frame in shuffled for message in give(assembly, *frame)]
    assert [bytes(m.payload) for m in got] == payloads


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=6), st.data())
def test_frames_of_two_ways_make_the_same_messages_also_while_each_way_is_receiving_one(
    payloads: list[bytes], data: st.DataObject
) -> None:
    """Between ``place`` and ``take`` of one path, the other path delivers earlier frames, or the same frame."""
    frames = [frame for seq, payload in enumerate(payloads) for frame in frames_of(seq, payload)]
    ways: tuple[list[tuple[FrameHeader, bytes]], ...] = ([], [])
    for frame in frames:
        taken = data.draw(st.sampled_from([(0,), (1,), (0, 1)]))
        for way in taken:
            ways[way].append(frame)
    assembly, got = Assembly(0, hold_bytes=10_000), list[Message]()
    begun: list[memoryview | None] = [None, None]
    while any(ways):
        way = data.draw(st.sampled_from([k for k in (0, 1) if ways[k]]))
        header, payload = ways[way][0]
        place = begun[way]
        if place is None:
            begun[way] = assembly.place(header)
        else:
            place[:] = payload
            got += assembly.take(header, place)
            begun[way] = None
            del ways[way][0]
    assert [bytes(m.payload) for m in got] == payloads
    assert not assembly.is_ahead
    assembly.place(frames_of(len(payloads) + 1, bytes(10_000), 10_000)[0][0])  # nothing is counted as held any more


@pytest.mark.parametrize("chunk", [0, 1])
def test_a_chunk_that_is_no_longer_ahead_when_it_has_come_is_put_into_its_message(chunk: int) -> None:
    """The relay server's path catches up while a chunk of the short cut is on its way."""
    assembly = Assembly(0, hold_bytes=100)
    frames = [*frames_of(0, b"before"), *frames_of(1, b"0123456789abcdefghij")]
    early, earlier = frames[1 + chunk], frames[: 1 + chunk]
    place = assembly.place(early[0])
    got = [m for frame in earlier for m in give(assembly, *frame)]
    place[:] = early[1]
    got += assembly.take(early[0], place)
    for frame in frames[2 + chunk :]:
        got += give(assembly, *frame)
    assert [bytes(m.payload) for m in got] == [b"before", b"0123456789abcdefghij"]


def test_a_message_of_one_chunk_takes_a_short_cut_when_it_is_its_turn() -> None:
    assembly = Assembly(3, hold_bytes=100)
    ((header, payload),) = frames_of(0, b"12345")
    message = assembly.whole(header, payload)
    assert message is not None
    assert (message.sender, message.kind, message.stream_id, message.seq, message.step) == (
        3,
        FrameKind.HIDDEN_STATES,
        4,
        0,
        9,
    )
    assert (message.priority, message.flags, bytes(message.payload)) == (HIDDEN.priority, HIDDEN.flags, b"12345")
    assert assembly.position == (1, 0)
    assert assembly.whole(header, payload) is None, "it came before"
    assert assembly.whole(*frames_of(2, b"x")[0]) is None, "it is ahead of its turn"
    assert assembly.whole(*frames_of(1, b"0123456789abc")[0]) is None, "it is the first of two chunks"
    assert give(assembly, *frames_of(2, b"ahead")[0]) == []
    assert assembly.whole(*frames_of(1, b"x")[0]) is None, "one that waits has to come behind it"


def test_chunks_that_waited_for_earlier_ones_make_room_for_others_that_wait() -> None:
    assembly = Assembly(0, hold_bytes=10)
    for seq in range(0, 10, 2):
        assert not assembly.is_ahead
        assert give(assembly, *frames_of(seq + 1, b"0123456789")[0]) == []
        assert assembly.is_ahead
        with pytest.raises(ProtocolError, match=f"message {seq + 2} chunk 0 came, expected"):
            assembly.place(frames_of(seq + 2, b"x")[0][0])
        assert [m.seq for m in give(assembly, *frames_of(seq, b"first")[0])] == [seq, seq + 1]


@pytest.mark.parametrize(("n_bytes", "chunk_bytes"), [(10, 10), (7, 10), (10, 3), (1, 1)])
def test_a_message_of_just_the_limit_is_taken_and_one_chunk_more_is_not(n_bytes: int, chunk_bytes: int) -> None:
    first = frames_of(0, bytes(n_bytes), chunk_bytes)[0]
    Assembly(0, max_message_bytes=n_bytes).place(first[0])
    n_chunks = first[0].n_chunks
    with pytest.raises(ProtocolError, match=f"a message of more than {n_bytes} bytes"):
        Assembly(0, max_message_bytes=n_bytes).place(first[0]._replace(n_chunks=n_chunks + 1))
