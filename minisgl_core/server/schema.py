"""The bodies of requests. A field that the server does not know is refused by name; null means the default.

Sources: OpenAI's API reference (completions, chat completions); ``top_k``, ``min_p``, ``repetition_penalty``,
``ignore_eos``, ``min_tokens``, ``structured_outputs``, ``stop_token_ids``, ``chat_template_kwargs`` are named as in
vLLM.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from minisgl_core.core import SamplingParams

from .body import Body, Stops, TemplateVariables
from .response_format import ResponseFormat, StructuredOutputs, grammar_of
from .tools import NamedTool, Tool, check_tools

__all__ = [
    "NEUTRAL",
    "UNSUPPORTED",
    "AbortBody",
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "GenerationBody",
    "TokenizeBody",
]

UNSUPPORTED: dict[str, str] = {
    "best_of": "set `n`, and choose among the answers by their `logprobs`",
    "suffix": "the model cannot fill in; put all of the text into `prompt`",
    "functions": "give them as `tools`",
    "function_call": "give `tools` and `tool_choice`",
    "modalities": "only text is generated",
    "audio": "only text is generated",
    "prediction": "leave it out",
    "reasoning_effort": "give the variable that the model's template has in `chat_template_kwargs`",
    "web_search_options": "leave it out",
    "guided_json": "give it as `structured_outputs.json`",
    "guided_regex": "give it as `structured_outputs.regex`",
    "guided_choice": "give it as `structured_outputs.choice`",
    "guided_grammar": "give it as `structured_outputs.grammar`",
    "use_beam_search": "there is no beam search; set `n` and a `temperature`",
    "previous_response_id": "nothing is stored; send the whole conversation as `input`",
    "conversation": "nothing is stored; send the whole conversation as `input`",
    "store": "nothing is stored; send the whole conversation with each request",
    "background": "wait for the answer, or set `stream`",
    "include": "leave it out",
    "max_tool_calls": "the caller runs the tools, and decides how often",
    "prompt": "give its text as `instructions` and `input`",
    "truncation": "leave out what is too long",
}
"""Fields of this API that others serve: what to do here instead."""

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "early_stopping": (False,),
    "include_reasoning": (True,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "separate_reasoning": (True,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "background": (False,),
    "include": ([],),
    "store": (False,),
    "truncation": ("disabled",),
    "stream_reasoning": (True,),
    "use_beam_search": (False,),
}
"""Fields that routers and clients send along at the values that change nothing. Any other value is refused by name."""

_SAMPLING = (
    "top_p",
    "top_k",
    "min_p",
    "n",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Fields that SamplingParams has under the same names, with the same defaults."""

MAX_DIGITS = 18
"""Of a token id"""
TokenId = Annotated[int, Field(ge=0)]


class StreamOptions(Body):
    """``stream_options``"""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Stops | None = None
    stop_token_ids: list[TokenId] | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    priority: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds from the request's arrival after which it is ended with status 408."""
    user: str | None = None
    """Written to the access log; the answer does not depend on it."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_the_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if not _is_neutral(name, value)}

    @model_validator(mode="after")
    def _usage_is_of_streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` is given without `stream`; set `stream`, or leave it out")
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        grammar_of(self.response_format, self.structured_outputs)
        return self

    @property
    def grammar(self) -> dict[str, Any] | None:
        """The form of the answer, as SamplingParams takes it."""
        return grammar_of(self.response_format, self.structured_outputs)

    def sampling(self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """How to sample. Raises :class:`~minisgl_core.errors.AdmissionError` for a value out of range."""
        given: dict[str, Any] = {name: getattr(self, name) for name in _SAMPLING}
        own: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        own["grammar"] = self.grammar
        temperature = 1.0 if self.temperature is None else self.temperature
        return SamplingParams(**given, **own, temperature=temperature, logit_bias=_biases(self.logit_bias))


def _is_neutral(name: str, value: Any) -> bool:
    """JSON's true is no number, though Python's equals 1."""
    if value is None:
        return name in NEUTRAL or name in UNSUPPORTED
    return any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL.get(name, ()))


def _biases(given: dict[str, float] | None) -> dict[Any, float]:
    """JSON has no numbers as keys; what is no number is left for SamplingParams to refuse."""
    return {int(key) if _is_id(key) else key: value for key, value in (given or {}).items()}


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) <= MAX_DIGITS


class CompletionBody(GenerationBody):
    """``POST /v1/completions``"""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each of the prompts."""
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [given]
        return list(given)

    def params(self) -> SamplingParams:
        """16 tokens are the API's default. An echo is scored where log-probabilities are requested."""
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        scored = self.logprobs if self.echo else None
        if self.echo and max_tokens == 0 and scored is None:
            scored = 0  # nothing else to compute, and an engine wants some work
        return self.sampling(max_tokens, self.logprobs, scored)


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``"""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` is given without `logprobs`; set `logprobs`, or leave it out")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("`max_tokens` and `max_completion_tokens` differ; give one of them")
        check_tools(self.tools, self.tool_choice)
        return self

    def params(self) -> SamplingParams:
        """As many tokens as context and KV pool leave, unless the body says otherwise."""
        given = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(given, (self.top_logprobs or 0) if self.logprobs else None, None)

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def template_options(self) -> dict[str, Any]:
        """Arguments of the chat template."""
        own = {name: getattr(self, name) for name in ("add_generation_prompt", "continue_final_message")}
        tools = [tool.template_data() for tool in self.offered]
        return {
            **(self.chat_template_kwargs or {}),
            **({"tools": tools} if tools else {}),
            **{name: value for name, value in own.items() if value is not None},
        }


class TokenizeBody(Body):
    """``POST /tokenize``: a text, or the messages of a chat"""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    chat_template_kwargs: TemplateVariables | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give `prompt` or `messages`")
        return self


class DetokenizeBody(Body):
    """``POST /detokenize``"""

    model: str | None = None
    tokens: list[TokenId]


class AbortBody(Body):
    """``POST /abort``: a request by its id (the header ``x-request-id`` of its answer)"""

    request_id: str
