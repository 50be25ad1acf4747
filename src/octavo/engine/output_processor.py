"""From the engine's news (TokenDeltas) to what a caller sees (RequestOutputs).

Owns the text, logprobs and times of every live request, the stop strings, and the merging of n samples into one output.
It does not know who waits for an output: a request keeps what is new until `take_output` asks for it, so a slow reader
gets fewer, larger outputs. Who does not read at all is slow_readers.py's.
"""

from __future__ import annotations

import copy
import logging
import time
from itertools import zip_longest
from typing import TYPE_CHECKING

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.logprob_dict import TokenText, as_logprob_dict
from octavo.engine.slow_readers import continuation
from octavo.engine.step_news import StepNews
from octavo.request import (
    CompletionOutput,
    EngineRequest,
    FinishReason,
    Logprob,
    PromptProgress,
    RequestMetrics,
    RequestOutput,
)

if TYPE_CHECKING:
    from octavo.engine.input_processor import ProcessedRequest
    from octavo.engine.messages import TokenDelta
    from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FORGOTTEN: dict[int, Logprob] = {}  # in the place of logprobs that were handed out


class SampleState:
    """One of a request's n samples: everything it has said so far. Written only by OutputProcessor."""

    def __init__(self, request: RequestState, source: EngineRequest, tokenizer: Tokenizer) -> None:
        params = source.params
        self.request = request
        self.source = source
        self.token_ids: list[int] = []
        is_beam = source.beams is not None  # its logprobs are the search's, not the caller's
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None or is_beam else []
        self.cumulative_logprob = 0.0
        self.score: float | None = None  # of a beam
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_preemptions = 0
        self.first_scheduled_time: float | None = None  # this and the other times: time.time(), seconds
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.finished_time: float | None = None
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, source.prompt_token_ids, params) if params.detokenize else None
        )
        self._num_taken = 0  # tokens already handed out in a delta
        self._taken_logprob = 0.0  # the sum of theirs, which are forgotten
        self._end_taken = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_unread(self) -> int:
        """Tokens that came after the last delta was taken."""
        return len(self.token_ids) - self._num_taken

    def apply(self, delta: TokenDelta, token_text: TokenText) -> bool:
        """Take a delta in. True: a stop string ended the sample here, and the engine has yet to learn of it."""
        self.num_preemptions = max(self.num_preemptions, delta.num_preemptions)
        if self.first_scheduled_time is None and delta.first_scheduled_time is not None:
            self.first_scheduled_time = delta.first_scheduled_time
            self.request.metrics.note_scheduled(delta.first_scheduled_time)
        self.token_ids += delta.token_ids
        if self.logprobs is not None and delta.logprobs is not None:
            self.logprobs += [as_logprob_dict(entry, token_text) for entry in delta.logprobs]
            for entry in delta.logprobs:
                self.cumulative_logprob += entry.logprobs[0]
        stop_string = self._append_text(delta)
        if stop_string is not None:
            self._trim()
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop_string
            self._name_calls()
            return delta.finish_reason is None
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self._name_calls()
        return False

    def end(self, reason: FinishReason) -> None:
        """End it here and now; text that was held back for a stop string is let go."""
        if self._detokenizer is not None:
            self._detokenizer.finish()
        self.finish_reason = reason

    def _name_calls(self) -> None:
        """Who stops to have tools called ends for that reason."""
        calls_tools = self.request.calls_tools
        if self.finish_reason is not FinishReason.STOP or calls_tools is None or self._detokenizer is None:
            return
        if calls_tools(self._detokenizer.text):
            self.finish_reason = FinishReason.TOOL_CALLS

    def _append_text(self, delta: TokenDelta) -> str | None:
        """The stop string that the new text completes, if any."""
        detokenizer = self._detokenizer
        if detokenizer is None:
            return None
        # The token that ends a request is no part of what it says; the detokenizer decides whether it shows.
        stop_token_id = delta.token_ids[-1] if delta.finish_reason is FinishReason.STOP and delta.token_ids else None
        stop_string = detokenizer.append(delta.token_ids if stop_token_id is None else delta.token_ids[:-1])
        if stop_string is None and delta.finish_reason is not None:
            stop_string = detokenizer.finish(stop_token_id)
        return stop_string

    def _trim(self) -> None:
        """Drop the tokens after the stop string."""
        assert self._detokenizer is not None
        num_kept = self._detokenizer.num_kept_tokens
        del self.token_ids[num_kept:]
        if self.logprobs is not None:
            del self.logprobs[num_kept:]
            self.cumulative_logprob = self._sum_logprobs(self._num_taken, num_kept)

    def _sum_logprobs(self, start: int, end: int) -> float:
        """Of the tokens before `end`; those before `start` have been taken."""
        assert self.logprobs is not None
        total = self._taken_logprob
        for token_id, entry in zip(self.token_ids[start:end], self.logprobs[start:end], strict=True):
            total += entry[token_id].logprob
        return total

    def take_delta(self) -> CompletionOutput | None:
        """What is new since the last call; None when nothing is."""
        start, end = self._num_taken, self._num_shown
        text = self._detokenizer.take_delta() if self._detokenizer is not None else ""
        if not text and end == start and (self._end_taken or not self.finished):
            return None
        self._num_taken, self._end_taken = end, self.finished
        output = self._output(text, start, end)
        if self.logprobs is not None:  # by far the most of what a long stream would keep
            self._taken_logprob = self._sum_logprobs(start, end)
            self.logprobs[start:end] = [FORGOTTEN] * (end - start)
        return output

    @property
    def _num_shown(self) -> int:
        """Tokens that a caller may see: those whose text could yet be cut off by a stop string are held back."""
        if self._detokenizer is None or self.finished:
            return len(self.token_ids)
        return self._detokenizer.num_released_tokens

    def output(self) -> CompletionOutput:
        return self._output(self._detokenizer.text if self._detokenizer is not None else "", 0, self._num_shown)

    def _output(self, text: str, start: int, end: int) -> CompletionOutput:
        return CompletionOutput(
            index=self.source.sample_index,
            text=text,
            token_ids=self.token_ids[start:end],
            cumulative_logprob=None if self.logprobs is None and self.score is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[start:end],
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
            score=self.score,
        )


class RequestState:
    """A caller's request: its n samples and what they share."""

    def __init__(self, processed: ProcessedRequest, tokenizer: Tokenizer) -> None:
        first = processed.samples[0]
        self.request_id = processed.request_id
        self.prompt = processed.prompt
        self.prompt_token_ids = first.prompt_token_ids
        self.params = first.params
        self.seed = first.seed
        self.calls_tools = processed.calls_tools
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.num_cached_tokens: int | None = None  # of the first sample: the others find its prompt in the cache
        self.error: str | None = None  # of the first sample that failed
        self.embedding: bytes | None = None
        self.metrics = RequestMetrics(first.arrival_time)  # of all samples: the first to begin, the last to end
        self.samples = [SampleState(self, source, tokenizer) for source in processed.samples]
        self.num_unfinished = len(self.samples)
        self._num_computed_tokens = -1  # of the prompt, as far as reported
        self._new_progress: PromptProgress | None = None
        self._end_taken = False

    @property
    def finished(self) -> bool:
        return self.num_unfinished == 0

    def note_progress(self, delta: TokenDelta, now: float) -> None:
        """A prompt that is computed again, after a preemption or by the next engine, says nothing before it is further
        than it was."""
        computed = delta.num_computed_tokens
        if computed is None or computed <= self._num_computed_tokens:
            return
        self._num_computed_tokens = computed
        if self.num_cached_tokens is None:
            self.num_cached_tokens = delta.num_cached_tokens
        begin = self.metrics.first_scheduled_time or delta.first_scheduled_time or now
        self._new_progress = PromptProgress(
            len(self.prompt_token_ids), self.num_cached_tokens, computed, max(0.0, now - begin)
        )

    def unfold(self, delta: TokenDelta) -> list[tuple[SampleState, TokenDelta]]:
        """The end of a beam search is news for all its samples: each with its own."""
        hypotheses = (delta.hypotheses or [])[: len(self.samples)]
        if hypotheses and len(hypotheses) < len(self.samples):  # a vocabulary smaller than the beam is wide
            self.num_unfinished -= len(self.samples) - len(hypotheses)
            del self.samples[len(hypotheses) :]
        unfolded = []
        for beam, hypothesis in zip_longest(self.samples, hypotheses):
            news = copy.copy(delta)
            if hypothesis is not None:
                beam.score, beam.cumulative_logprob = hypothesis.score, hypothesis.cumulative_logprob
                news.token_ids, news.finish_reason = hypothesis.token_ids, hypothesis.finish_reason
            unfolded.append((beam, news))
        return unfolded

    def take_output(self) -> RequestOutput | None:
        """What the caller is to see now, by `params.output_kind`; None when there is nothing new for it."""
        kind = self.params.output_kind
        if self._end_taken or (kind == "final_only" and not self.finished):
            return None
        if kind == "delta":
            outputs = [output for sample in self.samples if (output := sample.take_delta()) is not None]
            if not outputs and self._new_progress is None:
                return None
        else:
            outputs = [sample.output() for sample in self.samples]
        self._end_taken = self.finished
        progress, self._new_progress = self._new_progress, None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            seed=self.seed,
            error=self.error,
            prompt_progress=progress,
            embedding=self.embedding,
        )


class OutputProcessor:
    """The live requests, by the engine's request ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._samples: dict[str, SampleState] = {}

    @property
    def num_unfinished(self) -> int:
        """Samples that still run or wait."""
        return len(self._samples)

    def add(self, processed: ProcessedRequest) -> RequestState:
        """From here on, deltas of its samples are followed."""
        request = RequestState(processed, self._tokenizer)
        for sample in request.samples:
            self._samples.setdefault(sample.source.request_id, sample)  # beams share one
        return request

    def process(self, deltas: list[TokenDelta]) -> StepNews:
        """Take in one step's deltas. A sample that fails here (a detokenizer's fault) ends alone."""
        news = StepNews()
        now = time.time()
        updated: dict[int, RequestState] = {}
        for delta in deltas:
            sample = self._samples.get(delta.request_id)
            if sample is None:
                continue  # ended by a stop string or an abort while the engine was still at it
            if sample.source.beams is None:
                self._take(sample, delta, now, news)
            else:
                for beam, its_delta in sample.request.unfold(delta):
                    self._take(beam, its_delta, now, news)
            updated[id(sample.request)] = sample.request
        news.updated = list(updated.values())
        return news

    def _take(self, sample: SampleState, delta: TokenDelta, now: float, news: StepNews) -> None:
        self._note_times(sample, delta, now, news)
        if self._apply(sample, delta):
            news.to_abort.append(delta.request_id)
        if sample.finished:
            self._finish(sample, now)
            news.finished.append(sample)
            if sample.last_token_time is None and sample.finish_reason is not FinishReason.ERROR:
                sample.request.embedding = delta.embedding
                news.count_prompt(sample, delta)  # all that was wanted

    def abort(self, request: RequestState) -> StepNews:
        """End what still lives of a request. Its `to_abort` goes to the engine."""
        news, now = StepNews(updated=[request]), time.time()
        for sample in request.samples:
            if not sample.finished:
                sample.end(FinishReason.ABORT)
                self._finish(sample, now)
                news.finished.append(sample)
                news.to_abort.append(sample.source.request_id)
        return news

    def pause(self, request: RequestState) -> list[str]:
        """Follow it no more until `resume`. The engine's ids of what it is to leave."""
        request_ids = [sample.source.request_id for sample in request.samples if not sample.finished]
        for request_id in request_ids:
            del self._samples[request_id]
        return request_ids

    def resume(self, request: RequestState) -> list[EngineRequest]:
        """Follow it again: what the engine is to be given."""
        unfinished = [sample for sample in request.samples if not sample.finished]
        for sample in unfinished:
            sample.source = continuation(sample)
            self._samples[sample.source.request_id] = sample
        return [sample.source for sample in unfinished]

    def drop_all(self) -> list[str]:
        """Forget every live request. The engine's ids of what was still alive."""
        request_ids = list(self._samples)
        self._samples.clear()
        return request_ids

    def _apply(self, sample: SampleState, delta: TokenDelta) -> bool:
        """Whether the engine has to be told that the sample is over."""
        request = sample.request
        token_text = self._tokenizer.token_text if request.params.detokenize else no_text
        try:
            if delta.error is not None:
                sample.finish_reason = FinishReason.ERROR
                request.error = request.error or delta.error
                return False
            if request.num_cached_tokens is None and (delta.token_ids or delta.finish_reason):
                request.num_cached_tokens = delta.num_cached_tokens
            if request.prompt_logprobs is None and delta.prompt_logprobs is not None:
                request.prompt_logprobs = [None, *(as_logprob_dict(e, token_text) for e in delta.prompt_logprobs)]
            return sample.apply(delta, token_text)
        except Exception as error:
            about = {"request_id": request.request_id}
            logger.exception("request %s failed while its text was made", request.request_id, extra=about)
            sample.finish_reason, sample.stop_reason = FinishReason.ERROR, None
            request.error = request.error or f"its text could not be made ({type(error).__name__})"
            return delta.finish_reason is None

    def _finish(self, sample: SampleState, now: float) -> None:
        sample.finished_time = now
        request = sample.request
        request.num_unfinished -= 1
        if request.finished:
            request.metrics.finished_time = now
        self._samples.pop(sample.source.request_id, None)

    @staticmethod
    def _note_times(sample: SampleState, delta: TokenDelta, now: float, news: StepNews) -> None:
        if not delta.token_ids:
            sample.request.note_progress(delta, now)
            return
        news.num_output_tokens += len(delta.token_ids)
        if sample.last_token_time is None:
            sample.first_token_time = now
            sample.request.note_progress(delta, now)
            metrics = sample.request.metrics
            metrics.first_token_time = metrics.first_token_time or now
            news.count_prompt(sample, delta)
            news.times_to_first_token.append(max(0.0, now - sample.source.arrival_time))
        else:
            news.inter_token_latencies.append(max(0.0, now - sample.last_token_time))
        sample.last_token_time = now


def no_text(token_id: int) -> None:
    return None
