"""Writes the tables of docs/performance.md from the raw results in benchmarks/results.

Its parts between marks (see ``marked.py``) are what :func:`parts` says; all else is written by hand and holds no
measured figure. ``make performance-page`` runs this; a test fails while the page says something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from marked import rewritten, table

from minisgl_core.bench.peers import PEER_COLUMNS, best_peer, peer_figures

__all__ = ["PAGE", "RESULTS", "measured_files", "parts"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
MODELS = {
    "qwen3-0.6b": "Qwen3-0.6B", "qwen3-14b": "Qwen3-14B", "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "llama-3.1-8b": "Llama-3.1-8B", "qwen2.5-7b": "Qwen2.5-7B", "qwen3-4b": "Qwen3-4B",
}  # fmt: skip
MODES = {
    "offline": "offline, tokens out per second",
    "latency": "batch 1, ms per token",
    "prefill": "prefill, tokens in per second",
}
MISSING = "not recorded"
MANY_LINES = (".json", ".jsonl")
Row = Mapping[str, Any]


def parts() -> dict[str, str]:
    """The generated parts by name, each of whole lines."""
    return {
        "headline": _headline(), "peers": _peers(), "host": _host(), "host floor": _host_floor(), "wait": _wait(),
        "face": _face(), "serving": _serving(),
        "ablation": _ablation(), "experts": _experts(), "decode attention": _decode_attention(),
        "sampling": _sampling(), "products": _products(), "fused": _fused(), "cpu": _cpu(), "choosing": _choosing(),
        "sources": _sources(),
    }  # fmt: skip


def result(name: str) -> Any:
    """The content of a file of raw results."""
    return json.loads((RESULTS / name).read_text())


def _results(mode: str) -> dict[str, Row]:
    """By geometry, those that were measured."""
    names = {geometry: f"h200_{geometry}-{mode}.json" for geometry in MODELS}
    return {geometry: result(name) for geometry, name in names.items() if (RESULTS / name).exists()}


def _number(value: float) -> str:
    """With four digits or, above 1,000, whole."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


# ---- whole engines -------------------------------------------------------------------------------------------------


def _headline() -> str:
    rows = []
    for geometry, model in MODELS.items():
        for mode, title in MODES.items():
            found = _results(mode).get(geometry)
            if found is None:
                continue
            column = PEER_COLUMNS[mode]
            each = [one[column] for one in found["runs"]]
            worst = max(each) if mode == "latency" else min(each)
            share = f"{found['limit_share']:.0%}"
            cells = (_number(found[column]), _number(worst), str(len(each)), _best(column, geometry), share)
            rows.append((model, title, *cells))
            if mode == "latency":
                first = [one["ttft_ms"] for one in found["runs"]]
                cells = (
                    _number(found["ttft_ms"]),
                    _number(max(first)),
                    str(len(first)),
                    _best("ttft_ms", geometry),
                    "-",
                )
                rows.append((model, "128 tokens in, ms to the first token", *cells))
    heads = ("model", "figure", "median", "slowest run", "runs", "best other engine", "share of the limit")
    return table(heads, rows)


def _best(name: str, geometry: str) -> str:
    best = best_peer(name, geometry)
    return "-" if best is None else f"{_number(best.best)} ({best.engine}, {best.date})"


def _peers() -> str:
    figures = peer_figures()
    columns = {
        "tok_s": "offline, tok/s", "tpot_ms": "batch 1, ms per token", "ttft_ms": "128 in, ms to the first",
        "in_tok_s": "prefill, tok/s",
    }  # fmt: skip
    text = []
    for date in dict.fromkeys(figure.date for figure in figures):
        those = [figure for figure in figures if figure.date == date]
        text.append(f"{date}, {those[0].device}: {those[0].method}.")
        rows = []
        for geometry, model in MODELS.items():
            for engine in dict.fromkeys(figure.engine for figure in those):
                own = {
                    figure.name: figure for figure in those if (figure.geometry, figure.engine) == (geometry, engine)
                }
                if own:
                    one = next(iter(own.values()))
                    cells = [own[name].text if name in own else "-" for name in columns]
                    rows.append((model, engine, *cells, one.settings, one.versions, one.command, one.runs))
        heads = ("model", "engine", *columns.values(), "settings", "other versions", "command", "runs")
        text.append(table(heads, rows))
    return "\n\n".join(text)


def _host() -> str:
    rows = []
    for geometry, model in MODELS.items():
        for mode in ("latency", "offline"):
            found = _results(mode).get(geometry)
            if found is None:
                continue
            each = ", ".join(f"{one['host_us_per_step']:.0f}" for one in found["runs"])
            split = [
                found.get(name) for name in ("host_us_steady", "launch_us_steady", "host_us_changed", "host_us_prefill")
            ]
            cells = [MISSING if value is None else f"{value:.0f}" for value in split]
            rows.append((model, mode, each, _ablation_host(geometry, mode), *cells))
    heads = (
        "model", "work", "each decode step, by run", "same work, ablation", "steady step", "of it launch",
        "step with joins or ends", "prefill step",
    )  # fmt: skip
    return table(heads, rows)


def _ablation_host(geometry: str, mode: str) -> str:
    name = f"h200_{geometry}-ablation.json"
    if not (RESULTS / name).exists():
        return "-"
    rows = result(name)["rows"]
    return next(f"{row['host_us_per_step']:.0f}" for row in rows if (row["variant"], row["mode"]) == ("default", mode))


def _host_floor() -> str:
    rows = [
        (
            row["mode"],
            str(row["batch"]),
            f"{row['median']:.0f}",
            f"{row['mean']:.0f}",
            f"{row['launching']:.0f}",
            str(row["steps"]),
        )
        for row in result("h200_host_step.json")["rows"]
    ]
    return table(("mode", "batch", "median", "mean", "of the mean, launch", "steps"), rows)


def _wait() -> str:
    rows = [
        (str(row["batch"]), f"{row['wait_ms']:g}", f"{row['median']:.0f}", f"{row['mean']:.0f}")
        for row in result("host_step_wait.json")["rows"]
    ]
    return table(("batch", "ms asleep before each step", "median", "mean"), rows)


def _face() -> str:
    rows = [
        (f"`{way}`", *(f"{kinds[kind][name]:.1f}" for kind in ("wall_us", "cpu_us") for name in ("median", "added")))
        for way, kinds in result("async_face.json")["figures"].items()
    ]
    return table(("way", "between steps", "added", "CPU time", "added"), rows)


def _serving() -> str:
    found: Row = result("serving.json")["parts"]
    streams, rate, memory = found["streams"], found["throughput"], found["memory"]
    alone = "as streams of AsyncLLM"
    rows = [
        (f"{streams['clients']:,} streams at once, errors", f"{streams['errors']:.0f}", ""),
        ("their p99 to the first token, ms", f"{streams['http_ttft_p99_ms']:,.0f}", _alone(streams, "ttft", alone)),
        ("their p99 to the last token, ms", f"{streams['http_e2e_p99_ms']:,.0f}", _alone(streams, "e2e", alone)),
        (
            f"{rate['clients']} requests at once, tokens per second",
            f"{rate['http_tok_s']:,.0f}",
            f"{rate['generate_tok_s']:,.0f} with LLM.generate, ratio {rate['ratio']:.2f}",
        ),
        (
            f"memory after {memory['requests']:,} requests of one token, MiB",
            f"{memory['mib'][-2]:,.0f}",
            f"{memory['growth_mib']:+.1f} since a tenth of them",
        ),
        (f"after {memory['aborts']:,} more that were left", f"{memory['growth_by_aborts_mib']:+.1f}", ""),
        ("grammar in one row of 16, speed of its steps", *_grammar(found["grammar"])),
        ("our own client, us of CPU time per event", f"{found['client']['cpu_us_per_event']:.1f}", ""),
    ]
    return table(("what", "over HTTP", "compared with"), rows)


def _alone(streams: Row, name: str, way: str) -> str:
    return f"{streams[f'alone_{name}_p99_ms']:,.0f} {way}, {streams[f'added_{name}_p99_ms']:+,.0f} over HTTP"


def _grammar(found: Row) -> tuple[str, str]:
    if "skipped" in found:
        return "-", f"not measured: {found['skipped']}"
    return f"{found['ratio']:.2f}", f"{found['steps_s']:,.0f} steps per second without"


def _ablation() -> str:
    tables = {
        geometry: result(f"h200_{geometry}-ablation.json")
        for geometry in MODELS
        if (RESULTS / f"h200_{geometry}-ablation.json").exists()
    }
    cells = {geometry: {(row["variant"], row["mode"]): row for row in one["rows"]} for geometry, one in tables.items()}
    places = list(dict.fromkeys(place for found in cells.values() for place in found))
    rows = [
        (
            variant if mode == "offline" else f"{variant}, {mode}",
            *(_ablation_cell(found.get((variant, mode))) for found in cells.values()),
        )
        for variant, mode in places
    ]
    return table(("row", *(MODELS[geometry] for geometry in tables)), rows)


def _ablation_cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if "rate" not in row:
        return str(row.get("note") or "could not be measured")
    return f"{row['rate']:,.0f} ({row['relative']:.2f}), {row['tpot_ms']:.3g} ms"


# ---- kernels -------------------------------------------------------------------------------------------------------


def _experts() -> str:
    rows = [
        (str(row["tokens"]), _number(row["us"]), _number(row["guess_us"]), f"{row['limit_share']:.0%}")
        for row in sorted(result("gpu_moe_h200.json")["rows"], key=lambda row: row["tokens"])
    ]
    return table(("tokens", "us", "by rule", "share of the limit"), rows)


def decode_row(heads: tuple[int, int], batch: int, length: int) -> Row | None:
    """The raw row of what are the defaults today: 64 keys a step, and parts for 528 programs, none of them empty."""
    parts, keys = 1, 64
    while parts < 64 and batch * heads[1] * parts * 2 <= 528:
        parts *= 2
    parts = min(parts, -(-length // keys))
    wanted = {"splits": parts, "block_tokens": keys, "warps": 4, "stages": 3, "launches": 2 if parts > 1 else 1}
    lines = (RESULTS / f"gpu_decode_h200-{heads[0]}x{heads[1]}.jsonl").read_text().splitlines()[1:]
    found = [row for row in map(json.loads, lines) if (row["batch"], row["length"]) == (batch, length)]
    chosen = [row for row in found if all(row.get(name) == value for name, value in wanted.items())]
    return chosen[0] if chosen else next((row for row in found if batch > 32 and "splits" not in row), None)


def _decode_attention() -> str:
    sizes = [
        (1, 128),
        (1, 1024),
        (1, 4096),
        (4, 1024),
        (8, 1024),
        (16, 1024),
        (16, 4096),
        (64, 1024),
        (64, 4096),
        (256, 1024),
    ]
    heads = ((16, 8), (40, 8), (32, 4))
    rows = []
    for batch, length in sizes:
        found = [decode_row(pair, batch, length) for pair in heads]
        cells = ["-" if row is None else f"{row['us']:.1f} ({row['tb_s']:.2f})" for row in found]
        rows.append((str(batch), str(length), *cells))
    return table(("batch", "tokens each", *(f"{q} query, {kv} kv heads" for q, kv in heads)), rows)


def _sampling() -> str:
    found = {(row["logits"], row["how"], row["tokens"]): row["us"] for row in result("gpu_sample_h200.json")["rows"]}
    logits = sorted({key[0] for key in found}, key=lambda name: name != "peaked")
    hows = list(dict.fromkeys(key[1] for key in found))
    places = [(kind, how) for kind in logits for how in hows if any(key[:2] == (kind, how) for key in found)]
    rows = [
        (str(tokens), *(_number(found[kind, how, tokens]) for kind, how in places))
        for tokens in sorted({key[2] for key in found})
    ]
    return table(("rows", *(f"{how}, {kind}" for kind, how in places)), rows)


def _by_rows(
    measured: Sequence[Row], cell: Callable[[Row], str], key: Callable[[Row], tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """A line per key, a column per number of rows."""
    counts = sorted({row["rows"] for row in measured})
    found = {(key(row), row["rows"]): cell(row) for row in measured}
    return [(*name, *(found.get((name, count), "-") for count in counts)) for name in dict.fromkeys(map(key, measured))]


def _products() -> str:
    def cell(row: Row) -> str:
        text = f"{row['skinny_us']:.1f}, {row['cublas_us']:.1f}"
        return f"**{text}**" if row["skinny_us"] < 0.97 * row["cublas_us"] else text

    rows = _by_rows(result("gpu_linear_h200.json")["measured"], cell, lambda row: (f"{row['n']}x{row['k']}",))
    return table(("weight", "1 row", "4", "8", "16"), rows)


def _fused() -> str:
    def cell(row: Row) -> str:
        separate = min(row["separate_us"], row.get("norm_then_act_us", row["separate_us"]))
        text = f"{row['fused_us']:.1f}, {separate:.1f}"
        return f"**{text}**" if row["wins"] else text

    measured = result("gpu_linear_fused_h200.json")["measured"]
    rows = _by_rows(measured, cell, lambda row: (f"{row['n']}x{row['k']}", row["form"]))
    return table(("weight", "fused", "1 row", "4", "8", "16"), rows)


# ---- a CPU ---------------------------------------------------------------------------------------------------------


def _cpu() -> str:
    found = result("cpu.json")
    rows = [
        (
            row["workload"], row["dtype"], f"{row['minisgl_tok_s']:.1f}", f"{row['transformers_tok_s']:.1f}",
            f"{row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})", f"{row['goal']:.1f}",
            f"{row['limit_share']:.0%}" if "limit_share" in row else "-", str(len(row["runs"])),
        )
        for row in found["rows"]
    ]  # fmt: skip
    heads = (
        "workload",
        "dtype",
        "minisgl tok/s",
        "transformers tok/s",
        "ratio (range)",
        "goal",
        "of the limit",
        "runs",
    )
    machine, host = found["machine"], found["host_us_per_step"]
    steps = ", ".join(f"{us:.0f} us at batch {batch}" for batch, us in host.items())
    rate = f"{machine['read_bytes_per_s'] / 1e9:.1f} GB/s"
    return (
        f"{table(heads, rows)}\n\nMachine: {machine['threads']} threads of an {machine['cpu']}. The limit is the\n"
        f"bytes of all weights over {rate}, the rate at which a plain reduction reads there. Thread CPU time of a\n"
        f"steady decode step with a stub model: {steps}."
    )


def _choosing() -> str:
    rows = [
        (str(run["start"]["plugins"]), f"{run['start']['total_ms']:.0f}", f"{run['call']['ratio']:.3f}")
        for run in result("resolve.json")["runs"]
    ]
    return table(("plugins", "discovery and resolving, ms", "call through the plan over a direct call"), rows)


# ---- where it all comes from ---------------------------------------------------------------------------------------


def measured_files() -> list[Path]:
    """Every file of raw results."""
    return sorted(path for path in RESULTS.iterdir() if path.suffix in MANY_LINES)


def _sources() -> str:
    heads = ("file", "commit", "device", "torch", "command", "runs")
    return table(heads, [_source(path) for path in measured_files()])


def _source(path: Path) -> tuple[str, ...]:
    text = path.read_text()
    facts: Row = json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)
    versions, device = facts.get("versions", {}), facts.get("device")
    name = device.get("name") if isinstance(device, dict) else device or facts.get("machine", {}).get("cpu")
    command = facts.get("command") or "; ".join(facts.get("commands", ()))
    runs = facts.get("repeat", facts.get("runs"))
    count = str(len(runs)) if isinstance(runs, list) else None if runs is None else str(runs)
    cells = (
        facts.get("commit"),
        name,
        versions.get("torch", facts.get("torch")),
        f"`{command}`" if command else None,
        count,
    )
    return (f"`{path.name}`", *(cell or MISSING for cell in cells))


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), parts()), encoding="utf-8")
