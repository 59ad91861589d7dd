"""``minisgl bench``: throughput and latency on fixed work, beside other engines and the physical limit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minisgl_core.errors import UsageError
from minisgl_core.modelconfig import read_model_config
from minisgl_core.modelconfig.geometries import GEOMETRIES, geometry
from minisgl_core.settings.schema import Settings

from .options import settings_options
from .output import json_option, print_json, print_table
from .start import find_model, plan_line, shows_progress

if TYPE_CHECKING:
    from minisgl_core.bench.measure import Result
    from minisgl_core.engine import EngineConfig

__all__ = ["command"]

_MODES = ("offline", "latency", "prefill", "shared-prefix")


@click.command(name="bench")
@click.argument("mode", type=click.Choice(_MODES))
@settings_options("model", "engine")
@click.option("--geometry", "geometry_name", metavar="NAME", help=f"A shape without weights: {', '.join(GEOMETRIES)}.")
@click.option("--runs", type=click.IntRange(1), default=3, help="Runs after one warm-up; medians are shown. [3]")
@click.option("--requests", type=click.IntRange(1), help="Fewer or more requests than the mode's own number.")
@click.option("--bench-seed", type=int, default=0, help="Seed that the work is drawn with. [0]")
@click.option("--against", metavar="NAME", help="Show the figures of one other engine only.")
@click.option("--ablate", is_flag=True, help="Switch every optimisation off alone, the rest on.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="With --ablate: draw the table to this file (.png, .svg)."
)
@json_option
def command(
    settings: Settings,
    mode: str,
    geometry_name: str | None,
    runs: int,
    requests: int | None,
    bench_seed: int,
    against: str | None,
    ablate: bool,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Measure throughput and latency on fixed work.

    The modes: offline throughput, batch-1 latency, prefill, and requests that share a prefix.

    All requests arrive at once; end of sequence is ignored. With --geometry, or a folder that holds nothing but a
    config.json, the weights are random.
    """
    from minisgl_core.bench import make_workload
    from minisgl_core.bench.report import peer_rows
    from minisgl_core.bench.session import model_folder

    if plot and not ablate:
        raise UsageError("--plot draws the table of --ablate", field="--plot", remedy="add --ablate")
    peer_rows(mode, geometry_name or "", against)  # an unknown name must not cost a measurement
    workload = make_workload(mode, bench_seed, requests)
    if geometry_name:
        with model_folder(geometry(geometry_name)) as folder:
            config = _config(settings, folder, workload.longest, dummy=True)
            return _run(config, settings, workload, geometry_name, runs, against, ablate, plot, as_json)
    path = find_model(settings)
    weightless = path.is_dir() and not any(path.glob("*.safetensors")) and not any(path.glob("*.gguf"))
    config = _config(settings, str(path), workload.longest, dummy=weightless)
    return _run(config, settings, workload, path.name, runs, against, ablate, plot, as_json)


def _config(settings: Settings, path: str, longest: int, dummy: bool) -> EngineConfig:
    from minisgl_core.engine import EngineConfig
    from minisgl_core.engine.planning import DTYPES

    fields = settings.engine.model_dump()
    fields.pop("tp_size")
    fields["dummy_weights"] = dummy or fields["dummy_weights"]
    if fields["max_seq_len_override"] is None:
        fields["max_seq_len_override"] = min(read_model_config(path).max_position_embeddings, max(4096, longest))
    return EngineConfig(
        model_path=path,
        dtype=DTYPES.get(settings.model.dtype),
        backends=settings.backends,
        backend_options=settings.options,
        allow_plugins=settings.allow,
        deny_plugins=settings.deny,
        progress=shows_progress(),
        **fields,
    )


def _run(
    config: EngineConfig,
    settings: Settings,
    workload: Any,
    name: str,
    runs: int,
    against: str | None,
    ablate: bool,
    plot: Path | None,
    as_json: bool,
) -> int:
    from minisgl_core.bench.report import as_json as result_json
    from minisgl_core.bench.session import run_workload

    if ablate:
        return _ablate(config, settings, workload, name, runs, plot, as_json)
    result, plan, _ = run_workload(config, workload, tp_size=settings.engine.tp_size, runs=runs)
    click.echo(plan_line(plan), err=True)
    if as_json:
        print_json(result_json(workload.mode, name, result, plan))
    else:
        _print(workload.mode, name, result, against)
    return 0


def _print(mode: str, name: str, result: Result, against: str | None) -> None:
    from minisgl_core.bench.report import peer_figures, peer_rows

    rows: list[tuple[str, str]] = [
        ("tokens out per second", f"{result.tok_s:,.0f}"),
        ("tokens in per second", f"{result.in_tok_s:,.0f}"),
        ("time to first token, median", f"{result.ttft_ms:.1f} ms"),
        ("time per token after it, median", f"{result.tpot_ms:.3f} ms"),
        ("host time per decode step", f"{result.host_us_per_step:.0f} us"),
        ("device busy", f"{result.device_busy_share:.0%}"),
        ("share of the physical limit", f"{result.limit_share:.0%}"),
    ]
    print_table((f"{mode}, {name}", "median"), rows)
    peers = peer_rows(mode, name, against)
    if peers:
        unit = {"latency": "ms per token", "prefill": "tokens in per second"}.get(mode, "tokens out per second")
        click.echo()
        print_table((f"others, {unit}", peer_figures()["device"]), [(peer, f"{figure:,g}") for peer, figure in peers])


def _ablate(
    config: EngineConfig, settings: Settings, workload: Any, name: str, runs: int, plot: Path | None, as_json: bool
) -> int:
    from minisgl_core.bench.report import versions
    from minisgl_core.bench.session import ablate

    rows: list[dict[str, Any]] = []
    for variant, found in ablate(config, workload, tp_size=settings.engine.tp_size, runs=runs):
        if isinstance(found, Exception):
            rows.append({"variant": variant.name, "error": " ".join(str(found).split())[:400]})
        else:
            rate = found.in_tok_s if workload.mode == "prefill" else found.tok_s
            rows.append({"variant": variant.name, "rate": rate, "tpot_ms": found.tpot_ms, "ttft_ms": found.ttft_ms,
                         "host_us_per_step": found.host_us_per_step, "limit_share": found.limit_share})  # fmt: skip
        click.echo(_ablation_line(rows[-1]), err=True)
    base = rows[0].get("rate")
    for row in rows:
        row["relative"] = row["rate"] / base if base and "rate" in row else None
    if as_json:
        print_json({"mode": workload.mode, "geometry": name, "rows": rows, "versions": versions()})
    else:
        shown = [
            (row["variant"], f"{row['rate']:,.0f}", f"{row['relative']:.2f}", f"{row['tpot_ms']:.3f}")
            if row["relative"] is not None
            else (row["variant"], "-", "-", row.get("error", "-"))
            for row in rows
        ]
        print_table((f"{workload.mode}, {name}", "tokens per second", "of default", "ms per token, or why not"), shown)
    if plot:
        _draw(rows, f"{workload.mode}, {name}", plot)
    return 0 if base else 1


def _ablation_line(row: dict[str, Any]) -> str:
    return f"{row['variant']}: " + (f"{row['rate']:,.0f} tokens per second" if "rate" in row else row["error"])


def _draw(rows: list[dict[str, Any]], title: str, target: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "drawing needs matplotlib", field="--plot", value=str(target), remedy="pip install matplotlib"
        ) from error
    measured = [row for row in rows if row["relative"] is not None]
    figure = Figure(figsize=(8, 0.35 * len(measured) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    axes.barh([row["variant"] for row in measured], [row["relative"] for row in measured])
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set(title=title, xlabel="throughput relative to the default")
    figure.savefig(target)
