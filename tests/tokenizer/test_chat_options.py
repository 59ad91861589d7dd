"""Options of chats: dialogues under templates of several shapes, compared with transformers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from minisgl_core.errors import AdmissionError
from minisgl_core.tokenizer import ChatTemplate, Tokenizer, load_tokenizer

CHATML = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content is defined and enable_thinking is not false %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {%- if message.content %}{{- message.content }}{%- endif %}
    {%- for call in message.tool_calls or [] %}{{- '\\n<tool_call>' + (call.function | tojson) }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}
{%- endif %}
"""
HEADERS = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|im_start|>system\\n\\n' + system }}
{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}{{- '<|im_end|>' }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {{- 'CALL ' + message.tool_calls[0].function.name }}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}
"""
BRACKETS = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"""
TURNS = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{% for document in documents or [] %}DOC {{ document.title }}: {{ document.text }}
{% endfor %}{% for message in messages %}{% set role = 'model' if message.role == 'assistant' else message.role %}
{{ '<turn>' + role + '\n' + (message.content | trim) + '<end>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "brackets": BRACKETS, "turns": TURNS}

CALL = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": {"zone": "é"}}}
DIALOGUES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be short. "}, {"role": "user", "content": " Hi "}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c\n"}],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "so"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "so"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": None, "refusal": None}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "9"}],
    [{"role": "user", "content": "Say 'x'"}, {"role": "assistant", "content": ""}],
    [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "x\n\n"}],
]
TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}]
OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"continue_final_message": True, "add_generation_prompt": False},
    {"add_generation_prompt": True, "tools": TOOLS},
    {"add_generation_prompt": True, "documents": [{"title": "t", "text": "x"}]},
    {"add_generation_prompt": True, "chat_template": "{{ messages[-1].role }}{{ eos_token }}"},
]


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(tiny("q3-text") / name, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": "<|endoftext|>"}))
    return tmp_path


def loaded(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def plain(dialogue: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What transformers 5.24 makes of messages before it renders them; older ones hand null fields on."""
    messages = [{key: value for key, value in message.items() if value is not None} for message in dialogue]
    return [{"reasoning_content": one["reasoning"], **one} if "reasoning" in one else one for one in messages]


def outcome(render: Any, *args: Any, **options: Any) -> str | None:
    """None where the messages are refused."""
    try:
        return str(render(*args, **options))
    except Exception:
        return None


@pytest.mark.parametrize("shape", TEMPLATES)
def test_case_108_and_112_same_prompts_as_transformers(folder: Path, shape: str) -> None:
    from transformers import AutoTokenizer

    (folder / "chat_template.jinja").write_text(TEMPLATES[shape])
    ours, theirs = loaded(folder), AutoTokenizer.from_pretrained(folder)
    served = 0
    for dialogue, options in itertools.product(DIALOGUES, OPTIONS):
        expected = outcome(theirs.apply_chat_template, plain(dialogue), tokenize=False, **options)
        assert outcome(ours.render_chat, dialogue, **options) == expected, (dialogue, options)
        if expected is not None:
            served += 1
            ids = theirs.apply_chat_template(plain(dialogue), return_dict=False, **options)
            assert ours.apply_chat_template(dialogue, **options) == ids
    assert served >= 35


@pytest.mark.parametrize("thinking", [True, False])
def test_case_108_a_variable_of_the_template(folder: Path, thinking: bool) -> None:
    from transformers import AutoTokenizer

    (folder / "chat_template.jinja").write_text(CHATML)
    theirs = AutoTokenizer.from_pretrained(folder)
    for dialogue in DIALOGUES:
        expected = theirs.apply_chat_template(plain(dialogue), tokenize=False, enable_thinking=thinking)
        assert loaded(folder).render_chat(dialogue, enable_thinking=thinking, add_generation_prompt=False) == expected


def render(template: str, messages: list[Any], **options: Any) -> str:
    return ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_case_108_a_final_message_that_is_continued_stays_open() -> None:
    assert render(CHATML, DIALOGUES[2], continue_final_message=True).endswith("<|im_start|>assistant\nb")
    assert render(CHATML, DIALOGUES[3], continue_final_message=True).endswith("assistant\nb ")
    assert render(TURNS, DIALOGUES[3], continue_final_message=True).endswith("<turn>model\nb")


def test_case_108_continuing_a_named_field() -> None:
    text = render(CHATML, DIALOGUES[7], continue_final_message="reasoning")
    assert text.endswith("<|im_start|>assistant\n<think>so")


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        (DIALOGUES[8], CHATML, "no `content`"),
        (DIALOGUES[2], "{{ messages[0].role }}", "does not read `content`"),
        (DIALOGUES[2], "{{ messages[0].content }}", "does not write the final message as it is"),
    ],
)
def test_case_108_what_cannot_be_continued_is_refused(messages: list[Any], template: str, message: str) -> None:
    with pytest.raises(AdmissionError, match=message):
        render(template, messages, continue_final_message=True)


def test_case_108_continuing_and_opening_exclude_each_other() -> None:
    with pytest.raises(AdmissionError, match="are both set"):
        render(CHATML, DIALOGUES[2], continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("enable_thinkin", "did you mean 'enable_thinking'?"),
        ("add_generation_promt", "did you mean 'add_generation_prompt'?"),
        ("continue_last_message", "did you mean 'continue_final_message'?"),
        ("zzz", "known are add_generation_prompt"),
    ],
)
def test_case_108_an_option_that_changes_nothing_is_refused(option: str, remedy: str) -> None:
    with pytest.raises(AdmissionError) as caught:
        render(CHATML, DIALOGUES[0], **{option: True})
    assert f"knows the option `{option}`" in str(caught.value) and remedy in str(caught.value)
    assert caught.value.field == option


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_case_108_tools_and_documents_are_objects(name: str) -> None:
    with pytest.raises(AdmissionError, match=f"`{name}` holds 'x'"):
        render(CHATML, DIALOGUES[0], **{name: ["x"]})


def test_case_108_a_template_by_name_or_as_text(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    templates = [{"name": "default", "template": "plain"}, {"name": "rag", "template": "{{ documents[0].text }}"}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": templates}))
    tokenizer = loaded(folder)
    assert tokenizer.render_chat(DIALOGUES[0]) == "plain"
    assert tokenizer.render_chat(DIALOGUES[0], chat_template="rag", documents=[{"text": "d"}]) == "d"
    assert tokenizer.render_chat(DIALOGUES[0], chat_template="{{ messages[0].content }}") == "Hi"
    with pytest.raises(AdmissionError, match=r"no chat template 'rug'.*did you mean 'rag'"):
        tokenizer.render_chat(DIALOGUES[0], chat_template="rug")


def test_case_108_a_template_for_a_model_that_has_none(folder: Path) -> None:
    assert loaded(folder).render_chat(DIALOGUES[0], chat_template="{{ messages[0].content }}") == "Hi"
    with pytest.raises(AdmissionError, match="has no chat template"):
        loaded(folder).render_chat(DIALOGUES[0])


@pytest.mark.parametrize("files", [{"rag": "R"}, {"rag": "R", "tool_use": "T"}])
@pytest.mark.parametrize("own", ["D", None])
@pytest.mark.parametrize(
    "listed", ["C", [{"name": "default", "template": "C"}, {"name": "old", "template": "O"}], None]
)
def test_templates_of_files_and_config(folder: Path, files: dict[str, str], own: str | None, listed: Any) -> None:
    """Files win; the config's default counts where no file has one (transformers drops it then)."""
    from transformers import AutoTokenizer

    (folder / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    if own is not None:
        (folder / "chat_template.jinja").write_text(own)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": listed}))
    ours, theirs = loaded(folder), AutoTokenizer.from_pretrained(folder)
    for name in ("default", "old", "tool_use", "rag"):
        expected = theirs.chat_template.get(name)
        if name == "default" and own is None and listed is not None:
            expected = "C"
        assert outcome(ours.render_chat, DIALOGUES[0], chat_template=name) == expected
    assert outcome(ours.render_chat, DIALOGUES[0], tools=TOOLS) == files.get("tool_use", own or (listed and "C"))


def test_case_112_empty_tool_calls_do_not_hide_the_content() -> None:
    message = {"role": "assistant", "content": "b", "tool_calls": []}
    assert "assistant\n\nb" in render(HEADERS, [DIALOGUES[0][0], message])


COMPARES_WITH_NULL = "{% set content = messages[1]['content'] %}{% if TEST %}<call>{% else %}{{ content }}{% endif %}"
TESTS = ["content is none", "messages[1].content == none", "none != messages[1]['content'] or content is not none"]


@pytest.mark.parametrize("test", TESTS)
def test_case_112_null_content_reaches_a_template_that_compares_with_it(test: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    text = "<call>" if "!=" not in test else "None"
    assert render(COMPARES_WITH_NULL.replace("TEST", test), messages) == text


def test_case_112_null_content_is_left_out_elsewhere() -> None:
    """As in transformers 5: the word None is not part of any message."""
    messages = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert render("{{ messages[0].content }}", messages) == ""


def test_messages_may_be_objects() -> None:
    @dataclasses.dataclass
    class Said:
        role: str
        content: str
        name: str | None = None

    class Model:
        def model_dump(self) -> dict[str, Any]:
            return {"role": "assistant", "content": "b", "tool_calls": None}

    assert render("{% for m in messages %}{{ m }}{% endfor %}", [Said("user", "a"), Model()]) == (
        "{'role': 'user', 'content': 'a'}{'role': 'assistant', 'content': 'b'}"
    )
