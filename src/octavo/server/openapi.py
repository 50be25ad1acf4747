"""GET /openapi.json: the routes, the bodies that they take and what they answer, read off the route table and the
records of protocol.py and answers.py.

Owns how a record becomes a JSON schema. Ranges are not in it: SamplingParams and the routes check those.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.request import SamplingParams
from octavo.server import answers
from octavo.server.errors import speaks_anthropic
from octavo.server.exchange import json_response
from octavo.server.fields import Record, required_fields
from octavo.server.middleware import open_routes

if TYPE_CHECKING:
    from octavo.server.front import Front

Handler = Callable[["Front", Request], Awaitable[Response]]
JSON = "application/json"
EVENTS = "text/event-stream"

_NO_OP = "accepted, without effect"
_LATER = "not supported yet: only a value that asks nothing is accepted"
_PLAIN: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


class Operation(NamedTuple):
    """A line of the route table."""

    method: str
    path: str
    handler: Handler
    body: type[Record] | None = None
    answer: type | str | None = None  # what is answered in JSON; the media type of all else; None: nothing is
    event: type | None = None  # of the stream that may be asked for instead


async def document(front: Front, request: Request) -> Response:
    """This description, as OpenAPI 3.1."""
    config = front.config
    record = describe(request.app.state.operations, open_routes(config) if config.api_key else None)
    if config.root_path:
        record["servers"] = [{"url": config.root_path}]
    return json_response(record)


def describe(operations: Iterable[Operation], open_routes: Collection[str] | None = None) -> dict[str, Any]:
    """`open_routes` need no key; None: no route does."""
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = operation.path.replace(":path}", "}")
        described = _operation(operation, schemas)
        if open_routes is not None:
            described["security"] = _security(path, open_routes)
        paths.setdefault(path, {})[operation.method.lower()] = described
    components: dict[str, Any] = {"schemas": schemas}
    record: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "octavo", "version": __version__},
        "paths": paths,
        "components": components,
    }
    if open_routes is not None:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return record


def _security(path: str, open_routes: Collection[str]) -> list[dict[str, list[str]]]:
    """Each entry is one way to be let in."""
    if path in open_routes:
        return []
    return [{"bearer": []}, {"x-api-key": []}] if speaks_anthropic(path) else [{"bearer": []}]


def _operation(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    summary, _, more = inspect.cleandoc(operation.handler.__doc__ or "").partition("\n\n")
    error = _schema(answers.AnthropicError if speaks_anthropic(operation.path) else answers.Error, schemas)
    record: dict[str, Any] = {
        "summary": summary.replace("\n", " "),
        "responses": {
            "200": {"description": "OK", "content": _answers(operation, schemas)},
            "default": {"description": "an error", "content": {JSON: {"schema": error}}},
        },
    }
    if more:
        record["description"] = more
    if "{id" in operation.path:
        record["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.body is not None:
        schema = _record_schema(operation.body, schemas)
        record["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return record


def _answers(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    """By media type."""
    if operation.answer is None:
        return {}
    if isinstance(operation.answer, str):
        return {operation.answer: {}}
    content = {JSON: {"schema": _schema(operation.answer, schemas)}}
    if operation.event is not None:  # the data of each
        content[EVENTS] = {"schema": _schema(operation.event, schemas)}
    return content


def _record_schema(record: type[Record], schemas: dict[str, Any]) -> dict[str, Any]:
    """A reference to it; the schema itself goes to `schemas`."""
    hints, required = typing.get_type_hints(record), required_fields(record)
    sampling_hints = typing.get_type_hints(SamplingParams)
    properties: dict[str, Any] = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]  # the subclasses are dataclasses
        if "check" not in field.metadata:
            continue
        properties[field.name] = _schema(hints[field.name], schemas, nullable=field.name not in required)
        if field.name in required:
            properties[field.name]["description"] = required[field.name]
        elif field.default is not None:
            properties[field.name]["default"] = field.default
    for name in sorted(record.SAMPLING):
        properties[name] = _schema(sampling_hints[name], schemas, nullable=True)
    for name in sorted(record.NO_OPS):
        properties[name] = {"description": _NO_OP}
    for name, idle in sorted(record.LATER.items()):
        properties[name] = {"enum": [None, *idle], "description": _LATER}
    schemas[record.__name__] = {
        "type": "object",
        "description": inspect.cleandoc(record.__doc__ or ""),
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return _reference(record.__name__)


def _answer_schema(answer: type, schemas: dict[str, Any]) -> dict[str, Any]:
    """A reference to that of a TypedDict. More keys may come in time."""
    properties = {
        name: _schema(hint, schemas, nullable=type(None) in typing.get_args(hint))
        for name, hint in typing.get_type_hints(answer).items()
    }
    schemas[answer.__name__] = {
        "type": "object",
        "description": inspect.cleandoc(answer.__doc__ or ""),
        "properties": properties,
        "required": sorted(answer.__required_keys__),  # type: ignore[attr-defined]  # a TypedDict has them
    }
    return _reference(answer.__name__)


def _schema(hint: Any, schemas: dict[str, Any], *, nullable: bool = False) -> dict[str, Any]:
    """Of a type; `nullable`: null, which means absent, is allowed too."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        members = [each for each in typing.get_args(hint) if each is not type(None)]
        options = [_schema(member, schemas) for member in members]
    else:
        options = [_plain_schema(hint, schemas)]
    if nullable and {} not in options:
        options.append({"type": "null"})
    return options[0] if len(options) == 1 else {"anyOf": options}


def _plain_schema(hint: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if isinstance(hint, type) and issubclass(hint, Record):
        return _record_schema(hint, schemas)
    if typing.is_typeddict(hint):
        return _answer_schema(hint, schemas)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is list:
        (item,) = arguments
        return {"type": "array", "items": _schema(item, schemas, nullable=type(None) in typing.get_args(item))}
    assert origin is dict, hint
    values = _schema(arguments[1], schemas)
    return {"type": "object", "additionalProperties": values} if values else {"type": "object"}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}
