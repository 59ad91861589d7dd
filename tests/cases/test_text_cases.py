"""Section M, text: special tokens, chats, stop strings and spaces, from the files of a model to an answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.errors import AdmissionError
from minisgl_core.tokenizer import Tokenizer, load_tokenizer


def changed(source: Path, folder: Path, config: dict[str, Any], flags: dict[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of ``source`` with other keys in its config, and other flags of <|im_end|> in tokenizer.json."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(source / name, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token.update(flags or {} if token["content"] == "<|im_end|>" else {})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def test_case_104_spaces_after_a_named_token(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    tokenizer = changed(tiny("q3-text"), tmp_path, {"eos_token": "<|im_end|>"}, {"rstrip": True})
    assert tokenizer.encode("x<|im_end|> \n y") == [90, 2, 91]


def test_case_108_a_misspelt_option_of_a_chat(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    tokenizer = changed(tiny("q3-text"), tmp_path, {"chat_template": "{{ messages[0].content }}<|im_end|>"})
    chat = [{"role": "assistant", "content": "so"}]
    assert tokenizer.render_chat(chat, continue_final_message=True, add_generation_prompt=False) == "so"
    with pytest.raises(AdmissionError, match="did you mean 'continue_final_message'"):
        tokenizer.render_chat(chat, continue_final_mesage=True)
    with pytest.raises(AdmissionError, match="are both set"):
        tokenizer.render_chat(chat, continue_final_message=True, add_generation_prompt=True)


def test_case_112_tool_calls_and_content_that_hold_nothing(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if 'tool_calls' in m and m.content is none %}<call>"
        "{% elif 'tool_calls' in m %}<lost>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = changed(tiny("q3-text"), tmp_path, {"chat_template": template})
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert tokenizer.render_chat([{"role": "assistant", "content": "a", "tool_calls": []}, called]) == "a<call>"


def test_case_114_a_models_own_token_in_its_template(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    config = {"extra_special_tokens": {"boi_token": "<|im_start|>"}, "chat_template": "{{ boi_token }}x"}
    assert changed(tiny("q3-text"), tmp_path, config).render_chat([{"role": "user", "content": ""}]) == "<|im_start|>x"
