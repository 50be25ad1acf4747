"""Small checkpoints for the tests, written by the libraries that octavo is measured against (transformers, gguf).

tiny_llama   a random Llama or Mistral folder whose logits are well separated
chain_llama  a Llama folder that says a script, whatever the sampling (so that text can be checked exactly)
write_gguf   the same weights as a .gguf file, in any block type
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from support.blocks import block_columns, random_blocks
from support.smollm2 import smol_tokenizer

CORPUS = (
    "The quick brown fox jumps over the lazy dog. Once upon a time there was a small engine that could. "
    "Hello world, how are you today? 1 2 3 4 5 6 7 8 9 10; naïve café, 日本語, Привет мир! "
    "def add(a, b):\n    return a + b\n"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@functools.cache
def tiny_tokenizer() -> Any:
    """A byte-level BPE of 3 special tokens, 256 bytes and 120 merges, trained on CORPUS (milliseconds).

    Ids 0, 1, 2 are <|endoftext|>, <|im_start|> and <|im_end|> (the end token), as in SMOL.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=379,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
    dtype: str = "float32",
    tie: bool = False,
    seed: int = 0,
    architecture: str = "llama",
    **config_overrides: Any,
) -> Any:
    """A random transformers model. Its logits spread by about 2, so that the best token leads by far more than
    rounding; every parameter, norms and biases too, is random."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
    }[architecture]
    options: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    model = model_class(config_class(**{**options, **config_overrides}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(1 + 0.2 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(2 * noise / hidden**0.5)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    return model.to(getattr(torch, dtype)).eval()


def tiny_llama(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
    dtype: str = "float32",
    tie: bool = False,
    seed: int = 0,
    tokenizer: Any = None,
    max_shard_size: str | int = "5GB",
    **config_overrides: Any,
) -> Path:
    """Save `tiny_model(...)` and its tokenizer (default: tiny_tokenizer()) as a Hugging Face folder.

    `vocab` is at least the tokenizer's; `architecture="mistral"` and any field of the config may be given.
    """
    tokenizer = tokenizer or tiny_tokenizer()
    model = tiny_model(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        vocab=max(vocab, len(tokenizer)),
        dtype=dtype,
        tie=tie,
        seed=seed,
        **config_overrides,
    )
    model.save_pretrained(path, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(path)
    return path


def chain_llama(
    path: Path,
    pieces: Sequence[str | int],
    alts: Mapping[str | int, str | int] | None = None,
    *,
    tokenizer: Any = None,
    end: str | int | None = 2,
) -> Path:
    """A Llama that says `pieces[1:]` after a prompt that ends in `pieces[0]`, then the token `end`.

    A piece is text that must be exactly one token of the tokenizer (default: SMOL's), or a token id. Each token has
    one successor, so a piece may stand only once, but the last may repeat an earlier one: the script then loops, and
    `end` is not used. The logit of the next token is 80 and all others are 0, but `alts[piece]`, the runner-up after
    that piece, has 79. A chat prompt of SMOL ends in "\\n": begin with it.
    """
    import torch

    tokenizer = tokenizer or smol_tokenizer()
    script = [_one_token(tokenizer, piece) for piece in pieces]
    if end is not None and script[-1] not in script[:-1]:
        script.append(_one_token(tokenizer, end))
    speakers = script[:-1]
    assert len(set(speakers)) == len(speakers) <= 64, "at most 64 tokens, one successor each"

    model = tiny_model(vocab=len(tokenizer), max_position_embeddings=2048, rms_norm_eps=1e-9)
    with torch.no_grad():
        model.model.embed_tokens.weight.zero_()
        model.lm_head.weight.zero_()
        model.model.norm.weight.fill_(1)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        for column, (token, successor) in enumerate(zip(speakers, script[1:], strict=True)):
            model.model.embed_tokens.weight[token, column] = 1
            model.lm_head.weight[successor, column] = 10
        for piece, alternative in (alts or {}).items():
            column = speakers.index(_one_token(tokenizer, piece))
            model.lm_head.weight[_one_token(tokenizer, alternative), column] = 9.875
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _one_token(tokenizer: Any, piece: str | int) -> int:
    if isinstance(piece, int):
        return piece
    ids = tokenizer.encode(piece, add_special_tokens=False)
    assert len(ids) == 1, f"{piece!r} is {len(ids)} tokens: {ids}"
    return int(ids[0])


def write_gguf(
    path: Path,
    model: Path,
    types: str | Mapping[str, str] = "F32",
    *,
    tokenizer: str = "bpe",
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write the Llama folder `model` as a GGUF file, as llama.cpp's converter would.

    types      one type for every matrix, or {part of a GGUF tensor name: type}, first match, else F32. Vectors are
               F32. Where the gguf package cannot quantise to a type (the K types) the matrix gets random blocks.
    tokenizer  "bpe": the folder's byte-level BPE; "spm": a small SentencePiece vocabulary trained on CORPUS.
    metadata   {key: value} of further scalar keys (numbers, strings, booleans); they replace what is there.
    """
    import gguf
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    config = reference.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    {"bpe": _add_bpe, "spm": _add_spm}[tokenizer](writer, model, config.vocab_size)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        _add_scalar(writer, key, value)

    rng = np.random.default_rng(0)
    for name, tensor in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        gguf_name = _gguf_name(name)
        if "attn_q" in gguf_name or "attn_k." in gguf_name:
            heads = config.num_attention_heads if "attn_q" in gguf_name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if values.ndim == 1:
            writer.add_tensor(gguf_name, values)
            continue
        type = types if isinstance(types, str) else next((t for part, t in types.items() if part in gguf_name), "F32")
        raw_dtype = gguf.GGMLQuantizationType[type]
        writer.add_tensor(gguf_name, _encode(values, type, rng), raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _encode(values: np.ndarray[Any, Any], type: str, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    import gguf

    if type == "F64":
        return values.astype(np.float64)
    if values.shape[1] % block_columns(type):
        raise ValueError(f"{type} needs a multiple of {block_columns(type)} columns, not {values.shape[1]}")
    try:
        return gguf.quants.quantize(np.ascontiguousarray(values), gguf.GGMLQuantizationType[type])
    except NotImplementedError:
        return random_blocks(type, *values.shape, rng, std=float(values.std()))


def _gguf_name(name: str) -> str:
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name


def _add_scalar(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _add_bpe(writer: Any, model: Path, vocab_size: int) -> None:
    import gguf

    state = json.loads((model / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in state["added_tokens"]}
    by_id = {id: token for token, id in state["model"]["vocab"].items()} | special
    ids = range(vocab_size)
    normal, control, unused = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(id, f"[PAD{id}]") for id in ids])
    writer.add_token_types([control if id in special else normal if id in by_id else unused for id in ids])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in state["model"]["merges"]])
    config = json.loads((model / "config.json").read_text())
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_spm(writer: Any, model: Path, vocab_size: int) -> None:
    """<unk> 0, <s> 1, </s> 2, 256 bytes, then pieces with scores, as in the files of the first Llama."""
    import gguf

    processor = spm_processor(min(vocab_size, 400))
    types, texts, scores = [], [], []
    for id in range(vocab_size):
        if id >= processor.GetPieceSize():
            texts, scores, types = [*texts, f"[PAD{id}]"], [*scores, -1000.0], [*types, gguf.TokenType.UNUSED]
            continue
        kind = (
            gguf.TokenType.UNKNOWN
            if processor.IsUnknown(id)
            else gguf.TokenType.CONTROL
            if processor.IsControl(id)
            else gguf.TokenType.BYTE
            if processor.IsByte(id)
            else gguf.TokenType.NORMAL
        )
        texts.append(processor.IdToPiece(id))
        scores.append(processor.GetScore(id))
        types.append(kind)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


@functools.cache
def spm_processor(vocab_size: int = 400) -> Any:
    """The SentencePiece BPE behind write_gguf(tokenizer="spm"): the oracle of its ids."""
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(CORPUS.splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
