"""Tool calls in what models write: each format, what only looks like a call, and pieces of any size."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config import TOOL_CALL_PARSERS
from octavo.errors import ConfigError
from octavo.text.tool_parsers import PARSERS, choose_parser
from octavo.text.tool_parsers.base import CallBegin, Content, Event

TOOLS: dict[str, dict[str, Any]] = {
    "f": {
        "properties": {
            "i": {"type": "integer"},
            "s": {"type": "string"},
            "o": {"type": "object"},
            "b": {"type": "boolean"},
            "n": {"type": ["number", "null"]},
            "u": {"anyOf": [{"type": "array"}, {"type": "string"}]},
            "r": {"$ref": "#/$defs/r"},
            "x": {},
        }
    },
    "g": {},
}


def read(name: str, pieces: list[str]) -> list[Any]:
    """Content as it is, and calls as (name, arguments)."""
    parser = PARSERS[name](TOOLS)
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.finish()
    found: list[Any] = []
    for event in events:
        if isinstance(event, CallBegin):
            found.append((event.name, ""))
        elif isinstance(event, Content):
            if found and isinstance(found[-1], str):
                found[-1] += event.text
            else:
                found.append(event.text)
        else:
            called, arguments = found[-1]  # they belong to the call that began last, with no content between
            found[-1] = (called, arguments + event.text)
    return found


FG = [("f", '{"i": 1}'), ("g", "{}")]
CASES: list[tuple[str, str, list[Any]]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"i": 1}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n',
        FG,
    ),
    ("hermes", 'Look. <tool_call>{"arguments": {"i": 1}, "name": "f"}</tool_call> So.', ["Look. ", FG[0], " So."]),
    (
        "hermes",
        '<tool_call>{"id": [1, {"a": "}"}], "type": "function", "name": "f", "arguments": {"i": 1}, "k": null}',
        FG[:1],
    ),
    ("hermes", '<tool_call>{"name": "g", "arguments": "{\\"i\\": 1}"}</tool_call>', [("g", '{"i": 1}')]),
    ("hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>', FG[1:]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a\nb\t\\u00e9é"}}', [("f", '{"s": "a\\nb\\t\\u00e9é"}')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "</tool_call>{[\\"}"}}</tool_call>',
        [("f", '{"s": "</tool_call>{[\\"}"}')],
    ),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {"i": 1}}, {"name": "g"}]</tool_call>', FG),
    ("hermes", "  \n", ["  \n"]),
    ("hermes", "  \n a <tool_call", ["  \n a <tool_call"]),
    ("hermes", "<tool_call>{oops}</tool_call>", ["<tool_call>{oops}</tool_call>"]),
    ("hermes", '<tool_call>{"name": "a b"}</tool_call>', ['<tool_call>{"name": "a b"}</tool_call>']),
    ("hermes", '<tool_call>{"name": "\\ud83d"}', ['<tool_call>{"name": "\\ud83d"}']),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', ['<tool_call>{"name": "f", "arguments": [1]}']),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}', ['<tool_call>{"name": "f", "arguments": "x"}']),
    ("hermes", '<tool_call>{"name": "f", "argu', ['<tool_call>{"name": "f", "argu']),
    ("hermes", '<tool_call><tool_call>{"name": "g"}</tool_call>', ["<tool_call>", FG[1]]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "cut', [("f", '{"s": "cut')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": [}}', [("f", '{"s": ['), "}}"]),
    ("llama3_json", '{"name": "f", "parameters": {"i": 1}}; {"name": "g", "parameters": {}}', FG),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"i": 1}};{"name": "g"}', FG),
    ("llama3_json", 'So: <|python_tag|>{"name": "other", "parameters": {}}', ["So: ", ("other", "{}")]),
    ("llama3_json", '{"name": "other", "parameters": {}}', ['{"name": "other", "parameters": {}}']),
    ("llama3_json", '{"answer": 7}', ['{"answer": 7}']),
    ("llama3_json", '<|python_tag|>print("a")', ['<|python_tag|>print("a")']),
    ("llama3_json", 'I say {"name": "f"}', ['I say {"name": "f"}']),
    ("llama3_json", '{"name": "g"}; and so on', [FG[1], "; and so on"]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"i": 1}}, {"name": "g", "arguments": {}}]', FG),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"i": 1}, "id": "abcdefghi"}]', FG[:1]),
    ("mistral", 'Look.[TOOL_CALLS]f{"i": 1}[TOOL_CALLS]g{}', ["Look.", *FG]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"i": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}', FG),
    ("mistral", "[TOOL_CALLS][]", ["[TOOL_CALLS][]"]),
    ("mistral", "[TOOL_CALLS]f is", ["[TOOL_CALLS]f is"]),
    ("mistral", "[TOOL_CALLS]f[AR", ["[TOOL_CALLS]f[AR"]),
    ("pythonic", '[f(i=1, s="a,)\\n"), g()]', [("f", '{"i": 1, "s": "a,)\\n"}'), FG[1]]),
    (
        "pythonic",
        " [f(o={'k': [1, -2.5, (3,)]}, b=True, n=None, u=[false, null])]",
        [("f", '{"o": {"k": [1, -2.5, [3]]}, "b": true, "n": null, "u": [false, null]}')],
    ),
    ("pythonic", "[1, 2]", ["[1, 2]"]),
    ("pythonic", "[h(i=1)]", ["[h(i=1)]"]),
    ("pythonic", "[f(i=1), h(i=1)]", [FG[0], ", h(i=1)]"]),
    ("pythonic", "[f(i=1)] Done.", [FG[0], " Done."]),
    ("pythonic", "Done: [f(i=1)]", ["Done: [f(i=1)]"]),
    *(
        ("pythonic", f"[f({inner})]", [f"[f({inner})]"])
        for inner in ("1", "*a", "**a", "i=1+1", "i=g()", "i=1e999", "i=b'a'", "s='\\ud83d'", "i={1: 2}", "i=...", "i=")
    ),
    ("pythonic", r'[f(s="\d")]', [("f", r'{"s": "\\d"}')]),
    (
        "qwen3_xml",
        "<tool_call>\n<function=f>\n<parameter=i>\n1\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        FG,
    ),
    (
        "qwen3_coder",
        '<function=f><parameter=s>\n<a>\n "1"\n\n</parameter><parameter=o>{"k": [1]}</parameter></function>',
        [("f", '{"s": "<a>\\n \\"1\\"\\n", "o": {"k": [1]}}')],
    ),
    *(
        ("qwen3_xml", f"<function=f><parameter={key}>{text}</parameter></function>", [("f", f'{{"{key}": {told}}}')])
        for key, text, told in (
            ("s", "1", '"1"'),
            ("x", "1", '"1"'),
            ("new", "true", '"true"'),
            ("i", "-7", "-7"),
            ("i", "seven", '"seven"'),
            ("i", "1.5", '"1.5"'),
            ("b", "True", "true"),
            ("n", "2", "2"),
            ("n", "None", "null"),
            ("n", "NaN", '"NaN"'),
            ("o", "[1]", '"[1]"'),
            ("u", "[1]", "[1]"),
            ("u", "a", '"a"'),
            ("r", '{"a": 1}', '{"a": 1}'),
            ("s", "", '""'),
        )
    ),
    ("qwen3_xml", "<tool_call>f", ["<tool_call>f"]),
    ("qwen3_xml", "<tool_call>\n<function=a b>", ["<tool_call>\n<function=a b>"]),
    ("qwen3_xml", "<function=g>so</function>", [FG[1], "so</function>"]),
    ("qwen3_xml", "<function=f><parameter=i>1</parameter></tool_call>", FG[:1]),
    ("qwen3_xml", "<function=f><parameter=s>cut <", [("f", '{"s": "cut <')]),
    ("qwen3_xml", "<function=f><parameter=i>1", [("f", "{"), "<parameter=i>1"]),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"i": 1}}, {"name": "g", "arguments": {}}]', FG),
    ("granite", "<|tool_call|>none", ["<|tool_call|>none"]),
]


@pytest.mark.parametrize(("name", "text", "found"), CASES, ids=str)
def test_what_is_found(name, text, found):
    assert read(name, [text]) == found
    assert read(name, list(text)) == found


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]


FRAGMENTS = [*sorted({text for _, text, _ in CASES}), "é😀", *'a \n<[{}]"\\(;']
texts = st.lists(
    st.one_of(st.sampled_from(FRAGMENTS), st.sampled_from(FRAGMENTS).flatmap(lambda t: st.just(t[: len(t) // 2]))),
    max_size=5,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(PARSERS)), text=texts, places=st.lists(st.integers(0, 10**6), max_size=8))
def test_the_pieces_do_not_matter(name, text, places):
    whole = read(name, [text])
    assert read(name, cut(text, places)) == whole
    assert read(name, list(text)) == whole


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(PARSERS)), text=st.text(alphabet='ab <>{}[]="\\/:,', max_size=60))
def test_text_without_calls_stays_as_it_is(name, text):
    assert "".join(read(name, cut(text, [7, 19]))) == text


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=6), values, max_size=4), places=st.lists(st.integers(0, 999)))
def test_arguments_are_what_was_meant(arguments, places):
    written = json.dumps(arguments, ensure_ascii=False)
    as_list = json.dumps([{"name": "f", "arguments": arguments}])
    for name, text in (
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'),
        ("llama3_json", f'{{"name": "f", "parameters": {written}}}'),
        ("mistral", f"[TOOL_CALLS]{as_list}"),
        ("mistral", f"[TOOL_CALLS]f{written}"),
        ("granite", f"<|tool_call|>{as_list}"),
    ):
        ((called, told),) = read(name, cut(text, places))
        assert (called, json.loads(told)) == ("f", arguments)
    names = {f"k{i}": value for i, value in enumerate(arguments.values())}
    ((_, told),) = read(
        "pythonic", cut(f"[f({', '.join(f'{key}={value!r}' for key, value in names.items())})]", places)
    )
    assert json.loads(told) == names


BIG = 100_000
HOSTILE: list[tuple[str, str]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "' + "x" * BIG + '"}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"s": "' + "x" * BIG + '"}, "name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": ' + "[" * BIG),
    ("hermes", "<tool_call>" * (BIG // 11)),
    ("hermes", " " * BIG),
    ("hermes", '<tool_call>{"name": "' + "f" * BIG),
    ("hermes", '<tool_call>{"name": "g"}' * (BIG // 24)),
    ("llama3_json", '{"name": "g"};' * (BIG // 14)),
    ("mistral", "[TOOL_CALLS]" + "f" * BIG),
    ("mistral", "[TOOL_CALLS]f{" + '"a":' * (BIG // 4)),
    ("qwen3_xml", "<function=f><parameter=s>" + "\n" * BIG + "</parameter></function>"),
    ("qwen3_xml", "<function=f><parameter=o>" + "[" * BIG + "</parameter></function>"),
    ("qwen3_xml", "<function=f>" + "<parameter=s>1</parameter>" * (BIG // 26)),
    *(
        ("pythonic", f"[f(s={value})]")
        for value in (
            "'" + "x" * BIG + "'",
            "-" * BIG + "1",
            "1" + "+1" * (BIG // 2),
            "not " * (BIG // 4) + "1",
            "a" + ".a" * (BIG // 2),
            "lambda:" * (BIG // 7) + "1",
            "9" * BIG,
            "[" * BIG,
            "'a'" * (BIG // 3),
        )
    ),
]


@pytest.mark.parametrize(("name", "text"), HOSTILE, ids=lambda each: each[:40])
def test_the_work_is_linear_and_nothing_breaks(name, text):
    """100 KB in pieces of one character take tenths of a second; a quadratic parser would take a minute."""
    begin = time.process_time()
    assert read(name, list(text)) == read(name, [text])
    assert time.process_time() - begin < 10


def test_the_names_are_those_of_the_option():
    assert sorted(PARSERS) == sorted(TOOL_CALL_PARSERS)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("…<tool_call>\n<function=f>\n<parameter=a>…", "qwen3_xml"),
        ('…<tool_call>\n{"name": …', "hermes"),
        ("…{{ '[TOOL_CALLS]' }}…", "mistral"),
        ("…<|tool_call|>…", "granite"),
        ('…{"name": function name, "parameters": dictionary of argument name and its value}…', "llama3_json"),
    ],
)
def test_a_template_shows_the_format(template, name):
    assert choose_parser(None, template) == name
    assert choose_parser("pythonic", template) == "pythonic"


@pytest.mark.parametrize("template", [None, "", "{{ messages }}", "<tool_call>f<arg_key>a</arg_key>"])
def test_a_format_that_nothing_shows_is_asked_for(template):
    with pytest.raises(ConfigError, match="hermes") as caught:
        choose_parser(None, template)
    assert caught.value.param == "tool_call_parser"
