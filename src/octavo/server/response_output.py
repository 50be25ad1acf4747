"""The output of a response: items, and the events that tell of them while they come.

One item for each part of the answer: a message with one part, the text, or a call. Of an answer that says nothing, an
empty message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from octavo.request import CompletionOutput
from octavo.server import answers
from octavo.server.answers_tools import FunctionCall
from octavo.server.response_items import call_of, output_message
from octavo.server.tool_calls import AnswerReader, Part
from octavo.server.tools import Tools

Event = tuple[str, dict[str, Any]]  # its kind, and its fields


class ResponseOutput:
    """`names`: of functions that have a namespace, that and their own name."""

    def __init__(self, tools: Tools, names: Mapping[str, tuple[str, str]]) -> None:
        self.response_id = ""  # to be given before the first event
        self._names = names
        self._reader = AnswerReader(tools, "call_")
        self._open: Part | None = None

    def take(self, sample: CompletionOutput) -> Iterator[Event]:
        """The events of what is new. They have to be gone through, also where nobody is told of them."""
        for news in self._reader.take(sample):
            part = news.part
            if news.is_new:
                yield from self._close("completed")
                yield from self._begin(part)
            if news.text:
                yield self._delta(part, news.text)

    def end(self, status: str) -> Iterator[Event]:
        """The events of the end. What was being said last has the response's status."""
        if not self._reader.parts:
            self._reader.parts.append(Part(0))
            yield from self._begin(self._reader.parts[0])
        yield from self._close(status)

    def items(self, status: str) -> list[answers.OutputItem]:
        last = len(self._reader.parts) - 1
        return [self._item(part, status if part.position == last else "completed") for part in self._reader.parts]

    def message(self) -> dict[str, Any]:
        """What it is when it comes back as input."""
        calls = [call_of(call.id, call.name or "", call.text) for call in self._reader.calls]
        return output_message(self._reader.text, calls)

    def _begin(self, part: Part) -> Iterator[Event]:
        self._open = part
        item = self._item(part, "in_progress", is_new=True)
        yield "response.output_item.added", {"output_index": part.position, "item": item}
        if part.name is None:
            yield "response.content_part.added", {**self._place(part), "part": _text_part("")}

    def _delta(self, part: Part, text: str) -> Event:
        if part.name is None:
            return "response.output_text.delta", {**self._place(part), "delta": text, "logprobs": []}
        return "response.function_call_arguments.delta", {**self._place(part), "delta": text}

    def _close(self, status: str) -> Iterator[Event]:
        part, self._open = self._open, None
        if part is None:
            return
        place, item = self._place(part), self._item(part, status)
        if part.name is None:
            yield "response.output_text.done", {**place, "text": part.text, "logprobs": []}
            yield "response.content_part.done", {**place, "part": _text_part(part.text)}
        else:
            name = self._names.get(part.name, ("", part.name))[1]
            yield "response.function_call_arguments.done", {**place, "name": name, "arguments": part.text}
        yield "response.output_item.done", {"output_index": part.position, "item": item}

    def _place(self, part: Part) -> dict[str, Any]:
        place = {"item_id": self._id_of(part), "output_index": part.position}
        return {**place, "content_index": 0} if part.name is None else place

    def _id_of(self, part: Part) -> str:
        own = "" if part.position == 0 else f"_{part.position}"
        return f"{'msg' if part.name is None else 'fc'}_{self.response_id.removeprefix('resp_')}{own}"

    def _item(self, part: Part, status: str, *, is_new: bool = False) -> answers.OutputItem:
        text = "" if is_new else part.text
        if part.name is None:
            content = [] if is_new else [_text_part(text)]
            return {
                "id": self._id_of(part),
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": content,
            }
        namespace, name = self._names.get(part.name, (None, part.name))
        item: FunctionCall = {
            "id": self._id_of(part),
            "type": "function_call",
            "status": status,
            "call_id": part.id,
            "name": name,
            "arguments": text,
        }
        if namespace is not None:
            item["namespace"] = namespace
        return item


def _text_part(text: str) -> answers.OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
