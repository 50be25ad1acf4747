"""Chat templates: the text and ids of transformers' apply_chat_template, the messages' checks, and what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ChatTemplateError, ConfigError, InvalidRequestError
from octavo.text.chat_template import ChatTemplate, encode_chat, load_chat_template, require_chat_template
from octavo.text.tokenizer import Tokenizer, frame_with, load_tokenizer
from support.checkpoints import CHAT_TEMPLATE, smol_tokenizer, tiny_tokenizer

USER = {"role": "user", "content": "Hi <b>&'\"\n ok  "}
ASSISTANT = {"role": "assistant", "content": "Hello  "}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER, ASSISTANT, USER],
    [USER, {**ASSISTANT, "reasoning": "because"}],
]
TOOL = {"type": "function", "function": {"name": "f", "description": "é <x>", "parameters": {"type": "object"}}}

TRIMMING = """\
{%- for message in messages -%}
    {%- if message.role == 'system' and not loop.first -%}
        {{ raise_exception('System turns come first') }}
    {%- endif -%}
    {{ bos_token if loop.first }}[{{ message['role'] | upper }}] {{ message.content | trim }}{{ eos_token }}
{% endfor -%}
{%- if add_generation_prompt %}[ASSISTANT]{% endif -%}
"""
FEATURES = """\
{%- set ns = namespace(count=0) -%}
{%- macro show(x) %}<{{ x | tojson }}>{% endmacro -%}
{{ bos_token }}{{ pad_token }}{{ undefined_thing }}
    {% for message in messages %}
        {% if message.role == 'skip' %}{% continue %}{% endif %}
        {% set ns.count = ns.count + 1 %}
        {% if message.role == 'assistant' %}
{% generation %}
{{ message.reasoning_content }}{{ message.thinking }}{{ message.content }}
{% endgeneration %}
        {% else %}
{{ show(message.content) }}
        {% endif %}
    {% endfor %}
{{ ns.count }} {{ tools | tojson(indent=2) if tools else 'none' }} {{ documents is none }} {{ mood | default('calm') }}
{{ strftime_now('%Y')[:2] }}{{ messages[0].content[:2] ~ dict(a=1).a }}
"""


def apply(template: str, messages: list[dict[str, Any]], **options: Any) -> Any:
    options.setdefault("add_generation_prompt", True)
    return smol_tokenizer().apply_chat_template(messages, chat_template=template, tokenize=False, **options)


SMOL = "SmolLM2's own"


def text_of(source: str) -> str:
    return smol_tokenizer().chat_template if source == SMOL else source


def of_smol(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=smol_tokenizer().special_tokens_map)


@pytest.mark.parametrize("source", [SMOL, CHAT_TEMPLATE, TRIMMING, FEATURES])
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize(
    "options", [{}, {"add_generation_prompt": False}, {"tools": [TOOL]}, {"mood": "ge<reizt>", "pad_token": "X"}]
)
def test_texts_are_those_of_transformers(source: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
    source = text_of(source)
    assert of_smol(source).render(messages, **options) == apply(source, messages, **options)


def test_ids_are_those_of_transformers(smollm2_gguf: Path) -> None:
    tokenizer = load_tokenizer(smollm2_gguf)
    template = require_chat_template(load_chat_template(None, tokenizer))
    for messages in CHATS:
        ids = smol_tokenizer().apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert encode_chat(tokenizer, template.render(messages)) == ids
        assert tokenizer.apply_chat_template(messages) == ids
    assert (
        tokenizer.apply_chat_template([USER], tokenize=False, chat_template="{{ messages[0].content }}")
        == (USER["content"])
    )


@pytest.mark.parametrize("source", ["{{ bos_token }}" + CHAT_TEMPLATE, CHAT_TEMPLATE.replace("<|im_start|>", "#")])
def test_bos_comes_from_the_template_alone(source: str, tmp_path: Path) -> None:
    """Even where the tokenizer puts BOS before a plain text: never twice."""
    from transformers import AutoTokenizer

    tiny_tokenizer().save_pretrained(tmp_path)
    framed = load_tokenizer(tmp_path)
    frame_with(framed.backend, "<|endoftext|>", None)
    framed.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(source.replace("bos_token", "unk_token"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("x")[0] == 0
    ids = tokenizer.apply_chat_template([USER])
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    assert ids == oracle.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert ids.count(0) == source.count("bos_token")


# Content


def test_parts_give_what_the_string_gives() -> None:
    template = ChatTemplate(CHAT_TEMPLATE)
    for role in ("system", "user", "assistant", "tool"):
        parts = [{"type": "text", "text": "A"}]
        assert template.render([{"role": role, "content": parts}]) == template.render([{"role": role, "content": "A"}])
    two = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert template.render([{"role": "user", "content": two}]) == template.render([{"role": "user", "content": "A\nB"}])


@pytest.mark.parametrize("content", [None, [], ""])
def test_an_assistant_may_say_nothing(content: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [
        USER,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        USER,
    ]
    assert "<|im_start|>assistant\n<|im_end|>" in ChatTemplate(CHAT_TEMPLATE).render(messages)
    del messages[1]["content"]
    assert "<|im_start|>assistant\n<|im_end|>" in ChatTemplate(CHAT_TEMPLATE).render(messages)
    assert call["function"] == {"name": "f", "arguments": '{"a": [1]}'}


@pytest.mark.parametrize(
    ("arguments", "shown"), [('{"b": 1, "a": "é"}', "b=1 a=é "), ({"a": 2}, "a=2 "), ("", ""), (None, "")]
)
def test_tool_call_arguments_are_objects(arguments: Any, shown: str) -> None:
    source = (
        "{% for key, value in messages[0].tool_calls[0].function.arguments.items() %}{{ key }}={{ value }} {% endfor %}"
    )
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    assert ChatTemplate(source).render([message]) == shown


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}], "messages[0].content[1].type"),
        ([{"role": "user", "content": [{"type": "nope"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{bad"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_malformed_messages_are_refused_by_place(messages: Any, place: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(CHAT_TEMPLATE).render(messages)
    assert caught.value.param == place
    assert caught.value.message.startswith(f"{place} is ")


@pytest.mark.parametrize("part", [{"role": "user"}, {"role": "assistant"}])
def test_a_refusal_is_short_however_deep_or_wide_the_value(part: dict[str, str]) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for content in (deep, {"a": deep}, [{"type": deep}], [list(range(100_000))]):
        with pytest.raises(InvalidRequestError) as caught:
            ChatTemplate(CHAT_TEMPLATE).render([{**part, "content": content}])
        assert len(caught.value.message) < 300


# continue_final_message

PREFILL = {"role": "assistant", "content": "My guess would be "}


@pytest.mark.parametrize("source", [SMOL, CHAT_TEMPLATE, TRIMMING])
@pytest.mark.parametrize("content", ["My guess would be ", "x\n\n", ""])
def test_a_continued_message_ends_the_prompt_as_it_stands(source: str, content: str) -> None:
    source, messages = text_of(source), [USER, {"role": "assistant", "content": content}]
    text = of_smol(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith(content)
    if content:  # transformers drops blanks at the end where the template trims
        theirs = apply(source, messages, add_generation_prompt=False, continue_final_message=True)
        assert text == theirs if source != TRIMMING else text.rstrip() == theirs
    assert messages[1]["content"] == content


def test_a_continued_message_may_come_in_parts() -> None:
    parts = {"role": "assistant", "content": [{"type": "text", "text": "A "}]}
    text = ChatTemplate(CHAT_TEMPLATE).render([USER, parts], add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nA ")


@pytest.mark.parametrize(
    ("messages", "generation", "message"),
    [
        ([USER, PREFILL], True, "continue_final_message and add_generation_prompt are both true"),
        ([PREFILL, USER], False, "the last message's role is 'user'; it must be 'assistant'"),
    ],
)
def test_contradictory_continuations_are_refused(messages: Any, generation: bool, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        ChatTemplate(CHAT_TEMPLATE).render(messages, add_generation_prompt=generation, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_a_template_that_leaves_out_the_content_cannot_continue_it() -> None:
    with pytest.raises(ChatTemplateError, match="leaves out the last message's content"):
        ChatTemplate("{{ messages[0].role }}").render(
            [PREFILL], add_generation_prompt=False, continue_final_message=True
        )


# What goes wrong

RAISING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "system", "content": "x"}, USER], "No system role"),
        ([USER, USER], "Roles must alternate"),
        ([USER, {"role": "system", "content": "x"}], "No system role"),
    ],
)
def test_a_template_that_refuses_is_a_bad_request(messages: Any, message: str) -> None:
    template = ChatTemplate(RAISING)
    with pytest.raises(ChatTemplateError) as caught:
        template.render(messages)
    assert (caught.value.message, caught.value.status) == (message, 400)
    assert template.render([USER, ASSISTANT, USER]) == USER["content"] + ASSISTANT["content"] + USER["content"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ 'a' + none }}",
        "{{ nothing.at.all }}",
        "{{ nothing | tojson }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_a_bad_request(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template failed: "):
        ChatTemplate(source).render([USER])


def test_reserved_variables_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="must not contain 'messages'"):
        ChatTemplate(CHAT_TEMPLATE).render([USER], **{"messages": []})


def tokenizer_with(template: str | None) -> Tokenizer:
    return Tokenizer(tiny_tokenizer().backend_tokenizer, special_tokens={"bos_token": "<s>"}, chat_template=template)


def test_syntax_errors_say_where(tmp_path: Path) -> None:
    file = tmp_path / "broken.jinja"
    file.write_text("fine\n{% if %}\n")
    with pytest.raises(ConfigError, match=r"broken\.jinja, line 2: "):
        load_chat_template(str(file), tokenizer_with(None))
    with pytest.raises(ConfigError, match=r"the model's chat template, line 1: "):
        load_chat_template(None, tokenizer_with("{{ x | nofilter }}"))


def test_an_override_is_a_file_or_the_text_itself(tmp_path: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("file {{ bos_token }}\n")
    for override, text in [(str(file), "file <s>"), ("text {{ bos_token }}", "text <s>"), (None, "own")]:
        template = load_chat_template(override, tokenizer_with("own"))
        assert template is not None and template.render([USER]) == text
    long = "{# " + "x" * 5000 + " #}long"
    template = load_chat_template(long, tokenizer_with(None))
    assert template is not None and template.render([USER]) == "long"


@pytest.mark.parametrize("override", ["no/such/file.jinja", "x" * 5000, "a\0b"])
def test_an_override_that_is_neither_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="chat_template") as caught:
        load_chat_template(override, tokenizer_with(None))
    assert caught.value.param == "chat_template"


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "latin.jinja"
    file.write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"latin\.jinja' cannot be read"):
        load_chat_template(str(file), tokenizer_with(None))


def test_no_template_at_all() -> None:
    template = load_chat_template(None, tokenizer_with(None))
    assert template is None
    with pytest.raises(ChatTemplateError, match="--chat-template") as caught:
        require_chat_template(template)
    assert isinstance(caught.value, ValueError) and caught.value.status == 400
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer_with(None).apply_chat_template([USER])
