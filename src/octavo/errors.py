"""Every error that octavo raises on purpose: one tree, each with the HTTP status it answers with.

OctavoError                     500  anything of ours
├── InvalidRequestError         400  something in a request is wrong; `param` names the field
│   ├── ContextLengthError      400  prompt + max_tokens does not fit the context
│   └── ChatTemplateError       400  the chat template is missing or refused the messages
├── NotFoundError               404  an unknown model (or other named thing)
├── QueueFullError              503  admission control; carries `retry_after` in seconds
├── RequestFailedError          500  this request alone failed inside the engine
├── EngineDeadError             503  the engine process is gone
├── ConfigError                  –   a wrong option at start (exit code 2)
└── CheckpointError              –   a checkpoint that cannot be used (exit code 1)
"""

from __future__ import annotations

import reprlib
from typing import NoReturn


class OctavoError(Exception):
    """Base of all. `code` is the machine-readable word in OpenAI's error object; `exit_code` is a program's."""

    status = 500
    exit_code = 1
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(OctavoError, ValueError):
    status = 400
    code = "invalid_request"


def refuse(name: str, value: object, allowed: str) -> NoReturn:
    """Raises InvalidRequestError. `value` may be a client's: megabytes long, or nested as deeply as the interpreter
    bears."""
    raise InvalidRequestError(f"{name} is {reprlib.repr(value)}; it must be {allowed}", param=name)


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class ChatTemplateError(InvalidRequestError):
    code = "chat_template_error"


class NotFoundError(OctavoError):
    status = 404
    code = "model_not_found"


class QueueFullError(OctavoError):
    status = 503
    code = "queue_full"
    retry_after = 1


class RequestFailedError(OctavoError):
    code = "request_failed"


class EngineDeadError(OctavoError):
    status = 503
    code = "engine_dead"


class ConfigError(OctavoError, ValueError):
    code = "config_error"
    exit_code = 2


class CheckpointError(OctavoError):
    code = "checkpoint_error"
