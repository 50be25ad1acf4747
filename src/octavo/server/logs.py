"""What the server says, and how: lines of text for people, or one JSON object a line for programs.

Everything goes to stderr, and nothing of a prompt is in it. Notices (what was started, that it is ready, that it ends)
are shown at every log level; as text they stand alone, like the output of a command.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import msgspec

from octavo.config import ServerConfig

NOTICES = "octavo.notices"
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up_logs(config: ServerConfig) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if config.log_format == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("octavo").setLevel(config.log_level.upper())
    notices = logging.getLogger(NOTICES)
    notices.setLevel(logging.INFO)
    if config.log_format == "text":
        notices.propagate = False
        notices.addHandler(logging.StreamHandler())


def notice(line: str) -> None:
    logging.getLogger(NOTICES).info(line)


class JsonLines(logging.Formatter):
    """A record as an object: time (UTC, RFC 3339), level, logger, message; request_id and exception where there are
    such."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := getattr(record, "request_id", None)) is not None:
            entry["request_id"] = request_id
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()
