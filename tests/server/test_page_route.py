"""GET /: what a browser is given, as text. What it makes of it is test_page_in_browser.py's matter."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest


class Elements(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


@pytest.fixture
async def page(serve):
    server = await serve(api_key=["k"])
    return await server.http.get("/")


async def test_it_needs_no_key_but_what_it_asks_does(serve, page):
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    server = await serve(api_key=["k"])
    for path in ("/live", "/v1/models", "/docs"):
        assert (await server.http.get(path)).status_code == 401


def test_its_policy_allows_its_own_script_and_style_alone(page):
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", page.text, re.DOTALL)
        assert policy[f"{tag}-src"] == f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"


def test_it_asks_nobody_else(page):
    known = {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert set(re.findall(r"https?://[^'\"\s]+", page.text)) <= known
    elements = Elements(page.text).found
    assert not any("src" in attributes or "srcset" in attributes for _, attributes in elements)
    assert all(attributes["href"].startswith(("data:", "#")) for _, attributes in elements if "href" in attributes)


def test_its_policy_breaks_nothing_of_it(page):
    for tag, attributes in Elements(page.text).found:
        assert "style" not in attributes and not any(name.startswith("on") for name in attributes), (tag, attributes)


def test_script_and_page_fit_together(page):
    ids = [attributes["id"] for _, attributes in Elements(page.text).found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\$\("([\w-]+)"\)', page.text)) <= set(ids)
    assert {"temperature", "top_p", "top_k", "max_tokens", "seed", "system", "stop", "key"} <= set(ids)


def test_the_key_is_kept_for_the_tab_alone(page):
    assert "sessionStorage" in page.text
    assert "localStorage" not in page.text and "cookie" not in page.text
