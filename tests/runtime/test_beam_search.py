"""Beam search in the engine against transformers' in float32: the same beams, and scores within 1e-4."""

from __future__ import annotations

import pytest

from octavo import LLM, BeamSearchParams, SamplingParams
from support.checkpoints import tiny_llama

VOCAB = 379  # no row without a token: those would never be chosen
PROMPTS = [[5, 9, 100, 7], [3], [200 + i % 50 for i in range(40)], [17, 17, 17, 17, 17, 17]]
MAX_TOKENS = 14
PAD = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Many end tokens, so that beams do end on the way.
    return tiny_llama(tmp_path_factory.mktemp("beams"), vocab=VOCAB, eos_token_id=list(range(4, VOCAB, 6)), seed=3)


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), max_model_len=256, num_gpu_blocks_override=400, num_threads=2)


@pytest.fixture(scope="module")
def oracle(folder):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def search(prompt, params, end_token_ids):
        with torch.inference_mode():
            found = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=params.beam_width,
                num_return_sequences=params.beam_width,
                max_new_tokens=params.max_tokens,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                eos_token_id=end_token_ids or None,
                pad_token_id=PAD,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
        return [
            (sequence[len(prompt) :], score)
            for sequence, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True)
        ]

    return search


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.5, -0.5])
@pytest.mark.parametrize("beam_width", [2, 4, 8])
def test_beams_are_those_of_transformers(llm, oracle, beam_width, length_penalty, early_stopping):
    params = BeamSearchParams(
        beam_width=beam_width, max_tokens=MAX_TOKENS, length_penalty=length_penalty, early_stopping=early_stopping
    )
    end_token_ids = llm._inputs._eos_token_ids
    num_ended = 0
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params, use_tqdm=False), strict=True):
        expected = oracle(prompt, params, end_token_ids)
        assert len(output.sequences) == beam_width
        for beam, (token_ids, score) in zip(output.sequences, expected, strict=True):
            generated = beam.tokens[len(prompt) :]
            assert beam.tokens[: len(prompt)] == prompt
            padding = [PAD] * (len(token_ids) - len(generated))
            assert generated + padding == token_ids
            assert beam.score == pytest.approx(score, abs=1e-4)
            assert (generated[-1] in end_token_ids) == (beam.finish_reason == "stop")
            num_ended += beam.finish_reason == "stop"
    assert num_ended  # else the rules for beams that end were not tried


def test_ignored_end_tokens(llm, oracle):
    params = BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS, ignore_eos=True)
    (output,) = llm.beam_search(PROMPTS[0], params, use_tqdm=False)
    expected = oracle(PROMPTS[0], params, [])
    assert [beam.tokens[len(PROMPTS[0]) :] for beam in output.sequences] == [token_ids for token_ids, _ in expected]
    assert [beam.score for beam in output.sequences] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_one_beam_is_greedy_decoding(llm):
    params = BeamSearchParams(beam_width=1, max_tokens=MAX_TOKENS, ignore_eos=True)
    (output,) = llm.beam_search(PROMPTS[2], params, use_tqdm=False)
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    sample = llm.generate(PROMPTS[2], greedy, use_tqdm=False)[0].outputs[0]
    assert output.sequences[0].tokens == PROMPTS[2] + list(sample.token_ids)
    assert output.sequences[0].cum_logprob == pytest.approx(sample.cumulative_logprob)


def test_temperature_flattens_the_distribution_that_is_searched(llm):
    scores = []
    for temperature in (0.0, 1.0, 4.0):
        params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True, temperature=temperature)
        scores.append([beam.score for beam in llm.beam_search(PROMPTS[0], params, use_tqdm=False)[0].sequences])
    assert scores[0] == scores[1]
    assert all(flat < sharp for flat, sharp in zip(scores[2], scores[0], strict=True))


def test_a_step_of_the_search_is_a_fork_not_a_computation(llm):
    """One row of one token for each beam, whatever the prompt's length; and blocks are shared."""
    engine = llm._engine
    prompt = list(range(100, 164))
    plans, used = [], []
    schedule = engine.scheduler.schedule

    def spy():
        plans.append(schedule())
        used.append(engine.scheduler.kv.pool.num_used)
        return plans[-1]

    engine.scheduler.schedule = spy
    try:
        llm.beam_search(prompt, BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True), use_tqdm=False)
    finally:
        engine.scheduler.schedule = schedule
    assert [plan.num_scheduled_tokens for plan in plans] == [64] + [4] * 11
    assert max(used) <= 64 // 16 + 4  # the prompt's blocks once, and one of its own for each beam
    assert engine.scheduler.kv.pool.num_used == 0
