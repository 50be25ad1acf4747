"""The cases that need BOS and SentencePiece: a GGUF file that says a script, with and without a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ChatTemplateError
from support.checkpoints import chain_llama, spm_processor, tiny_tokenizer, write_gguf
from support.served import ServerProcess

CHAT = "/v1/chat/completions"
BOS, END = 1, 2
PROMPT = "Once upon a time"
SAID = " the lazy dog 日"  # each token stands once; the last character is three byte tokens
VOCAB = len(tiny_tokenizer())  # chain_llama's

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}Once upon a time"
# Refuses a system role, one that comes late, and roles that do not alternate.
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and loop.first %}{{ raise_exception('no system role here') }}"
    "{% elif m.role == 'system' %}{{ raise_exception('a system turn must come first') }}"
    "{% elif (m.role == 'user') != (loop.index0 is even) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% endfor %}"
)
USER, ASSISTANT = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be kind."}


def spm(text: str) -> list[int]:
    """The oracle of ids. It puts a blank before a text."""
    return spm_processor(VOCAB).Encode(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spm") / "chain"
    return chain_llama(path, [spm(PROMPT)[-1], *spm(SAID.lstrip())], tokenizer=tiny_tokenizer(), end=END)


@pytest.fixture(scope="module")
def gguf(folder: Path) -> str:
    return str(write_gguf(folder.parent / "spm.gguf", folder, tokenizer="spm"))


@pytest.fixture(scope="module")
def base(gguf: str) -> Iterator[ServerProcess]:
    """A base model: no chat template. Its cache holds less than half of a context."""
    server = ServerProcess(gguf, "--block-size", "16", "--num-gpu-blocks-override", "50", "--max-model-len", "2048")
    server.wait_until_ready()
    yield server
    assert_alive(server)
    server.close()


@pytest.fixture(scope="module")
def chatty(gguf: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    template = tmp_path_factory.mktemp("template") / "strict.jinja"
    template.write_text("{{ bos_token }}" + STRICT + TURNS)
    server = ServerProcess(gguf, "--chat-template", str(template), "--num-gpu-blocks-override", "50")
    server.wait_until_ready()
    yield server
    assert_alive(server)
    server.close()


@pytest.fixture(scope="module")
def llm(gguf: str) -> Iterator[LLM]:
    with LLM(gguf, num_gpu_blocks_override=50) as llm:
        yield llm


def assert_alive(server: ServerProcess) -> None:
    assert server.process.poll() is None
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.complete(prompt="1 2 3", max_tokens=1, temperature=0)


def detokenize(server: ServerProcess, token_ids: list[int]) -> str:
    return server.post("/detokenize", tokens=token_ids).json()["prompt"]


def test_text_7_blanks_of_sentencepiece_survive_the_stream(base):
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
    whole = base.complete(**body, return_token_ids=True)
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (SAID, "stop")
    pieces = [chunk["choices"][0]["text"] for chunk in base.chunks(**body)]
    assert "".join(pieces) == SAID and pieces[0].startswith(" ") and "\ufffd" not in "".join(pieces)
    prompt, output = choice["prompt_token_ids"], choice["token_ids"]
    assert prompt == [BOS, *spm(PROMPT)] and output == [*spm(SAID.lstrip()), END]
    assert detokenize(base, prompt + output[:-1]) == detokenize(base, prompt) + SAID


def test_text_7_also_where_no_blank_is_put_before_a_text(folder, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", folder, tokenizer="spm", metadata={"tokenizer.ggml.add_space_prefix": False})
    with LLM(str(path), num_gpu_blocks_override=50) as llm:
        tokenizer = llm.get_tokenizer()
        (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=60))
        assert output.outputs[0].text == SAID
        assert tokenizer.decode(output.prompt_token_ids) == PROMPT
        assert tokenizer.decode([*output.prompt_token_ids, *output.outputs[0].token_ids]) == PROMPT + SAID


def test_batch_3_a_prompt_larger_than_the_cache_is_refused(base):
    response = base.post("/v1/completions", prompt=[5] * 1002, max_tokens=1, timeout=5)
    assert response.status_code == 400
    assert "1002 tokens" in response.json()["error"]["message"] and "800" in response.json()["error"]["message"]
    base.complete(prompt=PROMPT, max_tokens=1)


def test_batch_6_an_empty_text_is_bos(base):
    assert base.complete(prompt="", max_tokens=1)["usage"]["prompt_tokens"] == 1
    answer = base.complete(prompt=["a", ""], max_tokens=1, return_token_ids=True)
    assert answer["choices"][1]["prompt_token_ids"] == [BOS]
    for prompt in ([], [[]], [[1], []]):
        assert base.post("/v1/completions", prompt=prompt, max_tokens=1).status_code == 400


def test_api_10_without_a_chat_template_only_chat_is_refused(base):
    assert base.complete(prompt=PROMPT, max_tokens=3)["choices"][0]["text"]
    for path in (CHAT, "/tokenize"):
        response = base.post(path, messages=[USER])
        assert response.status_code == 400 and "no chat template" in response.json()["error"]["message"]


def test_api_10_a_chat_template_file_cures_it(chatty):
    assert chatty.chat(messages=[USER], temperature=0)["choices"][0]["message"]["content"] == SAID


def test_api_10_the_llm_says_what_is_missing(llm):
    with pytest.raises(ChatTemplateError, match="no chat template") as caught:
        llm.chat([USER])
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([SYSTEM, USER], "no system role here"),
        ([USER, USER], "roles must alternate"),
        ([USER, ASSISTANT, SYSTEM, USER], "a system turn must come first"),
        ([USER, ASSISTANT, USER], None),
    ],
)
def test_api_9_what_the_template_refuses_is_a_400(chatty, messages, said):
    response = chatty.post(CHAT, messages=messages, max_tokens=1)
    assert response.status_code == (400 if said else 200)
    if said:
        assert said in response.json()["error"]["message"]


def test_load_6_bos_comes_once(chatty, llm):
    expected = [BOS, *spm(f"user: Hello\n{PROMPT}")]
    assert chatty.post("/tokenize", messages=[USER]).json()["tokens"] == expected
    answer = chatty.chat(messages=[USER], max_tokens=1, return_token_ids=True)
    assert answer["prompt_token_ids"] == expected
    (output,) = llm.chat([USER], SamplingParams(max_tokens=1), chat_template="{{ bos_token }}" + TURNS)
    assert output.prompt_token_ids == expected


def test_load_6_without_bos_in_the_template_there_is_none(llm):
    (output,) = llm.chat([USER], SamplingParams(max_tokens=1), chat_template=TURNS)
    assert output.prompt_token_ids == spm(f"user: Hello\n{PROMPT}")
