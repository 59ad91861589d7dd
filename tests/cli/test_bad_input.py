"""Whatever a user gets wrong: one line on standard error that says what, which value and what to do; never a traceback.

Exit code 2 where the call is wrong, 1 where what it names fails.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_core.cli.app import main

Tiny = Callable[[str], Path]
Made = Callable[[Tiny, Path], Path]
"""Makes a model folder to name with --model."""

SMALL = ("--num-page-override", "64", "--max-seq-len-override", "48")


pytestmark = pytest.mark.usefixtures("no_settings", "one_thread")


# --- model folders with something wrong ------------------------------------------------------------------------------


def plain(name: str) -> Made:
    return lambda tiny, _: tiny(name)


def changed(name: str, change: Callable[[Path], None]) -> Made:
    """A copy of a tiny checkpoint, changed."""

    def make(tiny: Tiny, folder: Path) -> Path:
        shutil.copytree(tiny(name), folder / "model")
        change(folder / "model")
        return folder / "model"

    return make


def config(**keys: Any) -> Callable[[Path], None]:
    """config.json with other keys; None removes one."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        content = json.loads(path.read_text()) | keys
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


def text(name: str, content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(content)

    return write


def without(pattern: str) -> Callable[[Path], None]:
    return lambda folder: next(iter(sorted(folder.glob(pattern)))).unlink()


def cut_in_half(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def narrow_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()


def no_norm(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def as_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text())
    content.pop("chat_template", None)
    path.write_text(json.dumps(content))


def false_gguf(_: Tiny, folder: Path) -> Path:
    (folder / "model.gguf").write_bytes(b"GGML" + bytes(60))
    return folder / "model.gguf"


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """``says``: what the first line must contain. ``details``: how the lines below it begin. ``files``: written to the
    working folder first.
    """

    name: str
    arguments: Sequence[str]
    code: int
    says: Sequence[str]
    model: Made | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    details: Sequence[str] = ()


WITH_TEXT = plain("q3-text")


def generate(
    name: str, *arguments: str, code: int = 2, says: Sequence[str], model: Made = WITH_TEXT, **more: Any
) -> Case:
    """A call of generate with a prompt, unless the arguments bring one."""
    brings = any(argument.startswith("--prompt") for argument in arguments)
    prompt = () if brings else ("--prompt", "hi")
    return Case(name, ("generate", *prompt, *arguments, *SMALL), code, says, model, **more)


def wrong_value(flag: str, value: str, *says: str) -> Case:
    return generate(f"{flag} {value}", flag, value, says=says)


def bad_model(name: str, model: Made, *says: str, code: int = 1) -> Case:
    return generate(name, "--prompt-ids", "1,2,3", code=code, says=says, model=model)


TOO_LONG = ",".join(["7"] * 48)

CASES = [
    # names of commands, flags, settings
    Case("command", ["genrate"], 2, ["unknown command 'genrate'", "did you mean 'generate'?"]),
    generate("flag", "--max-token", "3", says=["--max-token", "--max-tokens"]),
    generate("flag without its value", "--temperature", says=["--temperature"]),
    Case("stray argument", ["generate", "--prompt", "a", "b"], 2, ["unexpected extra argument", "b"]),
    generate(
        "key of the file",
        says=["unknown key 'page_sise' in [engine] of minisgl.toml", "did you mean 'page_size'?"],
        files={"minisgl.toml": "[engine]\npage_sise = 16\n"},
    ),
    generate(
        "table of the file",
        says=["unknown table 'engin' in minisgl.toml", "did you mean 'engine'?"],
        files={"minisgl.toml": "[engin]\n"},
    ),
    generate(
        "variable",
        says=["unknown environment variable MINISGL_PAGE_SISE", "did you mean 'MINISGL_PAGE_SIZE'?"],
        environ={"MINISGL_PAGE_SISE": "16"},
    ),
    generate(
        "value of the file",
        says=["engine.page_size is 0 (from minisgl.toml)", "greater than or equal to 1"],
        files={"minisgl.toml": "[engine]\npage_size = 0\n"},
    ),
    generate(
        "value of a variable",
        says=["engine.tp_size is 'two' (from MINISGL_TP_SIZE)", "integer"],
        environ={"MINISGL_TP_SIZE": "two"},
    ),
    generate(
        "switch",
        says=["MINISGL_CHECK_INTEGRITY is 'maybe'", "use 1 or 0"],
        environ={"MINISGL_CHECK_INTEGRITY": "maybe"},
    ),
    generate("no TOML", says=["minisgl.toml is not TOML", "line 1"], files={"minisgl.toml": "= 3\n"}),
    generate(
        "role of the file",
        says=["unknown key 'atention' in [backends] of minisgl.toml", "did you mean 'attention'?"],
        files={"minisgl.toml": '[backends]\natention = "cpu"\n'},
    ),
    generate("no such config file", "--config", "other.toml", says=["config file other.toml cannot be read"]),
    generate("config file is a folder", "--config", ".", says=["config file . cannot be read"]),
    # settings
    wrong_value("--dtype", "int8", "model.dtype is 'int8' (from --dtype)", "float32"),
    wrong_value("--memory-ratio", "nan", "engine.memory_ratio is 'nan'"),
    wrong_value("--memory-ratio", "1.5", "engine.memory_ratio is '1.5'"),
    wrong_value("--page-size", "-1", "engine.page_size is '-1'"),
    wrong_value("--max-running-req", "0", "engine.max_running_req is '0'"),
    wrong_value("--distributed-timeout-s", "inf", "engine.distributed_timeout_s is 'inf'"),
    wrong_value("--device", "tpu", "engine.device is 'tpu'", "cpu"),
    # sampling parameters
    wrong_value("--temperature", "nan", "`temperature` is nan", "finite"),
    wrong_value("--temperature", "inf", "`temperature` is inf", "finite"),
    wrong_value("--temperature", "-1", "`temperature` is -1", "[0, "),
    wrong_value("--temperature", "warm", "--temperature", "'warm'", "float"),
    wrong_value("--top-p", "1.5", "`top_p` is 1.5", "[0, 1]"),
    wrong_value("--top-p", "-0.1", "`top_p` is -0.1", "[0, 1]"),
    wrong_value("--top-p", "nan", "`top_p` is nan"),
    wrong_value("--min-p", "nan", "`min_p` is nan"),
    wrong_value("--top-k", "-2", "`top_k` is -2"),
    wrong_value("--top-k", "1.5", "--top-k", "'1.5'", "integer"),
    wrong_value("--max-tokens", "0", "`max_tokens` is 0", "from 1"),
    wrong_value("--max-tokens", "-1", "`max_tokens` is -1", "from 1"),
    wrong_value("--repetition-penalty", "0", "`repetition_penalty` is 0"),
    wrong_value("--frequency-penalty", "inf", "`frequency_penalty` is inf"),
    wrong_value("--stop", "", "`stop` holds ''", "non-empty"),
    wrong_value("--stop-token-id", "-1", "`stop_token_ids` is -1"),
    # prompts
    generate("empty prompt", "--prompt", "", says=["the prompt of --prompt is empty", "at least one token"]),
    generate("no ids", "--prompt-ids", " ", says=["the prompt of --prompt-ids is empty"]),
    generate("words for ids", "--prompt-ids", "1,x", says=["--prompt-ids holds 'x'", "785,6722"]),
    generate("hole in ids", "--prompt-ids", "1,,2", says=["--prompt-ids holds ''"]),
    generate("negative id", "--prompt-ids", "1,-2", says=["--prompt-ids holds '-2'"]),
    generate("id beyond the vocabulary", "--prompt-ids", "1,512", says=["token id 512", "from 0 to 511"]),
    generate("huge id", "--prompt-ids", f"1,{2**40}", says=[f"token id {2**40}", "from 0 to 511"]),
    generate("vast id", "--prompt-ids", "9" * 20, says=[f"token id {'9' * 20}", "from 0 to 511"]),
    generate("id of no end", "--prompt-ids", "9" * 5000, says=["--prompt-ids holds '9999", "785,6722"]),
    generate("no such prompt file", "--prompt-file", "p.txt", says=["prompt file 'p.txt' cannot be read: No such"]),
    generate("prompt file is a folder", "--prompt-file", ".", says=["prompt file '.' cannot be read"]),
    generate("empty prompt file", "--prompt-file", "p.txt", says=["p.txt is empty"], files={"p.txt": "\n"}),
    generate("two kinds", "--prompt", "a", "--prompt-ids", "1", says=["--prompt and --prompt-ids are given together"]),
    generate("system without chat", "--system", "be brief", says=["--system is given without --chat", "add --chat"]),
    generate("chat of ids", "--chat", "--prompt-ids", "1,2", says=["--chat cannot wrap --prompt-ids"]),
    generate("prompt longer than context", "--prompt-ids", TOO_LONG, says=["a prompt of 48 tokens", "context is 48"]),
    Case(
        "prompt longer than pool",
        ["generate", "--prompt-ids", TOO_LONG, "--num-page-override", "2", "--page-size", "16"],
        2,
        ["a prompt of 48 tokens", "KV pool holds 32", "at most 31 tokens, or give the KV pool more pages"],
        plain("q3-text"),
    ),
    Case(
        "pool too small for any prompt",
        ["generate", "--prompt-ids", "1", "--num-page-override", "1"],
        2,
        ["the KV pool holds 1; give the KV pool more pages (num_page_override or memory_ratio)"],
        plain("q3-text"),
    ),
    generate("text for a model without tokenizer", says=["has no tokenizer files", "--prompt-ids"], model=plain("q3")),
    generate(
        "stop text for a model without tokenizer",
        "--stop",
        "x",
        "--prompt-ids",
        "1,2",
        says=["tokenizer"],
        model=plain("q3"),
    ),
    Case("chat without tokenizer", ["chat", *SMALL], 2, ["has no tokenizer files"], plain("q3")),
    Case("chat without template", ["chat", *SMALL], 2, ["has no chat template"], changed("q3-text", no_template)),
    generate("--chat without template", "--chat", says=["has no chat template"], model=changed("q3-text", no_template)),
    # backends
    generate("not ROLE=NAME", "--backend", "attention", says=["--backend 'attention' is not ROLE=NAME"]),
    generate("role", "--backend", "atention=cpu", says=["'atention'", "did you mean 'attention'?"]),
    generate("backend", "--backend", "attention=nope", says=["no plugin offers the attention backend 'nope'"]),
    generate(
        "backend that cannot run here",
        "--backend",
        "attention=fa",
        code=1,
        says=["you named fa for attention; it needs CUDA; leave it out"],
        details=["no backend for attention.decode", "fa/fa3@", "fa/fa4@", "fa/fa2@"],
    ),
    generate(
        "options of no backend",
        says=['backends.options."attention:nope" belongs to no installed backend (from minisgl.toml)'],
        files={"minisgl.toml": '[backends.options."attention:nope"]\nx = 1\n'},
    ),
    generate(
        "unknown option of what is not chosen",
        says=["unknown option 'strct' in ", '"graph:emulated" (from minisgl.toml)', "did you mean 'strict'?"],
        files={"minisgl.toml": '[backends.options."graph:emulated"]\nstrct = true\n'},
    ),
    generate(
        "plugins switched off",
        code=1,
        says=["no backend for attention", "minisgl-cpu-sim"],
        details=["none is installed", "plugins.allow keeps out "],
        environ={"MINISGL_PLUGINS_ALLOW": "minisgl-core"},
    ),
    generate(
        "heads that cannot be cut",
        "--prompt-ids",
        "1",
        "--tp-size",
        "2",
        says=["9 query heads", "3 kv heads", "tp_size 2"],
        model=plain("s93"),
    ),
    # models
    generate("no name", "--model", "", says=["model.path is '' (from --model)", "at least 1 character"]),
    generate("no folder for capsules", "--record", "", says=["debug.record is '' (from --record)"]),
    generate("empty folder", code=1, says=["has no config.json", "give a folder in"], model=lambda _, folder: folder),
    Case("chat with an empty folder", ["chat", *SMALL], 1, ["has no config.json"], lambda _, folder: folder),
    generate("no such folder", "--model", "./no/where", says=["there is no model folder or file at './no/where'"]),
    generate("hub without network", "--model", "some/model", code=1, says=["'some/model'", "check the name and the"]),
    bad_model("file of another kind", lambda tiny, _: tiny("q3") / "config.json", "is not a GGUF file", code=2),
    bad_model("empty folder, token ids", lambda _, folder: folder, "has no config.json"),
    bad_model("corrupt config.json", changed("q3", text("config.json", '{"a": ')), "is not valid JSON: line 1"),
    bad_model("config.json of a list", changed("q3", text("config.json", "[]")), "holds a list"),
    bad_model("key missing in config.json", changed("q3", config(vocab_size=None)), "`vocab_size`", "is missing"),
    bad_model(
        "wrong key in config.json", changed("q3", config(num_hidden_layers="two")), "`num_hidden_layers`", "'two'"
    ),
    bad_model(
        "unknown architecture",
        changed("q3", config(architectures=["NopeForCausalLM"], model_type="nope")),
        "error: unsupported architecture 'NopeForCausalLM'; known: LlamaForCausalLM, ",
    ),
    bad_model("missing shard", changed("q3-sharded", without("*-of-*.safetensors")), "lacks model-00001-of-"),
    bad_model("no weights", changed("q3", without("*.safetensors")), "no safetensors found"),
    bad_model(".bin only", changed("q3", as_bin), "no safetensors found", "only pytorch_model.bin"),
    bad_model("half a weight file", changed("q3", cut_in_half), "model.safetensors", "its header says", "again"),
    bad_model("garbage for weights", changed("q3", garbage), "model.safetensors", "is not a safetensors file"),
    bad_model("missing tensor", changed("q3", weights(no_norm)), "lacks 1 of", "model.norm.weight"),
    bad_model("wrong shape", changed("q3", weights(narrow_norm)), "model.norm.weight: expected (256,), found (255,)"),
    bad_model("no GGUF", false_gguf, "model.gguf", "begins with b'GGML'"),
    bad_model(
        "corrupt tokenizer", changed("q3-text", text("tokenizer.json", "{}")), "tokenizer.json", "cannot be read"
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_one_line_and_an_exit_code(
    case: Case, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in case.files.items():
        Path(name).write_text(content)
    for name, value in case.environ.items():
        monkeypatch.setenv(name, value)
    home = tmp_path / "models"
    home.mkdir()
    model = () if case.model is None else ("--model", str(case.model(tiny, home)))
    first, *rest = case.arguments
    code = main([first, *model, *rest])  # a later --model wins
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    *before, line = lines[: len(lines) - len(case.details)]
    for detail, begins in zip(lines[len(lines) - len(case.details) :], case.details, strict=True):
        assert detail.startswith(f"  {begins}"), detail
    assert [other for other in before if not other.startswith("plan ")] == []
    assert line.startswith("error: ") and "internal error" not in line
    assert [words for words in case.says if words not in line] == []
    assert code == case.code
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt-ids", TOO_LONG], "a prompt of 48 tokens"),
        (["--prompt-ids", "1,512"], "token id 512"),
        (["--prompt", "word " * 60], "tokens leaves no room"),
        (["--prompt", "hi", "--prompt", "word " * 60], "prompt 1: "),
    ],
)
def test_a_prompt_is_refused_before_the_weights_are_read(
    arguments: list[str], says: str, tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = changed("q3-text", without("*.safetensors"))(tiny, tmp_path)
    assert main(["generate", "--model", str(model), *arguments, *SMALL]) == 2
    assert says in capsys.readouterr().err
