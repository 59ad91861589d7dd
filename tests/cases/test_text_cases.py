"""Section M, text: special tokens, chats, stop strings and spaces, from the files of a model to an answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers

from minisgl_core.core import SamplingParams
from minisgl_core.errors import AdmissionError
from minisgl_core.llm import LLM
from minisgl_core.tokenizer import Tokenizer, load_tokenizer
from support.edited_gguf import copied

SETTINGS: dict[str, Any] = {
    "dtype": torch.float32,
    "page_size": 1,
    "num_page_override": 128,
    "max_seq_len_override": 64,
    "max_running_req": 2,
    "progress": False,
}


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


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


@pytest.mark.parametrize("stop", ["<|im_start|>", "start|>"])
def test_case_107_a_special_token_as_stop_string(tiny: Callable[[str], Path], stop: str) -> None:
    """The model is made to write that token at once, where transformers' `stop_strings` end too."""
    from transformers import StopStringCriteria

    with LLM(tiny("q3-text"), **SETTINGS) as llm:
        assert llm.tokenizer is not None
        the = llm.tokenizer.encode(" the")[0]
        params = SamplingParams(max_tokens=6, stop=stop, ignore_eos=True, logit_bias={1: 1e5})
        (answer,) = llm.generate([[20, the]], params, progress=False)
        chunks = list(llm.stream([20, the], params))
    theirs = StopStringCriteria(transformers_tokenizer(tiny("q3-text")), stop)
    assert bool(theirs(torch.tensor([[20, the, 1]]), None))
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("", [1], "stop")
    assert answer["stop_reason"] == stop
    assert "".join(chunk.text for chunk in chunks) == "" and chunks[-1].finish_reason == "stop"


def sentence_piece_folder(source: Path, folder: Path) -> Path:
    """The checkpoint ``source`` with a tokenizer that begins each text with a space."""
    shutil.copytree(source, folder)
    vocab = {piece: i for i, piece in enumerate(["<s>", "\u2581", "\u2581do", "\u2581Paris", ".", "x"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="x"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_case_109_text_continues_the_prompt(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = sentence_piece_folder(tiny("q3"), tmp_path / "model")
    always: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True, "logit_bias": {3: 1e5}}
    with LLM(folder, **SETTINGS) as llm:
        (plain,) = llm.generate([[2]], SamplingParams(**always), progress=False)
        (stopped,) = llm.generate([[2]], SamplingParams(**always, stop=" Paris"), progress=False)
        streamed = "".join(chunk.text for chunk in llm.stream([2], SamplingParams(**always)))
        assert llm.tokenizer is not None
        assert llm.tokenizer.decode([2]) + plain["text"] == llm.tokenizer.decode([2, 3, 3]) == "do Paris Paris"
    assert plain["text"] == streamed == " Paris Paris"
    assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")


def test_case_111_ids_of_a_gguf_whose_tokenizer_we_lack(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    (source,) = tiny("s93-gguf").glob("*.gguf")
    keys = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    path = copied(source, tmp_path / "m.gguf", keys)
    with LLM(path, **SETTINGS) as llm, LLM(source, **SETTINGS) as plain:
        params = SamplingParams(max_tokens=4)
        answer, expected = (one.generate([[5, 6, 7]], params, progress=False)[0] for one in (llm, plain))
        assert answer["token_ids"] == expected["token_ids"]
        assert answer["text"] == ""
        with pytest.raises(AdmissionError, match="model 'llama' with pre-tokenizer 'default'"):
            llm.generate(["text"], params, progress=False)
        with pytest.raises(AdmissionError, match=r"`stop` strings need a tokenizer: GGUF file"):
            llm.generate([[5, 6]], SamplingParams(max_tokens=4, stop="x"), progress=False)
