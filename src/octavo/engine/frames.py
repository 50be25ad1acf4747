"""Messages on a stream of bytes: each is a length (4 bytes, little-endian) and that many bytes."""

from __future__ import annotations

_LENGTH_BYTES = 4


def frame(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


class FrameReader:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()  # begins with a message's length

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes."""
        buffer = self._buffer
        buffer += data
        messages, begin = [], 0
        while len(buffer) >= (body := begin + _LENGTH_BYTES):
            end = body + int.from_bytes(buffer[begin:body], "little")
            if end > len(buffer):
                break
            messages.append(bytes(buffer[body:end]))
            begin = end
        del buffer[:begin]
        return messages
