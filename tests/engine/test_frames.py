"""Messages on a stream, wherever it is cut."""

from __future__ import annotations

import pytest

from octavo.engine.frames import FrameReader, frame

MESSAGES = [b"", b"a", b"\x00" * 300, b"two words", b"x" * 70_000]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1000, 10**6])
def test_any_cut_gives_the_messages(size):
    stream = b"".join(map(frame, MESSAGES))
    reader = FrameReader()
    found = [message for i in range(0, len(stream), size) for message in reader.feed(stream[i : i + size])]
    assert found == MESSAGES


def test_a_message_comes_when_it_is_complete():
    reader = FrameReader()
    assert reader.feed(frame(b"one") + frame(b"two")[:-1]) == [b"one"]
    assert reader.feed(b"o" + frame(b"three")[:2]) == [b"two"]
