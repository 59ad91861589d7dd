"""Writes the tables of docs/reference/inputs.md from the gates that the program itself checks its inputs with.

Like config_page: ``make config-page`` runs both, and a test fails while the page says something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Final

from marked import rewritten, table

from minisgl_core.core import SamplingParams
from minisgl_core.inputs import Gate, Rule
from minisgl_core.modelconfig.gguf_keys import ARCHITECTURE_GATE, GENERAL_GATE
from minisgl_core.modelconfig.hf_keys import CONFIG_GATE, GENERATION_GATE, ROPE_GATE
from minisgl_core.tokenizer.chat import ChatTemplate
from minisgl_core.tokenizer.keys import GGUF_GATE, SPECIAL_MAP_GATE, TOKENIZER_GATE

__all__ = ["GATES", "PAGE", "parts"]

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference" / "inputs.md"
GATES: Final[Mapping[str, Gate]] = {
    "config": CONFIG_GATE,
    "rope": ROPE_GATE,
    "generation": GENERATION_GATE,
    "gguf": GENERAL_GATE,
    "gguf architecture": ARCHITECTURE_GATE,
    "tokenizer": TOKENIZER_GATE,
    "special tokens": SPECIAL_MAP_GATE,
    "gguf tokenizer": GGUF_GATE,
}
"""By the name of their part of the page."""

_FATES: Final = ("used", "refused", "warned", "ignored")
_CHAT: Final = {
    "messages": "the conversation: roles, contents, tool calls",
    "tools": "functions that the model may call",
    "documents": "texts that the template may quote",
    "chat_template": "name of one of the model's templates, or a template's text",
    "add_generation_prompt": "whether the assistant's turn is opened",
    "continue_final_message": "whether the last message stays open",
    "variables": "any other name: a variable of the template; refused by name if the template does not read it",
}
_SAMPLING: Final = {
    "temperature": "0 = the likeliest token",
    "top_k": "keep the k likeliest tokens",
    "top_p": "keep the likeliest tokens of this mass",
    "min_p": "keep tokens this share as likely as the likeliest",
    "n": "answers to one prompt",
    "max_tokens": "longest answer",
    "min_tokens": "shortest answer",
    "ignore_eos": "go on after an end of sequence",
    "stop": "texts that end the answer",
    "stop_token_ids": "ids that end the answer",
    "seed": "of the random draws",
    "repetition_penalty": "divides logits of tokens that occurred",
    "presence_penalty": "taken from logits of tokens that were generated",
    "frequency_penalty": "the same for each time they were",
    "logit_bias": "added to the logits of these ids",
    "logprobs": "log-probabilities of the answer's tokens",
    "prompt_logprobs": "log-probabilities of the prompt's tokens",
    "grammar": "the form of the answer ([the forms](../structured-output.md))",
}


def parts() -> dict[str, str]:
    """The generated parts by name. Raises :class:`ValueError` if an option or a parameter has no meaning here."""
    tables = {name: table(("key", "fate", "what for, or why"), list(_rows(gate))) for name, gate in GATES.items()}
    return {**tables, "chat options": _chat_options(), "sampling parameters": _sampling_parameters()}


def _rows(gate: Gate) -> Iterable[tuple[str, str, str]]:
    """Keys that share a rule share a row."""
    rows: dict[str, tuple[Rule, list[str]]] = {}
    for key, rule in gate.rules.items():
        shared = key if rule.fate == "used" else repr(rule)
        rows.setdefault(shared, (rule, []))[1].append(f"`{key}`")
    for rule, keys in sorted(rows.values(), key=lambda row: _FATES.index(row[0].fate)):
        remedy = f"; {rule.remedy}" if rule.remedy else ""
        yield ", ".join(keys), _fate(rule), f"{rule.why}{remedy}"


def _fate(rule: Rule) -> str:
    if rule.fate in ("used", "ignored"):
        return rule.fate
    neutral = "null" if not rule.neutral else f"null or {', '.join(f'`{value!r}`' for value in rule.neutral)}"
    return f"{rule.fate} unless {neutral}"


def _chat_options() -> str:
    names = [name for name in inspect.signature(ChatTemplate.render).parameters if name != "self"]
    _require("chat option", names, _CHAT)
    return table(("option", "fate", "what for"), [(f"`{name}`", "used", _CHAT[name]) for name in names])


def _sampling_parameters() -> str:
    _require("sampling parameter", [field.name for field in fields(SamplingParams)], _SAMPLING)
    defaults = {field.name: None if field.default is MISSING else field.default for field in fields(SamplingParams)}
    rows = [(f"`{name}`", f"`{default!r}`", "used", _SAMPLING[name]) for name, default in defaults.items()]
    return table(("parameter", "default", "fate", "what for"), rows)


def _require(what: str, names: list[str], meanings: Mapping[str, str]) -> None:
    differing = sorted(set(names) ^ meanings.keys())
    if differing:
        raise ValueError(f"tools/inputs_page.py and the program disagree about {what} {', '.join(differing)}")


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), parts()), encoding="utf-8")
