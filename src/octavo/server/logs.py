"""What the server says beyond its log proper: notices, and what is not to be said twice.

Nothing of a prompt is in a log, unless requests are logged on purpose (request_log.py). Notices (what was started, that
it is ready, that it ends) are shown at every log level; as text they stand alone, like the output of a command.
"""

from __future__ import annotations

import logging

from octavo.config import ServerConfig
from octavo.engine.logs import set_up_logs

NOTICES = "octavo.notices"


def set_up_server_logs(config: ServerConfig) -> None:
    set_up_logs(config.log_format, config.log_level, may_quote=config.enable_log_requests)
    logging.getLogger("uvicorn.error").addFilter(is_news)
    notices = logging.getLogger(NOTICES)
    notices.setLevel(logging.INFO)
    if config.log_format == "text":
        notices.propagate = False
        notices.addHandler(logging.StreamHandler())


def notice(line: str) -> None:
    logging.getLogger(NOTICES).info(line)


def is_news(record: logging.LogRecord) -> bool:
    """Not what errors.py has said before with the request's id."""
    return not record.getMessage().startswith("Exception in ASGI application")
