"""`octavo bench plot`: which points are drawn, where, and what is written beside them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.bench.plot import even_ticks
from octavo.cli.main import main

SVG = "{http://www.w3.org/2000/svg}"


def write(path: Path, seconds: dict[tuple[int, int], float], **engine: Any) -> str:
    """A file of `octavo bench step`: seconds by (requests, context)."""
    points = [
        {"num_requests": requests, "context_len": context, "step_and_output": value}
        for (requests, context), value in seconds.items()
    ]
    path.write_text(
        json.dumps({"engine": {"model": "/some/where/m.gguf", "dtype": "auto", **engine}, "points": points})
    )
    return str(path)


def test_picture(tmp_path: Path) -> None:
    users = write(tmp_path / "users.json", {(1, 128): 0.01, (2, 128): 0.0125, (8, 128): 0.02})
    contexts = write(tmp_path / "contexts.json", {(1, 128): 0.01, (1, 4000): 0.02})
    other = write(tmp_path / "int8.json", {(1, 128): 0.005, (2, 128): 0.01}, quantization="int8")
    out = tmp_path / "plot.svg"
    assert main(["bench", "plot", users, contexts, other, "--out", str(out)]) == 0
    root = ET.parse(out).getroot()
    texts = [element.text for element in root.iter(f"{SVG}text")]
    for text in ("m.gguf", "m.gguf int8", "ms per token, one user", "tokens/s while all decode, context 128"):
        assert text in texts
    assert {"0", "5", "10", "15", "20", "1,000", "4,000"} < set(texts)  # ms and tokens
    assert {"1", "2", "4", "8", "100", "400"} < set(texts)  # users and tokens/s
    lines = [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in root.iter(f"{SVG}polyline")
    ]
    assert [len(line) for line in lines] == [2, 1, 3, 2]
    # 4,000 tokens and 20 ms are the ends of the first panel's scales; 8 users and 400 tokens/s the second's.
    assert lines[0][-1] == (64 + 376, 72)
    assert lines[2] == [(544, 72 + 256 * 3 / 4), (544 + 125.3, 72 + 256 * 0.6), (544 + 376, 72)]


@pytest.mark.parametrize(
    ("largest", "ticks"),
    [(20, [0, 5, 10, 15, 20]), (21, [0, 5, 10, 15, 20, 25]), (8000, [0, 2000, 4000, 6000, 8000]), (0.5, None)],
)
def test_ticks(largest: float, ticks: list[float] | None) -> None:
    assert even_ticks(largest) == pytest.approx(ticks or [0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_files_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text('{"latencies": []}')
    assert main(["bench", "plot", str(tmp_path / "x.json"), "--out", "p.svg"]) == 2
    assert "x.json is no result of `octavo bench step`\n" in capsys.readouterr().err
    assert main(["bench", "plot", str(tmp_path / "y.json"), "--out", "p.svg"]) == 2
    assert "y.json cannot be read: No such file or directory\n" in capsys.readouterr().err
    (tmp_path / "x.json").write_text("{")
    assert main(["bench", "plot", str(tmp_path / "x.json"), "--out", "p.svg"]) == 2
    assert "x.json is not JSON: Expecting property name" in capsys.readouterr().err
    assert main(["bench", "plot", str(tmp_path / "x.json"), "--out", "p.png"]) == 2
    assert capsys.readouterr().err == "octavo: error: --out is p.png; its name must end in .svg\n"
