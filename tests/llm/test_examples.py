"""The scripts of examples/ for people who run models, and the code of docs/python.md, on a tiny model."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from minisgl_core.tokenizer import load_tokenizer
from support.make_checkpoints import ensure_checkpoint

ROOT = Path(__file__).parents[2]
MODEL = ensure_checkpoint("q3-text")


def run(script: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(name: str, folder: Path) -> Path:
    """The script, with a KV pool that fits a small machine."""
    code = (ROOT / "examples" / f"{name}.py").read_text()
    made, count = re.subn(r"LLM\((model|other|sys\.argv\[1\])", r"LLM(\1, num_page_override=512", code)
    assert count
    script = folder / f"{name}.py"
    script.write_text(made)
    return script


def test_batch_jsonl(tmp_path: Path) -> None:
    prompts = [json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate("abc")]
    (tmp_path / "in.jsonl").write_text("".join(prompts))
    run(example("batch_jsonl", tmp_path), str(MODEL), str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [0, 1, 2]
    assert all(line["token_ids"] and line["prompt_tokens"] for line in lines)


def test_streaming(tmp_path: Path) -> None:
    lines = run(example("streaming", tmp_path), str(MODEL)).splitlines()
    assert {line[:3] for line in lines} == {"a: ", "b: "}


def test_chat_prefix(tmp_path: Path) -> None:
    out = run(example("chat_prefix", tmp_path), str(MODEL))
    (first, _), (second, _) = re.findall(r"(\d+) of (\d+) prompt tokens were cached", out)
    assert int(first) == 0 < int(second)


def test_scoring(tmp_path: Path) -> None:
    """By hand: transformers' log-softmax in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    text = "def answer(model):"
    tokenizer = load_tokenizer(MODEL)
    assert tokenizer is not None
    ids = torch.tensor([tokenizer.encode(text)])
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.inference_mode():
        scores = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    printed = float(run(example("scoring", tmp_path), str(MODEL), text).split()[0])
    assert np.isclose(printed, math.exp(-float(scores.mean())), rtol=0.01)


def test_two_models(tmp_path: Path) -> None:
    lines = run(example("two_models", tmp_path), str(MODEL), str(MODEL)).splitlines()
    assert len(lines) == 2 and lines[0] == lines[1]


def test_the_code_of_the_python_page(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("".join(blocks).replace('"path/to/model"', f"{str(MODEL)!r}, num_page_override=512"))
    run(script)


def test_the_examples_are_listed() -> None:
    text = (ROOT / "examples" / "README.md").read_text()
    entries = {path.name for path in (ROOT / "examples").iterdir() if path.name not in ("README.md", "__pycache__")}
    assert [name for name in sorted(entries) if name not in text] == []
