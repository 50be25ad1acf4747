"""How a process of octavo writes its log: lines of text for people, or one JSON object a line for programs, to stderr.

Owns the two forms. Of an exception they show type and traceback; its message, where there are texts of callers in the
process, only if it cannot quote one (SAFE). What else is logged is its writers' affair.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TypeAlias

import msgspec

from octavo.errors import OctavoError

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
SAFE = (OctavoError, OSError, MemoryError, ImportError)  # these speak of files, memory and options
FIELDS = ("request_id", "request_ids")  # of a record, where it has them

ExcInfo: TypeAlias = (
    "tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]"  # as logging has it
)

logger = logging.getLogger(__name__)


def set_up_logs(log_format: str, log_level: str, *, may_quote: bool = True) -> None:
    """For the whole process. `log_format`: text or json; `may_quote`: show the messages of all exceptions."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(may_quote) if log_format == "json" else TextLines(may_quote))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("octavo").setLevel(log_level.upper())
    if log_format == "json":  # whatever else writes to stderr on its own
        logging.captureWarnings(True)
        sys.excepthook = _log_end
        threading.excepthook = lambda args: logger.critical(
            "a thread has failed", exc_info=(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
        )


def _log_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logger.critical("this process has failed", exc_info=(kind, error, trace))


class TextLines(logging.Formatter):
    def __init__(self, may_quote: bool) -> None:
        super().__init__(TEXT)
        self._may_quote = may_quote

    def formatException(self, ei: ExcInfo) -> str:
        return format_exception(ei[1], self._may_quote)


class JsonLines(logging.Formatter):
    """A record as an object: time (UTC, RFC 3339), level, logger, message; request_id (or several) and exception where
    there are such."""

    def __init__(self, may_quote: bool) -> None:
        super().__init__()
        self._may_quote = may_quote

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            entry["exception"] = format_exception(record.exc_info[1], self._may_quote)
        return msgspec.json.encode(entry).decode()


def format_exception(error: BaseException | None, may_quote: bool) -> str:
    """Its traceback, and those of what it came from."""
    if error is None:
        return ""
    if may_quote:
        return "".join(traceback.format_exception(error)).rstrip()
    origin = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    before = "" if origin is None else f"{format_exception(origin, may_quote)}\n\n… and from that:\n\n"
    frames = "".join(traceback.format_tb(error.__traceback__))
    said = str(error) if isinstance(error, SAFE) else "(--enable-log-requests shows its message)"
    return f"{before}Traceback (most recent call last):\n{frames}{type(error).__name__}: {said}"
