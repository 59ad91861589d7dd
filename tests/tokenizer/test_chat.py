from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from minisgl_core.errors import AdmissionError
from minisgl_core.tokenizer import ChatTemplate, Tokenizer, load_tokenizer

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c 12"}],
]
STRICT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "[{{ message.role }}]{{ message.content | trim }}{% endfor %}"
)


def render(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copy(tiny("q3-text") / name, tmp_path)
    return tmp_path


def loaded(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("chat", CHATS)
def test_same_ids_as_transformers(folder: Path, chat: list[dict[str, Any]], generate: bool) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(chat, add_generation_prompt=generate, return_dict=False)
    assert loaded(folder).apply_chat_template(chat, add_generation_prompt=generate) == expected


def test_case_50_bos_occurs_once(folder: Path) -> None:
    """As Llama 3: the tokenizer adds BOS to plain prompts and the template writes one too."""
    from transformers import AutoTokenizer

    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + (folder / "chat_template.jinja").read_text())
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": "<|endoftext|>"}))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = ("<|endoftext|>", 0)
    backend.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    backend.save(str(folder / "tokenizer.json"))
    ours = loaded(folder)
    ids = ours.apply_chat_template(CHATS[0])
    theirs = AutoTokenizer.from_pretrained(folder)
    assert ids == theirs.apply_chat_template(CHATS[0], add_generation_prompt=True, return_dict=False)
    assert ids.count(0) == 1
    assert ours.encode("plain").count(0) == 1


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": "a"}] * 2, "Conversation roles must alternate"),
        ([{"role": "system", "content": "a"}], "System role not supported"),
        ([], "there are no messages"),
        (["hello"], "'hello' has no role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "only parts of type text"),
    ],
)
def test_case_51_refused_with_the_templates_message(messages: list[Any], message: str) -> None:
    with pytest.raises(AdmissionError, match=message):
        render(STRICT, messages)
    assert render(STRICT, [{"role": "user", "content": "still alive"}]) == "<s>[user]still alive"


def test_case_51_a_message_without_content() -> None:
    with pytest.raises(AdmissionError, match=r"refuses these messages: .*no attribute 'content'"):
        render("{{ 'x' + messages[0].content }}", [{"role": "tool", "content": None}])


def test_case_51_whatever_a_template_raises_is_a_refusal() -> None:
    for template in ("{{ 1 // 0 }}", "{{ messages[0].content + 1 }}", "{{ 'a' | no_such_filter }}"):
        with pytest.raises(AdmissionError, match="chat template"):
            render(template, CHATS[0])


def test_case_51_no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(AdmissionError, match="no chat template"):
        loaded(folder).apply_chat_template(CHATS[0])


def test_case_51_content_as_parts() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert render(STRICT, [{"role": "user", "content": parts}]) == "<s>[user]one two"


def test_case_51_a_broken_template_is_an_error_of_the_request() -> None:
    with pytest.raises(AdmissionError, match="chat template is broken at line 2"):
        render("ok\n{% if %}", CHATS[0])


def test_a_template_cannot_reach_into_python() -> None:
    with pytest.raises(AdmissionError, match="unsafe"):
        render("{{ messages.__class__.__mro__ }}", CHATS[0])


def test_null_fields_are_left_out() -> None:
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    assert (
        render(template, [{"role": "user", "content": "é", "tool_calls": None}]) == '{"role": "user", "content": "é"}'
    )


def test_variables_and_tools_reach_the_template() -> None:
    template = "{{ enable_thinking }} {{ tools[0].name }} {{ add_generation_prompt }}"
    text = render(template, CHATS[0], tools=[{"name": "f"}], enable_thinking=False, add_generation_prompt=False)
    assert text == "False f False"


def test_generation_blocks_and_loop_controls() -> None:
    template = "{% for m in messages %}{% generation %}<{{ m.content }}>{% endgeneration %}{% break %}{% endfor %}"
    assert render(template, CHATS[2]) == "<a>"


def test_several_templates_by_name(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": templates}))
    (folder / "chat_template.jinja").unlink()
    tokenizer = loaded(folder)
    assert tokenizer.render_chat(CHATS[0]) == "plain"
    assert tokenizer.render_chat(CHATS[0], tools=[{"name": "f"}]) == "tools"
