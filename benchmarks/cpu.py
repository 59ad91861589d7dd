"""minisgl on a CPU against transformers' ``generate``, on the demo model, in one process with the same threads.

    python benchmarks/cpu.py                     # float32 and bfloat16, medians of 5
    python benchmarks/cpu.py --json results.json

Measures decoding at batch 1 and 8, a 512-token prefill, and 32 requests that share a 256-token prefix; then the
host's own time per decode step with a stub model. Both engines hold the same weights, and runs alternate, so that a
machine whose speed drifts slows both. transformers runs its default attention (SDPA) and serves the shared prefix as
one left-padded batch.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from commandline import Parser, about, keep, output, positive, run
from host_step import cpu_name, host_microseconds
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from minisgl_core.checkpoint import open_source
from minisgl_core.core import SamplingParams
from minisgl_core.demo_model import ensure_demo_model
from minisgl_core.errors import UsageError
from minisgl_core.llm import LLM
from minisgl_core.modelconfig import read_model_config

DECODE_TOKENS, PROMPT_LEN, PREFILL_LEN = 32, 32, 512
SHARED_PREFIX, SHARED_REQUESTS = 256, 32
GOALS = {"decode batch 1": 1.3, "decode batch 8": 1.5, "prefill 512": 1.0, "shared prefix": 3.0}
Prompts = list[list[int]]


@dataclass(frozen=True)
class Workload:
    """Prompts with their output lengths; ``measures`` says which tokens the rate counts."""

    name: str
    prompts: Prompts
    outputs: list[int]
    measures: str

    @property
    def counted(self) -> int:
        if self.measures == "prefill":
            return sum(map(len, self.prompts))
        return sum(self.outputs) - (len(self.outputs) if self.measures == "decode" else 0)


def make_workloads(vocab: int) -> list[Workload]:
    """The same random token ids on every machine."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(100, vocab, (count,), generator=generator).tolist()

    prefix = ids(SHARED_PREFIX)
    tails = [4 + 3 * (i % 16) for i in range(SHARED_REQUESTS)]
    return [
        Workload("decode batch 1", [ids(PROMPT_LEN)], [DECODE_TOKENS + 1], "decode"),
        Workload("decode batch 8", [ids(PROMPT_LEN) for _ in range(8)], [DECODE_TOKENS + 1] * 8, "decode"),
        Workload("prefill 512", [ids(PREFILL_LEN)], [1], "prefill"),
        Workload(
            "shared prefix",
            [prefix + ids(tail) for tail in tails],
            [8 + 2 * (i % 13) for i in range(SHARED_REQUESTS)],
            "all",
        ),
    ]


def reference_model(path: Path, dtype: torch.dtype) -> Any:
    """transformers' own Llama with the weights that minisgl reads."""
    c, source = read_model_config(path), open_source(path)
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_q_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings,
        rope_theta=c.rope.theta,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    whole = {name: source.read(name, (slice(None),) * len(source.shape(name))) for name in source.names()}
    missing, unexpected = model.load_state_dict(whole, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise UsageError(
            f"the model is not transformers' Llama: missing {missing}, unexpected {unexpected}",
            field="--model",
            value=str(path),
            remedy="name a model of that family",
        )
    source.close()
    model.tie_weights()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


def run_transformers(model: Any, prompts: Prompts, new_tokens: int) -> list[list[int]]:
    """One left-padded batch; greedy."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
    return out[:, longest:].tolist()  # type: ignore[no-any-return]


def run_minisgl(llm: LLM, prompts: Prompts, outputs: list[int]) -> list[list[int]]:
    """Continuous batching; greedy."""
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in outputs]
    return [answer["token_ids"] for answer in llm.generate(prompts, params, progress=False)]


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def seconds(workload: Workload, run: Callable[[Prompts, list[int]], Any], fresh: Callable[[], None]) -> float:
    """One measurement. Decode time is the total minus a run that stops at the first token."""
    fresh()
    whole = timed(lambda: run(workload.prompts, workload.outputs))
    if workload.measures != "decode":
        return whole
    fresh()
    return whole - timed(lambda: run(workload.prompts, [1] * len(workload.prompts)))


def compare(path: Path, dtype: torch.dtype, runs: int, threads: int) -> list[dict[str, Any]]:
    """All workloads in one dtype; a row each."""
    model, rows = reference_model(path, dtype), []
    llm = LLM(str(path), dtype=dtype, progress=False, max_running_req=32, num_page_override=16384)
    fresh = llm.scheduler.clear_cache
    for workload in tqdm(make_workloads(llm.engine.vocab_size), desc=str(dtype).removeprefix("torch.")):
        ours: list[float] = []
        theirs: list[float] = []
        for turn in range(runs + 1):  # the first is a warm-up
            mine = seconds(workload, lambda p, n: run_minisgl(llm, p, n), fresh)
            other = seconds(workload, lambda p, n: run_transformers(model, p, max(n)), lambda: None)
            if turn:
                ours.append(workload.counted / mine)
                theirs.append(workload.counted / other)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        rows.append(
            {
                "workload": workload.name,
                "dtype": str(dtype).removeprefix("torch."),
                "minisgl_tok_s": statistics.median(ours),
                "transformers_tok_s": statistics.median(theirs),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "goal": GOALS[workload.name],
                "runs": [{"minisgl": a, "transformers": b} for a, b in zip(ours, theirs, strict=True)],
            }
        )
    weights = weight_bytes(llm)
    plan = llm.plan.summary()
    llm.shutdown()
    limit = read_bandwidth(threads) / weights
    for row in rows:
        row["plan"] = plan
        if row["workload"].startswith("decode"):
            batch = int(row["workload"].split()[-1])
            row["limit_tok_s"] = limit * batch
            row["limit_share"] = row["minisgl_tok_s"] / row["limit_tok_s"]
    return rows


def weight_bytes(llm: LLM) -> int:
    """Bytes that a decode step must read: every matrix once; of an embedding table only the head reads all rows."""
    c, size = llm.engine.model_config, llm.engine.dtype.itemsize
    attention = (2 * c.num_q_heads + 2 * c.num_kv_heads) * c.head_dim * c.hidden_size
    layer = attention + 3 * c.intermediate_size * c.hidden_size
    return (c.num_layers * layer + c.vocab_size * c.hidden_size) * size


def read_bandwidth(threads: int) -> float:
    """Bytes per second that a plain reduction over a large array reads; best of several, as a ceiling."""
    data = torch.ones(64 << 20, dtype=torch.float32)
    torch.set_num_threads(threads)
    return max(data.nbytes / timed(data.sum) for _ in range(7))


def print_table(rows: list[dict[str, Any]], host: dict[int, float], bandwidth: float) -> None:
    """Print the main figures; the JSON has all of them."""
    table = Table("workload", "dtype", "minisgl tok/s", "transformers tok/s", "ratio (min-max)", "goal", "of limit")
    for row in rows:
        share = f"{row['limit_share']:.0%}" if "limit_share" in row else "-"
        spread = f"{row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
        cells = (f"{row['minisgl_tok_s']:.1f}", f"{row['transformers_tok_s']:.1f}", spread, f"{row['goal']:.1f}", share)
        table.add_row(row["workload"], row["dtype"], *cells)
    console = Console(width=120)
    console.print(table)
    console.print(f"limit: weight bytes over {bandwidth / 1e9:.1f} GB/s, the measured rate of a plain reduction")
    for batch, microseconds in host.items():
        console.print(f"host time per steady decode step, batch {batch}: {microseconds:.0f} us")


def main() -> None:
    """Measure, print, and write the JSON if asked."""
    parser = Parser(__doc__)
    parser.add_argument("--model", type=Path, help="a Llama-family model file or folder (default: the demo model)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=output, help="write raw results here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = options.model or ensure_demo_model()
    rows = [row for name in options.dtype for row in compare(path, getattr(torch, name), options.runs, options.threads)]
    host = {batch: host_microseconds(batch) for batch in (8, 64, 256)}
    bandwidth = read_bandwidth(options.threads)
    print_table(rows, host, bandwidth)
    if options.json:
        result = {
            **about(options),
            "machine": {"cpu": cpu_name(), "threads": options.threads, "read_bytes_per_s": bandwidth},
            "host_us_per_step": host,
            "rows": rows,
        }
        keep(result, options.json)


if __name__ == "__main__":
    raise SystemExit(run(main))
