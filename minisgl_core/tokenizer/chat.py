"""Chat templates: Jinja text from the model folder, rendered in a sandbox as transformers does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import AdmissionError, nearest
from .messages import FinalMessage, Message, normalised, refusal

__all__ = ["ChatTemplate"]


class _Generation(Extension):
    """``{% generation %}`` blocks, which mark the assistant's text for training; here they only emit their content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it a set of the instance

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The template of a model, or several by name (``default``, ``tool_use``)."""

    def __init__(self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        self._special_tokens = dict(special_tokens)

    @property
    def text(self) -> str:
        """The template; several are joined."""
        return "\n".join(self._sources.values())

    def reads_tools(self, chat_template: str | None = None) -> bool:
        """Whether the template, chosen as by :meth:`render`, does something with ``tools``."""
        return "tools" in self._pick(chat_template, True).variables

    def render(
        self,
        messages: Iterable[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        **variables: Any,
    ) -> str:
        """Render the text of a prompt.

        ``tools``: JSON schemas of functions; an empty list means none. ``documents``: texts with titles, for templates
        that read them. ``chat_template``: the name of one of the model's templates, or the text of another.
        ``add_generation_prompt``: open the assistant's turn; by default True unless the final message is continued.
        ``continue_final_message``: leave the final message open, so that the model continues it; a string names the
        field to continue (default ``content``). ``variables``: other variables of the template, such as
        ``enable_thinking=False``; one that the template does not read is refused.

        Raises :class:`~minisgl_core.errors.AdmissionError`, with the template's own message if the template raises.
        """
        if add_generation_prompt and continue_final_message:
            raise AdmissionError(
                "`continue_final_message` and `add_generation_prompt` are both set",
                field="continue_final_message",
                value=continue_final_message,
                remedy="a prompt either continues the final message or opens a new one",
            )
        compiled = self._pick(chat_template, bool(tools))
        compiled.check_variables(variables)
        clean = normalised(messages, keep_null_content=compiled.compares_with_null)
        final = FinalMessage(clean, continue_final_message, compiled.source) if continue_final_message else None
        context = {
            "messages": clean if final is None else final.marked,
            "tools": _mappings("tools", tools),
            "documents": _mappings("documents", documents),
            "add_generation_prompt": add_generation_prompt is not False and not continue_final_message,
        }
        try:
            text = compiled.template.render(**context, **{**self._special_tokens, **variables})
        except Exception as error:  # a template is the model author's program: any exception counts as its refusal
            raise refusal(f"the model's chat template refuses these messages: {error}", messages) from error
        return text if final is None else final.cut(text)

    def _pick(self, choice: str | None, has_tools: bool) -> _Compiled:
        """The template that ``choice`` names or contains; otherwise the one for tools if there are tools, or the
        default.
        """
        if choice is None:
            choice = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        elif choice not in self._sources and "{" in choice:
            return _compile(choice)
        if choice not in self._sources:
            raise AdmissionError(
                f"the model has no chat template {choice!r}; its templates are {', '.join(self._sources) or 'none'}",
                field="chat_template",
                value=choice,
                remedy=nearest(choice, self._sources) or "name one as `chat_template`, or give a template's text",
            )
        return _compile(self._sources[choice])


class _Compiled(NamedTuple):
    """A template and what is known from its text."""

    source: str
    template: jinja2.Template
    variables: frozenset[str]
    """Variables that the template reads and does not set itself."""
    compares_with_null: bool
    """True if the template compares a message's content with none."""

    def check_variables(self, given: Mapping[str, Any]) -> None:
        """Refuse a variable that would have no effect."""
        for name in given:
            if name not in self.variables:
                options = {*self.variables, *_OPTIONS} - _SET_ELSEWHERE
                raise AdmissionError(
                    f"neither minisgl nor the model's chat template knows the option `{name}`",
                    field=name,
                    value=given[name],
                    remedy=nearest(name, options) or f"known are {', '.join(sorted(options))}",
                )


_OPTIONS: Final = ("tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message")
_SET_ELSEWHERE: Final = {"messages"}


@lru_cache(maxsize=64)
def _compile(source: str) -> _Compiled:
    environment = _environment()
    try:
        tree = environment.parse(source)
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise AdmissionError(
            f"the model's chat template is broken at line {error.lineno}: {error.message}",
            field="messages",
            remedy="give a prompt instead of messages, or mend the template",
        ) from error
    variables = meta.find_undeclared_variables(tree) - set(environment.globals)
    return _Compiled(source, template, frozenset(variables), _compares_with_null(tree))


def _compares_with_null(tree: nodes.Template) -> bool:
    """True if the template contains ``content is none``, or another comparison of a content with none."""
    tests = [test.node for test in tree.find_all(nodes.Test) if test.name == "none"]
    compared = [
        compare.expr
        for compare in tree.find_all(nodes.Compare)
        if any(isinstance(other.expr, nodes.Const) and other.expr.value is None for other in compare.ops)
    ]
    return any(map(_is_content, (*tests, *compared)))


def _is_content(node: nodes.Node) -> bool:
    match node:
        case nodes.Name(name="content") | nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
    return False


def _environment() -> ImmutableSandboxedEnvironment:
    """A Jinja environment with the filters and globals that published templates use."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _mappings(name: str, values: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Plain dicts; None for an empty list."""
    for value in values or ():
        if not isinstance(value, Mapping):
            raise AdmissionError(
                f"`{name}` holds {value!r:.80}", field=name, value=value, remedy="give objects, as JSON has them"
            )
    return [dict(value) for value in values] if values else None
