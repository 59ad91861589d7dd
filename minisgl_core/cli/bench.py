"""``minisgl bench``: throughput and latency on fixed workloads, compared with other engines and the hardware limit."""

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
@click.option(
    "--repeat",
    type=click.IntRange(1),
    help="Equal runs after a warm-up; median and slowest are shown. [3; 1 with --ablate]",
)
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
    repeat: int | None,
    requests: int | None,
    short: bool,
    bench_seed: int,
    against: str | None,
    ablation: Ablation | None,
    as_json: bool,
) -> int:
    """Measure throughput and latency on fixed workloads.

    The modes: offline throughput, batch-1 latency, prefill, and requests that share a prefix. All requests arrive at
    once; end of sequence is ignored. With --geometry, or a folder that contains only a config.json, the weights are
    random.
    """
    from minisgl_core.bench import make_workload
    from minisgl_core.bench.peers import peer_rows

    def work(kind: str) -> Workload:
        drawn = make_workload(kind, bench_seed, requests)
        return drawn.shortened(_SHORTER) if short else drawn

    def run(path: str, name: str, dummy: bool) -> int:
        if ablation is not None:
            workloads = {each: work(each) for each in ablation.modes(mode)}
            longest = max(workload.longest for workload in workloads.values())
            config = _config(settings, path, longest, dummy)
            return run_ablation(ablation, config, mode, workloads, name, settings.engine.tp_size, repeat or 1, as_json)
        workload = work(mode)
        config = _config(settings, path, workload.longest, dummy)
        return _measure(config, settings, workload, name, repeat or 3, against, short, as_json)

    peer_rows(mode, geometry_name or "", against)  # an unknown name must fail before the measurement
    refuse_two_models(settings, geometry_name)
    if geometry_name:
        from minisgl_core.bench.session import model_folder

        with model_folder(geometry(geometry_name)) as folder:
            return run(folder, geometry_name, True)
    refuse_choice(settings)
    path = find_model(settings)
    weightless = path.is_dir() and not any(path.glob("*.safetensors")) and not any(path.glob("*.gguf"))
    return run(str(path), path.name, weightless)


def _config(settings: Settings, path: str, longest: int, dummy: bool) -> EngineConfig:
    from minisgl_core.engine import EngineConfig
    from minisgl_core.engine.plan_resolution import DTYPES

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
    repeat: int,
    against: str | None,
    short: bool,
    as_json: bool,
) -> int:
    from minisgl_core.bench.provenance import provenance
    from minisgl_core.bench.report import as_json as result_json
    from minisgl_core.bench.session import open_session

    about = provenance(config.device)
    with open_session(config, settings.engine.tp_size) as session:
        click.echo(plan_line(session.plan), err=True)  # before the long part, so that the user sees what is measured
        result = session.measure(workload, repeat)
        found = result_json(workload, name, result, session, about)
    if as_json:
        print_json(found)
        return 0
    _print(workload.mode, name, result)
    if not short:
        _print_peers(workload.mode, name, against)
    return 0


_SHOWN = (
    ("tokens out per second", "tok_s", "{:,.0f}"),
    ("tokens in per second", "in_tok_s", "{:,.0f}"),
    ("time to first token", "ttft_ms", "{:.1f} ms"),
    ("time per token after it", "tpot_ms", "{:.3f} ms"),
    ("whole run", "seconds", "{:.3f} s"),
    ("host time, steady decode step", "host_us_steady", "{:.0f} us"),
    ("host time, decode step with joins or ends", "host_us_changed", "{:.0f} us"),
    ("host time, prefill step", "host_us_prefill", "{:.0f} us"),
    ("device inside passes", "device_pass_share", "{:.0%}"),
    ("share of the physical limit", "limit_share", "{:.0%}"),
)
"""Title, figure, format."""


def _print(mode: str, name: str, result: Result) -> None:
    from dataclasses import asdict

    median, slowest = asdict(result.median), result.slowest
    decodes = median["tpot_ms"] is not None  # otherwise each request ended with its first token
    rows = []
    for title, figure, form in _SHOWN:
        cells = [
            "-" if value is None or (figure == "tok_s" and not decodes) else form.format(value)
            for value in (median[figure], slowest.get(figure))
        ]
        rows.append((title, *cells))
    print_table((f"{mode}, {name}", f"median of {len(result.runs)}", "slowest"), rows)


def _print_peers(mode: str, name: str, against: str | None) -> None:
    from minisgl_core.bench.peers import peer_rows

    others = peer_rows(mode, name, against)
    if not others:
        return
    unit = {"latency": "ms per token", "prefill": "tokens in per second"}.get(mode, "tokens out per second")
    click.echo()
    print_table((f"others, {unit}", others[0].device, "measured"), [(one.engine, one.text, one.date) for one in others])
