"""Answers of ``/v1/responses``: the object, and the events of which a stream of it consists.

Source: OpenAI's API reference (responses, streaming events).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from minisgl_core.plugin_api import CallArguments, CallBegin, CallEnd, Content, Reasoning

from .parsed import call_id, kept

if TYPE_CHECKING:
    from minisgl_core.llm import TokenLogprob
    from minisgl_core.plugin_api import ParserEvent

    from .parsing import AnswerParser
    from .responses_body import ResponsesBody

__all__ = ["ResponseShape"]

_Event = dict[str, Any]
_TEXTS: Final = {"message": ("output_text", "msg_"), "reasoning": ("reasoning_text", "rs_")}
"""Items that consist of text: the type of their parts, what their ids begin with."""


class ResponseShape:
    """One response. As a shape of a stream, its pieces are events."""

    prefix: Final = "resp_"
    name = chunk_name = "response"

    def __init__(self, parser: AnswerParser, body: ResponsesBody) -> None:
        self._parser, self._body = parser, body
        self._facts: dict[str, Any] = {}
        self._items: list[dict[str, Any]] = []
        self._open = False
        """The last item may grow."""
        self._number = 0
        self._reason: str | None = None

    def begin(self, head: Mapping[str, Any]) -> None:
        """``head``: id, created, model."""
        asked = self._body
        self._facts = {
            "id": head["id"],
            "object": "response",
            "created_at": head["created"],
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": head["model"],
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.effort, "summary": None},
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": asked.text_format},
            "tool_choice": asked.tool_choice_data,
            "tools": [tool.model_dump() for tool in asked.tools or ()],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    # ---- the shape of a stream ---------------------------------------------------------------------------------------

    def opening(self, index: int) -> _Event | None:
        """The response has been accepted."""
        return self._event("created", response=dict(self._facts))

    def deltas(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: Sequence[TokenLogprob] | None,
        stop_reason: int | str | None,
    ) -> list[_Event]:
        """The events of one piece of the answer."""
        begun = [self._event("in_progress", response=dict(self._facts))] if self._number == 1 else []
        return [*begun, *self.add(text, reason)]

    def completed(self, used: Mapping[str, Any]) -> _Event:
        """The last event."""
        response = self.whole(used)
        return self._event(response["status"], response=response)

    # ---- what a response consists of ---------------------------------------------------------------------------------

    def add(self, text: str, reason: str | None) -> list[_Event]:
        """More of the answer; ``reason``: why it ends here."""
        events = self._parser.push(text)
        if reason is not None:
            events += self._parser.finish()
        parallel = self._body.parallel_tool_calls is not False
        found = [made for event in kept(events, parallel) for made in self._of(event)]
        if reason is not None:
            self._reason = reason
            if not self._items:
                found += self._text("message", "")
            found += self._close("incomplete" if reason == "length" else "completed")
        return found

    def whole(self, used: Mapping[str, Any]) -> dict[str, Any]:
        """The response, once all of its text has been added."""
        cut = self._reason == "length"
        prompt, generated = used["prompt_tokens"], used["completion_tokens"]
        return self._facts | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": generated,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + generated,
            },
        }

    def _of(self, event: ParserEvent) -> Iterator[_Event]:
        match event:
            case Content(text):
                yield from self._text("message", text)
            case Reasoning(text):
                yield from self._text("reasoning", text)
            case CallBegin(_, name):
                yield from self._close("completed")
                item = {"type": "function_call", "id": _id("fc_"), "call_id": call_id(event), "name": name}
                yield self._add_item({**item, "arguments": "", "status": "in_progress"})
            case CallArguments(_, text):
                self._items[-1]["arguments"] += text
                yield self._event("function_call_arguments.delta", **self._place(), delta=text)
            case CallEnd():
                yield from self._close("completed")

    def _text(self, kind: str, text: str) -> Iterator[_Event]:
        part_kind, prefix = _TEXTS[kind]
        if not (self._open and self._items[-1]["type"] == kind):
            yield from self._close("completed")
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield self._add_item({"type": kind, "id": _id(prefix), "status": "in_progress", **own, "content": []})
            part: dict[str, Any] = {"type": part_kind, "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            self._items[-1]["content"] = [part]
            yield self._event("content_part.added", **self._place(), content_index=0, part=dict(part))
        self._items[-1]["content"][0]["text"] += text
        if text:
            yield self._event(f"{part_kind}.delta", **self._place(), content_index=0, delta=text, **_logprobs(kind))

    def _close(self, status: str) -> Iterator[_Event]:
        """The last item has come to its end."""
        if not self._open:
            return
        self._open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("function_call_arguments.done", **self._place(), **done)
        else:
            (part,) = item["content"]
            done = {"content_index": 0, "text": part["text"], **_logprobs(item["type"])}
            yield self._event(f"{part['type']}.done", **self._place(), **done)
            yield self._event("content_part.done", **self._place(), content_index=0, part=dict(part))
        yield self._event("output_item.done", output_index=len(self._items) - 1, item=dict(item))

    def _add_item(self, item: dict[str, Any]) -> _Event:
        self._items.append(item)
        self._open = True
        return self._event("output_item.added", output_index=len(self._items) - 1, item=dict(item))

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event(self, kind: str, **fields: Any) -> _Event:
        number, self._number = self._number, self._number + 1
        return {"type": f"response.{kind}", "sequence_number": number, **fields}


def _id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def _logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "message" else {}
