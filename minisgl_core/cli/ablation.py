"""``minisgl bench --ablate``: selects, stores and shows the rows of an ablation."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from minisgl_core.env import ENV
from minisgl_core.errors import UsageError
from minisgl_core.files import require_writable_file, write_whole

from .output import print_json, print_table

if TYPE_CHECKING:
    from minisgl_core.bench import Workload
    from minisgl_core.bench.ablate import Row
    from minisgl_core.bench.ablation_table import AblationTable
    from minisgl_core.bench.variants import Variant
    from minisgl_core.engine import EngineConfig

__all__ = ["Ablation", "ablation_options", "run_ablation"]

F = TypeVar("F", bound=Callable[..., Any])
_MANY: Final = 2
"""Number of rows that cannot run here from which they share a line."""
_WIDEST: Final = 240
"""Characters of an error in the table. The line printed for each row as it finishes, and JSON, have all of it."""


@dataclass(frozen=True, slots=True)
class Ablation:
    """The options of an ablation."""

    variants: tuple[Variant, ...]
    out: Path | None
    plot: Path | None
    row_limit: float

    def modes(self, mode: str) -> list[str]:
        """The requested mode, and those that some rows need instead."""
        return list(dict.fromkeys([mode, *(variant.mode for variant in self.variants if variant.mode)]))


def ablation_options(function: F) -> F:
    """Adds the options; they arrive as ``ablation``, None without ``--ablate``."""
    options = (
        click.option("--ablate", is_flag=True, help="Change one thing at a time: optimisations off, other backends."),
        click.option("--rows", metavar="A,B", help="With --ablate: only these rows, or those that begin with a word."),
        click.option("--part", metavar="I/N", help="With --ablate: the I-th of N parts of the rows, and the default."),
        click.option(
            "--out",
            type=click.Path(path_type=Path),
            help="With --ablate: a JSON file, written after every row; other rows of the same work that it holds stay.",
        ),
        click.option(
            "--plot", type=click.Path(path_type=Path), help="With --ablate: draw the table to this .svg file."
        ),
        click.option(
            "--row-limit", type=click.FloatRange(1), help="With --ablate: seconds after which a row is given up. [600]"
        ),
    )

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:
        taken = {name: given.pop(name) for name in ("ablate", "rows", "part", "out", "plot", "row_limit")}
        return function(ablation=_ablation(**taken), **given)

    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


def _ablation(
    ablate: bool, rows: str | None, part: str | None, out: Path | None, plot: Path | None, row_limit: float | None
) -> Ablation | None:
    if not ablate:
        for name, value in (("rows", rows), ("part", part), ("out", out), ("plot", plot), ("row-limit", row_limit)):
            if value is not None:
                raise UsageError(f"--{name} belongs to --ablate", field=f"--{name}", value=value, remedy="add --ablate")
        return None
    from minisgl_core.bench import variants

    names = [name.strip() for name in (rows or "").split(",") if name.strip()]
    if rows is not None and not names:
        raise UsageError(f"--rows is {rows!r}", field="--rows", value=rows, remedy="name rows, or leave it out for all")
    if row_limit is not None and math.isnan(row_limit):
        raise UsageError("--row-limit is nan", field="--row-limit", value=row_limit, remedy="give seconds")
    chosen = variants.choose_variants(names, _part(part), variants.VARIANTS)
    if plot is not None and plot.suffix != ".svg":
        raise UsageError(f"--plot is {str(plot)!r}", field="--plot", value=str(plot), remedy="name a .svg file")
    for name, target in (("--out", out), ("--plot", plot)):
        if target is not None:
            require_writable_file(target, name, field=name)
    return Ablation(chosen, out, plot, row_limit or 600.0)


def _part(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, 1
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    number, of = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= of:
        raise UsageError(f"--part is {text!r}", field="--part", value=text, remedy="give I/N, such as 1/3")
    return number, of


def run_ablation(
    ablation: Ablation,
    config: EngineConfig,
    mode: str,
    workloads: Mapping[str, Workload],
    name: str,
    tp_size: int,
    repeat: int,
    as_json: bool,
) -> int:
    """Measure, show and store the rows. Exits with 1 if the default could not be measured, and with 130
    after Ctrl-C.
    """
    from minisgl_core.bench.ablate import Job, ablate
    from minisgl_core.bench.ablation_table import AblationTable

    works = {each: workload.facts() for each, workload in workloads.items()}
    table = AblationTable(_facts(config, mode, name, tp_size, repeat), works, ablation.out)
    measured: list[Row] = []
    try:
        for row in ablate(Job(config, mode, workloads, tp_size, repeat), ablation.variants, ablation.row_limit):
            if not row.get("refused"):
                click.echo(_line(row), err=True)  # before a file that changed meanwhile may end the run
            table.add(row)
            measured.append(row)
    except KeyboardInterrupt:
        click.echo(f"\n{_interrupted(len(measured), ablation.out)}", err=True)  # a terminal shows ^C before it
        return 130
    if as_json:
        print_json(table.content)
    else:
        headers = (f"{mode}, {name}", "tokens per second", "of default", "ms per token, or why not")
        refused = [row for row in table.rows if row.get("refused")]
        shown = table.rows if len(refused) < _MANY else [row for row in table.rows if row not in refused]
        print_table(headers, [_cells(row, mode, table.other_default(row)) for row in shown])
        if len(refused) >= _MANY:
            names = ", ".join(row["variant"] for row in refused)
            click.echo(f"not here: {names} (why: --json, or --rows NAME)")
    if ablation.plot:
        _draw(table, mode, f"{mode}, {name}", ablation.plot)
    return 0 if "rate" in measured[0] else 1


def _interrupted(measured: int, out: Path | None) -> str:
    if not measured:
        return "interrupted before the first row"
    where = f"kept in {out}" if out else "shown above; --out keeps them"
    return f"interrupted after {measured} row{'s' * (measured > 1)}, {where}"


def _facts(config: EngineConfig, mode: str, name: str, tp_size: int, repeat: int) -> dict[str, Any]:
    """The facts that all rows of one table must have in common, in addition to the work."""
    from minisgl_core.bench.facts import plan_facts
    from minisgl_core.bench.provenance import provenance
    from minisgl_core.engine.plan_resolution import make_plan
    from minisgl_core.modelconfig import read_model_config

    model = read_model_config(config.model_path)
    return {
        "mode": mode,
        "geometry": name,
        "model": {  # folders of one name may hold different ones
            "architecture": model.architecture,
            "layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "experts": model.moe.num_experts if model.moe else 0,
            "vocab_size": model.vocab_size,
            "random_weights": config.dummy_weights,
        },
        "repeat": repeat,
        "tp_size": tp_size,
        "default": {
            "plan": plan_facts(make_plan(config, model)),
            "cache": config.cache,
            "max_prefill_tokens": config.max_prefill_tokens,
            "max_running_req": config.max_running_req,
            "cuda_graph_max_bs": config.graph_max_bs,
            "overlap": not ENV.DISABLE_OVERLAP_SCHEDULING.value,
        },
        **provenance(config.device),
    }


def _title(row: Mapping[str, Any], mode: str) -> str:
    return row["variant"] if row["mode"] == mode else f"{row['variant']} ({row['mode']})"


def _cells(row: Mapping[str, Any], mode: str, other_default: float | None) -> tuple[str, str, str, str]:
    from minisgl_core.bench.report import one_line

    if "rate" not in row:
        return _title(row, mode), "-", "-", one_line(row.get("note") or row["error"], _WIDEST)
    relative = "-" if row["relative"] is None else f"{row['relative']:.2f}"
    if other_default is not None:
        relative += f" (of {other_default:,.0f})"
    return (
        _title(row, mode),
        f"{row['rate']:,.0f}",
        relative,
        "-" if row["tpot_ms"] is None else f"{row['tpot_ms']:.3f}",
    )


def _line(row: Mapping[str, Any]) -> str:
    said = f"{row['rate']:,.0f} tokens per second" if "rate" in row else row.get("note") or row["error"]
    return f"{row['variant']}, {row['mode']}: {said}"


def _draw(table: AblationTable, mode: str, title: str, target: Path) -> None:
    from minisgl_core.bench.plot import bar_chart

    title += ": tokens per second, relative to the default"
    bars = []
    for row in table.rows:
        if row["relative"] is not None:
            star = "" if table.other_default(row) is None else " *"
            bars.append((_title(row, mode) + star, row["relative"]))
    if any(label.endswith("*") for label, _ in bars):
        title += " (* of another run)"
    write_whole(target, bar_chart(title, bars), "--plot", field="--plot")
