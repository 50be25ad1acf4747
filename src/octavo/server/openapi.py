"""GET /openapi.json: the routes and the bodies that they take, read off the route table and the records of protocol.py.

Owns how a record becomes a JSON schema. Types and ranges of single fields are in it; what one field or the model
allows another is not: SamplingParams and the routes check that.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.request import INTEGER_RANGES, NUMBER_RANGES, SamplingParams
from octavo.server.fields import Limited, Record, required_fields
from octavo.server.protocol import CallFields

if TYPE_CHECKING:
    from octavo.server.front import Front

Handler = Callable[["Front", Request], Awaitable[Response]]
JSON = "application/json"

_ERROR = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}

_NO_OP = "accepted, without effect"
_LATER = "not supported yet: only a value that asks nothing is accepted"
_RANGES: Mapping[str, tuple[float, float]] = {**INTEGER_RANGES, **NUMBER_RANGES}
_PLAIN: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


class Operation(NamedTuple):
    """A line of the route table."""

    method: str
    path: str
    handler: Handler
    body: type[Record] | None = None
    answer: str | None = JSON  # its media type; None: there is none


async def document(front: Front, request: Request) -> Response:
    """This description, as OpenAPI 3.1."""
    record = describe(request.app.state.operations, with_key=bool(front.config.api_key))
    if front.config.root_path:
        record["servers"] = [{"url": front.config.root_path}]
    return Response(msgspec.json.encode(record), media_type=JSON)


def describe(operations: Iterable[Operation], *, with_key: bool = False) -> dict[str, Any]:
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = operation.path.replace(":path}", "}")
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, schemas)
    components: dict[str, Any] = {"schemas": schemas}
    record: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "octavo", "version": __version__},
        "paths": paths,
        "components": components,
    }
    if with_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        record["security"] = [{"key": []}]
    return record


def _operation(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    summary, _, more = inspect.cleandoc(operation.handler.__doc__ or "").partition("\n\n")
    answers = [] if operation.answer is None else [operation.answer]
    if operation.body is not None and issubclass(operation.body, CallFields):
        answers.append("text/event-stream")
    record: dict[str, Any] = {
        "summary": summary.replace("\n", " "),
        "responses": {
            "200": {"description": "OK", "content": {media_type: {} for media_type in answers}},
            "default": {"description": "an error", "content": {JSON: {"schema": _reference("Error")}}},
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


def _record_schema(record: type[Record], schemas: dict[str, Any]) -> dict[str, Any]:
    """A reference to it; the schema itself goes to `schemas`."""
    hints, required = typing.get_type_hints(record), required_fields(record)
    sampling_hints = typing.get_type_hints(SamplingParams)
    properties: dict[str, Any] = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]  # the subclasses are dataclasses
        if "check" not in field.metadata:
            continue
        schema = _schema(hints[field.name], schemas, nullable=field.name not in required)
        check = field.metadata["check"]
        properties[field.name] = _within(check.limits, schema) if isinstance(check, Limited) else schema
        if field.name in required:
            properties[field.name]["description"] = required[field.name]
        elif field.default is not None:
            properties[field.name]["default"] = field.default
    for name in sorted(record.SAMPLING):
        limits = {"minimum": _RANGES[name][0], "maximum": _RANGES[name][1]} if name in _RANGES else {}
        properties[name] = _within(limits, _schema(sampling_hints[name], schemas, nullable=True))
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


def _within(limits: Mapping[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The same, with these limits on what is not null."""
    if "anyOf" in schema:
        return {"anyOf": [_within(limits, option) for option in schema["anyOf"]]}
    return schema if schema.get("type") == "null" else {**schema, **limits}


def _plain_schema(hint: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if isinstance(hint, type) and issubclass(hint, Record):
        return _record_schema(hint, schemas)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0], schemas)}
    assert origin is dict, hint
    values = _schema(arguments[1], schemas)
    return {"type": "object", "additionalProperties": values} if values else {"type": "object"}


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}
