"""One request for text, from its body to its answer: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from .errors import APIError, timed_out
from .parsed import ParsedChatShape
from .parsing import AnswerParser, facts_of
from .render import ChatShape, CompletionShape, usage
from .responses import ResponseShape
from .stream import ClientGone, EventStream, merge, unless_gone

if TYPE_CHECKING:
    from starlette.requests import Request

    from minisgl_core.llm import AsyncLLM, Chunk, Completion, TokenLogprob
    from minisgl_core.llm.prompts import PreparedPrompt
    from minisgl_core.llm.stream import AsyncStream

    from .metrics import Metrics, Timing
    from .responses_body import ResponsesBody
    from .schema import ChatBody, CompletionBody, GenerationBody
    from .state import ServerState

__all__ = ["answer_chat", "answer_completion", "answer_response"]

LONG_TEXT = 1 << 14
"""Characters or token ids; the event loop would wait too long until a longer text is encoded and checked."""


async def answer_completion(request: Request, body: CompletionBody, state: ServerState, metrics: Metrics) -> Response:
    """``POST /v1/completions``"""
    llm = state.need_model()
    state.check_name(body.model)
    if not body.prompts:
        raise APIError(400, "`prompt` is an empty list; give at least one prompt", param="prompt")
    if body.stream and body.echo:
        raise APIError(400, "`echo` is given with `stream`; leave one of them out", param="echo")
    prompts = body.prompts
    state.check_room(len(prompts))  # before they are encoded
    size = sum(map(len, prompts))
    prepared = await _run(lambda: llm.prepare(prompts, body.params(), priority=body.priority or 0), body, size)
    generation = _Generation(request, state, metrics, CompletionShape(), prepared, body)
    if body.stream:
        return generation.stream(llm)
    return await generation.whole(llm, lambda answers, shape: _completion_choices(llm, body, answers, shape))


async def answer_chat(request: Request, body: ChatBody, state: ServerState, metrics: Metrics) -> Response:
    """``POST /v1/chat/completions``"""
    llm, prepared, parser = await _prepare_chat(body, state)
    shape = ChatShape() if parser is None else ParsedChatShape(parser, body.parallel_tool_calls is not False)
    generation = _Generation(request, state, metrics, shape, prepared, body)
    if body.stream:
        return generation.stream(llm)
    return await generation.whole(llm, _chat_choices)


async def answer_response(request: Request, body: ResponsesBody, state: ServerState, metrics: Metrics) -> Response:
    """``POST /v1/responses``"""
    try:
        chat = body.chat()
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error
    except ValueError as error:
        raise APIError(400, str(error), param="input") from error
    llm, prepared, parser = await _prepare_chat(chat, state)
    shape = ResponseShape(AnswerParser([]) if parser is None else parser(), body)
    generation = _ResponseGeneration(request, state, metrics, shape, prepared, body)
    if body.stream:
        return generation.stream(llm)
    return await generation.whole(llm, _chat_choices)


async def _prepare_chat(
    body: ChatBody, state: ServerState
) -> tuple[AsyncLLM, list[PreparedPrompt], Callable[[], AnswerParser] | None]:
    """The model, the prompt, and what makes a parser for each answer; None if the text is all there is."""
    llm = state.need_model()
    state.check_name(body.model)
    parsers = state.parsers_of(llm)
    tools = facts_of(body, parsers.tools)
    if tools:
        parsers.check_template((body.chat_template_kwargs or {}).get("chat_template"))
    size = sum(len(text) for message in body.messages if isinstance(text := message.get("content"), str))
    prepared = await _run(
        lambda: llm.prepare_chat(body.messages, body.params(), priority=body.priority or 0, **body.template_options()),
        body,
        size,
    )
    if not tools and parsers.reasoning is None:
        return llm, prepared, None
    seen = parsers.request(prepared[0].input_ids, tools)
    grammar = parsers.grammar(body, seen, body.parallel_tool_calls is not False)
    if grammar is not None:
        if prepared[0].params.grammar is not None:
            raise APIError(400, "a demanded call and a form of the answer exclude each other", param="tool_choice")
        prepared = await asyncio.to_thread(llm.constrain, prepared, grammar)
    prepared = [one._replace(shown=parsers.shown(bool(tools))) for one in prepared]
    return llm, prepared, lambda: parsers.open(seen)


async def _run(
    prepare: Callable[[], list[PreparedPrompt]], body: CompletionBody | ChatBody, size: int
) -> list[PreparedPrompt]:
    """On another thread where it may take long: encoding a long text, compiling a grammar."""
    if size <= LONG_TEXT and body.grammar is None:
        return prepare()
    return await asyncio.to_thread(prepare)


class _Generation:
    """The prompts of one request, whose body is checked."""

    def __init__(
        self,
        request: Request,
        state: ServerState,
        metrics: Metrics,
        shape: CompletionShape | ChatShape | ResponseShape,
        prepared: list[PreparedPrompt],
        body: GenerationBody,
    ) -> None:
        self._request, self._state, self._metrics = request, state, metrics
        self._shape, self._prepared, self._includes_usage = shape, prepared, body.includes_usage
        self._so_far = _usage_so_far(prepared, 0) if body.continuous_usage else None
        self._deadline = _deadline(body.timeout, state.options.request_timeout_s)
        self._id = request.state.request_id
        self._sequences = sum(prompt.params.n for prompt in prepared)
        self._head = {
            "id": shape.prefix + self._id,
            "created": int(time.time()),
            "model": state.options.model_name,
        }
        self._log: dict[str, Any] = request.scope["state"].setdefault("log", {})

    async def whole(self, llm: AsyncLLM, choices: _Choices) -> Response:
        """All answers at once."""
        with self._state.admit(self._id, self._sequences), self._metrics.request() as timing:
            streams = [llm.open(one) for one in self._prepared]
            timing.open(streams, self._sequences)
            try:
                async with asyncio.timeout_at(self._deadline):
                    await unless_gone(_read_all(streams, timing), self._request.receive)
            except TimeoutError:
                raise timed_out() from None
            except ClientGone:
                return Response(status_code=499)
            except asyncio.CancelledError:
                raise APIError(499, "the request was aborted", code="aborted") from None
            finally:
                for stream in streams:
                    await stream.aclose()
            answers = [stream.completion() for stream in streams]
        _raise_failure(answers)
        used = self._account(answers)
        return JSONResponse(self._body(answers, choices, used))

    def _body(self, answers: Sequence[Completion], choices: _Choices, used: dict[str, Any]) -> dict[str, Any]:
        return {"object": self._shape.name, **self._head, "choices": choices(answers, self._shape), "usage": used}

    def stream(self, llm: AsyncLLM) -> Response:
        """Chunks as they come."""
        return EventStream(self._events(llm), self._state.options.stalled_s, self._deadline)

    async def _events(self, llm: AsyncLLM) -> AsyncGenerator[dict[str, Any]]:
        with self._state.admit(self._id, self._sequences), self._metrics.request() as timing:
            streams = [llm.open(one) for one in self._prepared]
            timing.open(streams, self._sequences)
            firsts = _first_indices(self._prepared)
            try:
                for index in range(self._sequences):
                    if (opening := self._shape.opening(index)) is not None:
                        yield self._chunk([opening])
                async for which, chunk in merge(list(streams)):
                    timing.chunk(which, chunk)
                    _raise_error(chunk.error)
                    if self._so_far is not None:
                        generated = self._so_far["completion_tokens"] + len(chunk.token_ids)
                        self._so_far = _usage_so_far(self._prepared, generated)
                    for piece in self._pieces(firsts[which] + chunk.choice, chunk):
                        yield self._chunk([piece])
            finally:
                for stream in streams:
                    await stream.aclose()
            used = self._account([stream.completion() for stream in streams])
            if self._includes_usage:
                yield self._chunk([], usage=used)

    def _pieces(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        return self._shape.deltas(index, chunk.text, chunk.finish_reason, chunk.logprobs, chunk.stop_reason)

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        usages = {"usage": self._so_far} if self._includes_usage else {}
        return {"object": self._shape.chunk_name, **self._head, "choices": choices, **usages, **more}

    def _account(self, answers: Sequence[Completion]) -> dict[str, Any]:
        used = usage(answers)
        self._log |= {name: used[name] for name in ("prompt_tokens", "completion_tokens")}
        return used


class _ResponseGeneration(_Generation):
    """A stream of it consists of events, of which the last has the whole response."""

    def __init__(
        self,
        request: Request,
        state: ServerState,
        metrics: Metrics,
        shape: ResponseShape,
        prepared: list[PreparedPrompt],
        body: GenerationBody,
    ) -> None:
        super().__init__(request, state, metrics, shape, prepared, body)
        self._response, self._includes_usage = shape, True
        shape.begin(self._head)

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return choices[0] if choices else self._response.completed(more["usage"])

    def _body(self, answers: Sequence[Completion], choices: _Choices, used: dict[str, Any]) -> dict[str, Any]:
        (answer,) = answers
        self._response.add(answer.text, answer.finish_reason)
        return self._response.whole(used)


_Choices = Callable[[Sequence["Completion"], Any], list[dict[str, Any]]]


async def _read_all(streams: list[AsyncStream], timing: Timing) -> None:
    async for which, chunk in merge(list(streams)):
        timing.chunk(which, chunk)


def _deadline(wanted: float | None, allowed: float) -> float | None:
    """By the event loop's clock. ``allowed``: 0 = any time."""
    limits = [limit for limit in (wanted, allowed) if limit]
    return asyncio.get_running_loop().time() + min(limits) if limits else None


def _usage_so_far(prepared: Sequence[PreparedPrompt], generated: int) -> dict[str, int]:
    prompt = sum(len(one.input_ids) for one in prepared)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _first_indices(prepared: Sequence[PreparedPrompt]) -> list[int]:
    """Of the choices of each prompt, the first one's index among all."""
    firsts, at = [], 0
    for prompt in prepared:
        firsts.append(at)
        at += prompt.params.n
    return firsts


def _raise_failure(answers: Sequence[Completion]) -> None:
    for answer in answers:
        for choice in answer.choices or (answer,):
            _raise_error(choice.error)


def _raise_error(error: str | None) -> None:
    if error is not None:
        raise APIError(500, error)


def _chat_choices(answers: Sequence[Completion], shape: ChatShape) -> list[dict[str, Any]]:
    (answer,) = answers
    every = answer.choices or (answer,)
    return [shape.choice(i, c.text, c.finish_reason, c.logprobs, c.stop_reason) for i, c in enumerate(every)]


def _completion_choices(
    llm: AsyncLLM, body: CompletionBody, answers: Sequence[Completion], shape: CompletionShape
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for prompt, answer in zip(body.prompts, answers, strict=True):
        for choice in answer.choices or (answer,):
            text, scored, unscored = choice.text, choice.logprobs, None
            if body.echo:
                text = _text(llm, prompt) + text
                if body.logprobs is not None:
                    scored, unscored = _with_prompt(answer, scored), _first_token(llm, prompt)
            made = shape.choice(
                len(found), text, choice.finish_reason, scored, choice.stop_reason, first_unscored=unscored
            )
            found.append(made)
    return found


def _with_prompt(answer: Completion, scored: Sequence[TokenLogprob] | None) -> list[TokenLogprob]:
    return [*(answer.prompt_logprobs or ()), *(scored or ())]


def _text(llm: AsyncLLM, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return "" if llm.tokenizer is None else llm.tokenizer.decode(prompt)


def _first_token(llm: AsyncLLM, prompt: str | list[int]) -> str:
    if llm.tokenizer is None:
        return ""
    ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return llm.tokenizer.token_text(ids[0])
