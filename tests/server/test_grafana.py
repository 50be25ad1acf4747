"""The Grafana dashboard: what Grafana wants of a file, and that what its panels ask for is what a server says."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.cli.main import main
from support.served import ServerProcess

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# What PromQL has of its own, and the labels that Prometheus adds when it scrapes.
WORDS = {"sum", "max", "by", "rate", "increase", "histogram_quantile"}
PROMETHEUS_LABELS = {"instance", "job"}
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|!=|=|!~)"([^"]*)"')
GROUPING = re.compile(r"\bby \(([^)]*)\)")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(files("octavo.server").joinpath("grafana.json").read_text())


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def labels() -> Iterator[dict[str, set[str]]]:
    """The labels of every series of a server that has answered something."""
    script = str(Path(__file__).with_name("scripted_server.py"))
    server = ServerProcess(program=(sys.executable, script, "0", "0"))
    server.wait_until_ready()
    server.complete(prompt="a", max_tokens=2)
    text = httpx.get(f"{server.url}/metrics").text
    server.close()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    yield found


def test_what_grafana_wants(dashboard) -> None:
    assert re.fullmatch(r"[\w-]{1,40}", dashboard["uid"]) and dashboard["title"] == "octavo"
    assert "id" not in dashboard  # that of the database it came from
    assert dashboard["schemaVersion"] >= 36
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in dashboard["panels"]]
    assert all(titles) and "First token, p95" in titles
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    assert all(each["datasource"] == DATASOURCE for name, each in variables.items() if name != "datasource")
    for panel in panels(dashboard):
        assert panel["datasource"] == DATASOURCE and panel["targets"], panel["title"]
        assert [target["datasource"] for target in panel["targets"]] == [DATASOURCE] * len(panel["targets"])
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs))
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard))) <= {*variables, "__rate_interval", "__range", "__all"}


def test_no_panel_lies_on_another(dashboard) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_asks_for_what_a_server_has(dashboard, labels) -> None:
    queries = [
        (panel["title"], target["expr"], set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", ""))))
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            query, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
            queries.append((variable["name"], query if "{" in query else query + "{}", {label}))
    for title, query, legend in queries:
        selectors = SELECTOR.findall(query)
        assert selectors, title
        for name, matchers in selectors:
            assert name in labels, f"{title}: {name}"
            known = labels[name] | PROMETHEUS_LABELS
            assert {label for label, _, _ in MATCHER.findall(matchers)} <= known, f"{title}: {matchers}"
            assert MATCHER.sub("", matchers).strip(",") == "", f"{title}: {matchers}"
            for grouping in GROUPING.findall(query):
                assert set(grouping.split(", ")) <= known, f"{title}: {grouping}"
            assert legend <= known, f"{title}: {legend}"
        # Nothing is left that is no selector, word, number or sign.
        rest = GROUPING.sub("by", SELECTOR.sub("", query)).replace("[$__rate_interval]", "").replace("[$__range]", "")
        assert set(re.findall(r"[a-zA-Z_]\w*", rest)) <= WORDS, f"{title}: {rest}"
        assert query.count("(") == query.count(")"), title


def test_it_shows_what_an_operator_looks_for(dashboard) -> None:
    asked = {name for panel in panels(dashboard) for t in panel["targets"] for name, _ in SELECTOR.findall(t["expr"])}
    for name in [
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "request_success_total",
        "generation_tokens_total",
        "prompt_tokens_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "request_time_per_output_token_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "num_preemptions_total",
        "request_queue_time_seconds_bucket",
        "prefix_cache_hits_total",
        "engine_restarts_total",
        "admission_rejections_total",
    ]:
        assert f"vllm:{name}" in asked


def test_the_command_prints_it(dashboard, capsys) -> None:
    assert main(["dashboard"]) == 0
    assert json.loads(capsys.readouterr().out) == dashboard
