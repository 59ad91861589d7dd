"""Tiny random checkpoints, saved by transformers itself, each with the answers transformers gives in float32.

As a module: ``ensure_checkpoint(name) -> Path`` and ``reference(name) -> Reference`` (made on first use, then kept in
the user's cache under a key of this code and the transformers version). As a script, ``PYTHONPATH=tests python -m
support.make_checkpoints``: makes all, or those named; ``--search`` looks for a seed instead.

Random weights must make greedy equality meaningful: matrices N(0, gain / sqrt(fan_in)) keep activations of order 1 in
every layer, norm weights are not 1 and biases not 0, so that dropping one changes the ids; the head's gain spreads the
logits; and each recipe's seed was searched so that the first two logits of every reference step differ by more than
``MIN_MARGIN``, hundreds of times the float32 error.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .checkpoint_files import spell_as_v4, write_gguf, write_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["MIN_MARGIN", "NUM_STEPS", "PROMPT_LENGTHS", "RECIPES", "Reference", "ensure_checkpoint", "reference"]

VOCAB: Final = 512
EOS: Final = 511
"""Never part of a reference continuation."""
PROMPT_LENGTHS: Final = (5, 17, 40)
NUM_STEPS: Final = 16
MIN_MARGIN: Final = 0.1
MIN_DISTINCT: Final = 6
"""Different tokens in each continuation: a model stuck on one token would prove little."""
HEAD_GAIN: Final = 8.0
GAINS: Final = {"q_proj": 1.5, "k_proj": 1.5, "gate_proj": 1.5, "up_proj": 1.5, "gate_up_proj": 1.5, "mlp.gate": 2.0}
"""By the end of a matrix's name; 1 elsewhere. Attention and routing are made choosy."""


@dataclass(frozen=True)
class Recipe:
    """How one checkpoint is made. ``form``: how the folder is written, see :func:`_write`."""

    model_type: str
    config: Mapping[str, Any]
    seed: int = 0
    form: str = "plain"
    dtype: str = "float32"


@dataclass(frozen=True)
class Reference:
    """What transformers answers (eager attention, float32, whole sequence recomputed at every step).

    ``logits[i]`` is (NUM_STEPS, VOCAB) float32 as numpy: row s precedes token s of ``continuations[i]``.
    """

    prompts: list[list[int]]
    continuations: list[list[int]]
    margins: list[list[float]]
    logits: list[np.ndarray] = field(repr=False)


def _geometry(hidden: int, q_heads: int, kv_heads: int, head_dim: int, inter: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inter,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        **more,
    }


def _rope(kind: str, theta: float = 10_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


_S93 = Recipe("llama", _geometry(576, 9, 3, 64, 256, **_rope("default", 100_000.0)), seed=7)
_Q3 = Recipe("qwen3", _geometry(256, 16, 8, 128, 256, **_rope("default", 1_000_000.0)), seed=2)
_MOE = Recipe(
    "qwen3_moe",
    _geometry(
        128,
        4,
        2,
        32,
        192,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=96,
        norm_topk_prob=True,
        **_rope("default", 1_000_000.0),
    ),
)
_SMALL = _geometry(128, 4, 2, 32, 192)

RECIPES: Final[dict[str, Recipe]] = {
    "s93": _S93,
    "q25": Recipe("qwen2", _geometry(896, 14, 2, 64, 256, **_rope("default", 1_000_000.0)), seed=9),
    "q3": _Q3,
    "moe": _MOE,
    "moe2": Recipe(
        "qwen2_moe",
        {**_MOE.config, "norm_topk_prob": False, "shared_expert_intermediate_size": 160},
        seed=8,
    ),
    "moe-mixed": Recipe("qwen3_moe", {**_MOE.config, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "mistral-window": Recipe("mistral", {**_SMALL, "sliding_window": 8, **_rope("default")}, seed=11),
    "mistral-full": Recipe("mistral", {**_SMALL, "sliding_window": None, **_rope("default")}),
    "qwen2-window": Recipe(
        "qwen2",
        {**_SMALL, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, **_rope("default")},
        seed=11,
    ),
    "llama-bias": Recipe(
        "llama",
        {**_SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, **_rope("default")},
        seed=1,
    ),
    "llama-linear": Recipe("llama", {**_SMALL, **_rope("linear", factor=4.0)}, seed=9),
    "llama-dynamic": Recipe("llama", {**_SMALL, "max_position_embeddings": 256, **_rope("dynamic", factor=2.0)}),
    "llama-llama3": Recipe(
        "llama",
        {
            **_SMALL,
            **_rope(
                "llama3",
                500_000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
        seed=1,
    ),
    "llama-yarn": Recipe(
        "llama",
        {
            **_SMALL,
            "max_position_embeddings": 256,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=64),
        },
        seed=12,
    ),
    "q3-untied": Recipe("qwen3", {**_Q3.config, "tie_word_embeddings": False}, seed=13),
    "q3-16q2kv": Recipe("qwen3", {**_Q3.config, "num_key_value_heads": 2, "head_dim": 32}),
    "q3-8q2kv": Recipe(
        "qwen3", {**_Q3.config, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}, seed=4
    ),
    "q3-8q1kv": Recipe(
        "qwen3", {**_Q3.config, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32}, seed=11
    ),
    "q3-bf16": Recipe("qwen3", _Q3.config, seed=11, dtype="bfloat16"),
    "q3-v4": replace(_Q3, form="v4"),
    "q3-sharded": replace(_Q3, form="sharded"),
    "q3-text": replace(_Q3, form="text"),
    "moe-v4": replace(_MOE, form="v4"),
    "moe-fused": replace(_MOE, form="fused"),
    "s93-gguf": replace(_S93, form="gguf"),
    "moe-gguf": replace(_MOE, form="gguf"),
}
"""By name. Recipes that differ in ``form`` alone hold the same weights."""


def prompts() -> list[list[int]]:
    """The standard prompts: random ids below 500, so that they are tokens of the tiny tokenizer too."""
    draw = np.random.RandomState(20)
    return [draw.randint(3, 500, length).tolist() for length in PROMPT_LENGTHS]


# --- cache -----------------------------------------------------------------------------------------------------------


def cache_root() -> Path:
    """A folder for this version of the two files and of transformers; older versions' folders are left alone."""
    here = Path(__file__).parent
    code = b"".join((here / name).read_bytes() for name in ("make_checkpoints.py", "checkpoint_files.py"))
    digest = hashlib.sha256(code + importlib.metadata.version("transformers").encode())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "minisgl-tests" / f"checkpoints-{digest.hexdigest()[:16]}"


def ensure_checkpoint(name: str, root: Path | None = None) -> Path:
    """The folder of a tiny checkpoint, made if it is not there yet; safe with several processes at once."""
    home = (root or cache_root()) / name
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with (home.parent / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not home.exists():
                _make_atomically(name, home)
    return home / "model"


def reference(name: str, root: Path | None = None) -> Reference:
    """What transformers answers on the standard prompts."""
    from safetensors.numpy import load_file

    home = ensure_checkpoint(name, root).parent
    facts = json.loads((home / "reference.json").read_text())
    arrays = load_file(home / "reference.safetensors")
    logits = [arrays[f"logits.{i}"] for i in range(len(facts["prompts"]))]
    return Reference(facts["prompts"], facts["continuations"], facts["margins"], logits)


def _make_atomically(name: str, home: Path) -> None:
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=home.parent))
    try:
        make(name, draft)
        draft.rename(home)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def make(name: str, home: Path) -> None:
    """Write ``home/model`` and the reference next to it. Raises ValueError if the seed's margins are too small."""
    from safetensors.numpy import save_file
    from transformers.utils import logging

    logging.disable_progress_bar()
    recipe = RECIPES[name]
    model = build_model(recipe)
    _write(model, recipe, home / "model")
    answer = answer_of(model if recipe.form == "gguf" else load_model(home / "model"))
    if problem := weakness(answer):
        raise ValueError(f"checkpoint {name!r}: {problem}; search another seed with --search {name}")
    facts = {"prompts": answer.prompts, "continuations": answer.continuations, "margins": answer.margins}
    (home / "reference.json").write_text(json.dumps(facts))
    save_file({f"logits.{i}": rows for i, rows in enumerate(answer.logits)}, home / "reference.safetensors")


# --- model -----------------------------------------------------------------------------------------------------------


def build_model(recipe: Recipe) -> PreTrainedModel:
    """A model with this recipe's random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(recipe.model_type, **json.loads(json.dumps(recipe.config)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw = np.random.RandomState(recipe.seed)  # its streams are frozen, unlike those of newer generators
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = random_values(name, tuple(parameter.shape), draw)
            parameter.copy_(torch.from_numpy(values))
    return model.to(getattr(torch, recipe.dtype))


def random_values(name: str, shape: tuple[int, ...], draw: np.random.RandomState) -> np.ndarray:
    """float32 weights of one parameter."""
    if name.endswith("norm.weight"):
        values = draw.uniform(0.5, 1.5, shape)
        if name == "model.norm.weight":  # signs keep a tied head from just repeating the token that was put in
            values *= draw.choice([-1.0, 1.0], shape)
    elif name.endswith("bias"):
        values = draw.standard_normal(shape) * 0.5
    else:
        stem = name.removesuffix(".weight")
        in_head = stem.endswith(("embed_tokens", "lm_head"))
        gain = HEAD_GAIN if in_head else next((gain for end, gain in GAINS.items() if stem.endswith(end)), 1.0)
        values = draw.standard_normal(shape) * (gain / shape[-1] ** 0.5)
    return values.astype(np.float32)


def load_model(folder: Path) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def answer_of(model: PreTrainedModel) -> Reference:
    """Greedy continuations of the standard prompts, without a KV cache."""
    import torch

    found = Reference(prompts(), [], [], [])
    for prompt in found.prompts:
        ids, rows = list(prompt), []
        for _ in range(NUM_STEPS):
            with torch.inference_mode():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
            rows.append(logits.numpy().copy())
            ids.append(int(logits.argmax()))
        best = [np.sort(row)[-2:] for row in rows]
        found.continuations.append(ids[len(prompt) :])
        found.margins.append([float(first - second) for second, first in best])
        found.logits.append(np.stack(rows))
    return found


def weakness(answer: Reference) -> str:
    """Why these answers would not distinguish a right forward pass from a wrong one; empty if they do."""
    margin = min(map(min, answer.margins))
    distinct = min(len(set(ids)) for ids in answer.continuations)
    if margin < MIN_MARGIN:
        return f"the two best logits of a step differ by {margin:.4f} only"
    if distinct < MIN_DISTINCT:
        return f"a continuation has {distinct} different tokens only"
    if any(EOS in ids for ids in answer.continuations):
        return "a continuation holds the end-of-sequence token"
    return ""


# --- folders ---------------------------------------------------------------------------------------------------------


def _write(model: PreTrainedModel, recipe: Recipe, folder: Path) -> None:
    """``plain``: as transformers saves. ``sharded``: several files and an index. ``fused``: experts in one tensor.
    ``v4``: config.json as transformers 4 spelt it. ``text``: with a tokenizer. ``gguf``: one GGUF file only."""
    if recipe.form == "gguf":
        folder.mkdir(parents=True)
        write_gguf(model, folder / "model.gguf")
        return
    options: dict[str, Any] = {"sharded": {"max_shard_size": "1MB"}, "fused": {"save_original_format": False}}
    model.save_pretrained(folder, **options.get(recipe.form, {}))
    if recipe.form == "v4":
        spell_as_v4(folder / "config.json")
    if recipe.form == "text":
        write_tokenizer(folder)


# --- command ---------------------------------------------------------------------------------------------------------


def search(name: str, limit: int = 500) -> int:
    """The first seed of a recipe whose answers are strong enough."""
    for seed in range(limit):
        recipe = replace(RECIPES[name], seed=seed)
        problem = weakness(answer_of(build_model(recipe).float()))
        if not problem:
            return seed
        print(f"{name}: seed {seed}: {problem}", file=sys.stderr)
    raise ValueError(f"no seed below {limit} makes checkpoint {name!r} strong enough")


def main() -> None:
    import torch

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help=f"of {', '.join(RECIPES)}; default: all")
    parser.add_argument("--out", type=Path, help="folder to write to (default: the cache)")
    parser.add_argument("--search", action="store_true", help="look for seeds, write nothing")
    given = parser.parse_args()
    for name in given.names or RECIPES:
        begin = time.perf_counter()
        result: object = search(name) if given.search else ensure_checkpoint(name, given.out)
        print(f"{name}: {result} ({time.perf_counter() - begin:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
