"""GET /: the built-in page, a playground and a live view. One file, page.html, as it is: nothing is filled in.

It holds nothing secret and is served without a key; what it asks the server carries the key that its user types. Its
Content-Security-Policy lets it run its own script and style, known by their hashes, and talk to this server alone.
"""

from __future__ import annotations

import functools
import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

if TYPE_CHECKING:
    from octavo.server.front import Front


async def show(front: Front, request: Request) -> Response:
    """A page to chat with the model and to watch the server.

    It is served without a key; what it asks the server needs one."""
    html, headers = _page()
    return HTMLResponse(html, headers=headers)


@functools.cache
def _page() -> tuple[str, dict[str, str]]:
    html = files("octavo.server").joinpath("page.html").read_text(encoding="utf-8")
    policy = [
        "default-src 'none'",
        f"script-src {_source(html, 'script')}",
        f"style-src {_source(html, 'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return html, {
        "content-security-policy": "; ".join(policy),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }


def _source(html: str, tag: str) -> str:
    """How the policy names what stands within `tag`."""
    found = re.search(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    assert found is not None, tag
    return f"'sha256-{b64encode(sha256(found[1].encode()).digest()).decode()}'"
