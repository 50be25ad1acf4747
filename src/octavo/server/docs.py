"""GET /docs: the description of /openapi.json as a page to read. One answer, without scripts or further requests."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from octavo.server.openapi import describe

if TYPE_CHECKING:
    from octavo.server.front import Front

_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222; }
code { font: 14px ui-monospace, monospace; }
h1 code, summary code { font-weight: bold; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem; }
td, th { border-bottom: 1px solid #ddd; padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top; }
summary { padding: .4rem 0; cursor: pointer; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } td, th { border-color: #444; } }
"""


async def page(front: Front, request: Request) -> Response:
    """This description, as a page to read."""
    return HTMLResponse(render(describe(request.app.state.operations)), headers=_HEADERS)


def render(description: dict[str, Any]) -> str:
    """A page from an OpenAPI description."""
    schemas = description["components"]["schemas"]
    title = f"{description['info']['title']} {description['info']['version']}"
    sections = [
        _operation(method, path, operation, schemas)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f'<body><h1>{escape(title)}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a>. '
        f"In a body, null means absent.</p>{''.join(sections)}</body></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    head = f"<code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}"
    if "requestBody" not in operation:
        return f"<details><summary>{head}</summary><p>{escape(operation.get('description', 'No body.'))}</p></details>"
    schema = schemas[_name(operation["requestBody"]["content"]["application/json"]["schema"])]
    table = _table(schema, schemas)
    text = escape(operation.get("description", schema["description"]))
    return f"<details><summary>{head}</summary><p>{text}</p>{table}</details>"


def _table(schema: dict[str, Any], schemas: dict[str, Any], prefix: str = "") -> str:
    rows = "".join(_rows(schema, schemas, prefix))
    return f"<table><tr><th>field</th><th>type</th><th>default</th><th></th></tr>{rows}</table>"


def _rows(schema: dict[str, Any], schemas: dict[str, Any], prefix: str) -> list[str]:
    rows = []
    for name, field in schema["properties"].items():
        inner = next((option for option in field.get("anyOf", [field]) if "$ref" in option), None)
        if inner is not None:
            rows += _rows(schemas[_name(inner)], schemas, f"{prefix}{name}.")
            continue
        default = "required" if name in schema["required"] else _shown(field.get("default", ""))
        cells = (f"<code>{escape(prefix + name)}</code>", _type(field), default, escape(field.get("description", "")))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return rows


def _type(field: dict[str, Any]) -> str:
    """A type in words; null goes without saying."""
    if "anyOf" in field:
        return " or ".join(_type(option) for option in field["anyOf"] if option != {"type": "null"})
    if "enum" in field:
        return " or ".join(_shown(value) for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}"
    return escape(field.get("type", "any"))


def _shown(value: Any) -> str:
    return "" if value == "" else f"<code>{escape(repr(value))}</code>"


def _name(reference: dict[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]
