"""``minisgl bench``: throughput and latency on fixed work, beside other engines and the physical limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from minisgl_core.modelconfig import read_model_config
from minisgl_core.modelconfig.geometries import GEOMETRIES, geometry
from minisgl_core.settings.schema import Settings

from .ablation import Ablation, ablation_options, run_ablation
from .options import settings_options
from .output import json_option, print_json, print_table
from .start import find_model, plan_line, refuse_choice, refuse_two_models, shows_progress

if TYPE_CHECKING:
    from minisgl_core.bench import Workload
    from minisgl_core.bench.measure import Result
    from minisgl_core.engine import EngineConfig

__all__ = ["command"]

_MODES = ("offline", "latency", "prefill", "shared-prefix")
_SHORTER = 4


@click.command(name="bench")
@click.argument("mode", type=click.Choice(_MODES))
@settings_options("model", "engine")
@click.option("--geometry", "geometry_name", metavar="NAME", help=f"A shape without weights: {', '.join(GEOMETRIES)}.")
@click.option("--runs", type=click.IntRange(1), help="Runs after a warm-up; medians are shown. [3; 1 with --ablate]")
@click.option("--requests", type=click.IntRange(1), help="Fewer or more requests than the mode's own number.")
@click.option("--short", is_flag=True, help=f"About 1/{_SHORTER} of the work; figures of other engines do not compare.")
@click.option("--bench-seed", type=int, default=0, help="Seed that the work is drawn with. [0]")
@click.option("--against", metavar="NAME", help="Show the figures of one other engine only.")
@ablation_options
@json_option
def command(
    settings: Settings,
    mode: str,
    geometry_name: str | None,
    runs: int | None,
    requests: int | None,
    short: bool,
    bench_seed: int,
    against: str | None,
    ablation: Ablation | None,
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

    def work(kind: str) -> Workload:
        drawn = make_workload(kind, bench_seed, requests)
        return drawn.shortened(_SHORTER) if short else drawn

    def run(path: str, name: str, dummy: bool) -> int:
        if ablation is not None:
            workloads = {each: work(each) for each in ablation.modes(mode)}
            longest = max(workload.longest for workload in workloads.values())
            config = _config(settings, path, longest, dummy)
            return run_ablation(ablation, config, mode, workloads, name, settings.engine.tp_size, runs or 1, as_json)
        workload = work(mode)
        config = _config(settings, path, workload.longest, dummy)
        return _measure(config, settings, workload, name, runs or 3, against, short, as_json)

    peer_rows(mode, geometry_name or "", against)  # an unknown name must not cost a measurement
    refuse_two_models(settings, geometry_name)
    if geometry_name:
        with model_folder(geometry(geometry_name)) as folder:
            return run(folder, geometry_name, True)
    refuse_choice(settings)
    path = find_model(settings)
    weightless = path.is_dir() and not any(path.glob("*.safetensors")) and not any(path.glob("*.gguf"))
    return run(str(path), path.name, weightless)


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


def _measure(
    config: EngineConfig,
    settings: Settings,
    workload: Workload,
    name: str,
    runs: int,
    against: str | None,
    short: bool,
    as_json: bool,
) -> int:
    from minisgl_core.bench.report import as_json as result_json
    from minisgl_core.bench.session import open_session

    with open_session(config, settings.engine.tp_size) as session:
        plan, memory = session.plan, session.memory
        click.echo(plan_line(plan), err=True)  # before the long part: it says what is about to be measured
        result = session.measure(workload, runs)
    if as_json:
        print_json(result_json(workload, name, result, plan, memory))
    else:
        _print(workload.mode, name, result, None if short else against, peers=not short)
    return 0


def _print(mode: str, name: str, result: Result, against: str | None, peers: bool) -> None:
    from minisgl_core.bench.report import peer_figures, peer_rows

    decodes = result.tpot_ms > 0  # else each request ended with its first token
    rows: list[tuple[str, str]] = [
        ("tokens out per second", f"{result.tok_s:,.0f}" if decodes else "-"),
        ("tokens in per second", f"{result.in_tok_s:,.0f}"),
        ("time to first token, median", f"{result.ttft_ms:.1f} ms"),
        ("time per token after it, median", f"{result.tpot_ms:.3f} ms" if decodes else "-"),
        ("host time per decode step", f"{result.host_us_per_step:.0f} us" if decodes else "-"),
        ("device busy", f"{result.device_busy_share:.0%}"),
        ("share of the physical limit", f"{result.limit_share:.0%}"),
    ]
    print_table((f"{mode}, {name}", "median"), rows)
    others = peer_rows(mode, name, against) if peers else []
    if others:
        unit = {"latency": "ms per token", "prefill": "tokens in per second"}.get(mode, "tokens out per second")
        click.echo()
        shown = [(peer, f"{figure:,g}") for peer, figure in others]
        print_table((f"others, {unit}", peer_figures()["device"]), shown)
