"""``minisgl bench online``: a load on a server, and what its clients observe."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from minisgl_core.errors import EngineError, UsageError
from minisgl_core.files import require_writable_file, write_whole
from minisgl_core.modelconfig.geometries import GEOMETRIES, geometry
from minisgl_core.progress import progress_bar
from minisgl_core.settings.load import flag_name
from minisgl_core.settings.schema import SECTIONS, Settings

from .options import settings_options
from .output import print_json, print_table
from .start import refuse_choice, refuse_two_models, shows_progress

if TYPE_CHECKING:
    from minisgl_core.bench.online.load import Load, Point
    from minisgl_core.bench.online.measure import Target

__all__ = ["command"]

_STDOUT: Final = "-"
_RANGE: Final = "100..1024"


@click.command(name="bench online")
@settings_options("model", "engine")
@click.option("--url", metavar="URL", help="A server that runs, of any engine; without it, one is started and stopped.")
@click.option("--geometry", "geometry_name", metavar="NAME", help=f"A shape without weights: {', '.join(GEOMETRIES)}.")
@click.option("--rate", "rates", metavar="N,N,..", help="Requests per second; inf = all at once. [inf]")
@click.option("--concurrency", "limits", metavar="N,N,..", help="Most requests in flight.")
@click.option("--arrivals", type=click.Choice(["poisson", "fixed"]), default="poisson", help="Gaps. [poisson]")
@click.option("--burstiness", type=float, default=1.0, help="Below 1: requests in bursts; above: more regular. [1]")
@click.option("--requests", type=click.IntRange(1), default=200, help="Requests of each load. [200]")
@click.option("--duration", type=float, help="At a finite rate: seconds of requests instead of --requests.")
@click.option("--trace", type=click.Path(path_type=Path), help="JSON Lines: timestamp, input_length, output_length.")
@click.option("--input-len", default=_RANGE, metavar="N|N..M", help=f"Tokens of a random prompt. [{_RANGE}]")
@click.option("--output-len", default=_RANGE, metavar="N|N..M", help=f"Tokens of an answer. [{_RANGE}]")
@click.option("--shared-prefix", type=click.IntRange(0), default=0, help="Tokens before every prompt. [0]")
@click.option("--prompts", type=click.Choice(["ids", "text"]), default="ids", help="How prompts are sent. [ids]")
@click.option("--chat", is_flag=True, help="Send them as chat messages; implies --prompts text.")
@click.option("--temperature", type=click.FloatRange(0), default=0.6, help="Sampling temperature. [0.6]")
@click.option("--bench-seed", type=int, default=0, help="Seed that the work is drawn with. [0]")
@click.option("--warm-up", type=click.IntRange(0), default=8, help="Requests before the measurement. [8]")
@click.option("--goodput", default="", metavar="ttft:MS,..", help="Limits of ttft, tpot and e2e that requests meet.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600.0, help="Seconds of a request. [600]")
@click.option("--json", "json_file", is_flag=False, flag_value=_STDOUT, metavar="[FILE]", help="Print or write JSON.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the loads to this .svg file.")
def command(settings: Settings, url: str | None, geometry_name: str | None, **given: Any) -> int:
    """Measure a server under a load of streamed requests.

    Reports time to first token, time per output token, inter-token and end-to-end latency, throughput, and errors by
    kind. --rate and --concurrency may be lists: each combination is measured. The key of a server is read from
    OPENAI_API_KEY.
    """
    from minisgl_core.bench.online.figures import parse_objectives

    plan = _Plan(given)
    objectives = parse_objectives(given["goodput"])
    if url is not None:
        _refuse_engine(settings, geometry_name)
        return _Run(plan, given, objectives).measure(url, None)
    refuse_two_models(settings, geometry_name)
    refuse_choice(settings)
    with _server(settings, geometry_name, plan) as (started, seconds):
        return _Run(plan, given, objectives).measure(started, seconds)


class _Plan:
    """The loads, checked before a server is started."""

    def __init__(self, given: dict[str, Any]) -> None:
        from minisgl_core.bench.online.load import Lengths, Point, parse_numbers, read_trace

        self.trace = read_trace(given["trace"]) if given["trace"] is not None else ()
        if self.trace and given["rates"]:
            raise UsageError("--trace and --rate are both given", field="--rate", remedy="leave out --rate")
        for name in ("burstiness", "duration"):
            if given[name] is not None and not 0 < given[name] < float("inf"):
                raise UsageError(f"--{name} is {given[name]}", field=f"--{name}", remedy="give a number above 0")
        rates = parse_numbers(given["rates"] or "inf", "--rate", whole=False)
        limits = parse_numbers(given["limits"], "--concurrency", whole=True) if given["limits"] else [None]
        self.points = [Point(rate, None if limit is None else int(limit)) for rate in rates for limit in limits]
        self.labels = ["trace" if self.trace else point.label for point in self.points]
        self.inputs = Lengths.parse(given["input_len"], "--input-len")
        self.outputs = Lengths.parse(given["output_len"], "--output-len")
        self.most = max([given["requests"], len(self.trace), *self._by_duration(given["duration"])])
        _check_files(given)

    def _by_duration(self, seconds: float | None) -> list[int]:
        finite = [point.rate for point in self.points if point.rate < float("inf")]
        return [round(seconds * rate) for rate in finite] if seconds is not None else []

    def load(self, given: dict[str, Any], vocab_size: int) -> Load:
        """For a server whose vocabulary is known."""
        from minisgl_core.bench.online.load import Load

        return Load(
            given["requests"], self.inputs, self.outputs, vocab_size, given["duration"], given["arrivals"],
            given["burstiness"], given["shared_prefix"], given["bench_seed"], self.trace,
        )  # fmt: skip


def _check_files(given: dict[str, Any]) -> None:
    plot = given["plot"]
    if plot is not None and plot.suffix != ".svg":
        raise UsageError(f"--plot is {str(plot)!r}", field="--plot", value=str(plot), remedy="name a .svg file")
    kept = given["json_file"]
    for name, target in (("--plot", plot), ("--json", None if kept in (None, _STDOUT) else Path(kept))):
        if target is not None:
            require_writable_file(target, name, field=name)


def _refuse_engine(settings: Settings, geometry_name: str | None) -> None:
    """The settings of a server that runs are its own."""
    flags = [source for source in settings.sources.values() if source.startswith("--")]
    flags += ["--geometry"] * bool(geometry_name) + ["--backend"] * bool(_context_parameter("backend"))
    if flags:
        remedy = "give it to `minisgl serve`, or leave out --url"
        raise UsageError(f"{flags[0]} has no effect on the server of --url", field=flags[0], remedy=remedy)


def _context_parameter(name: str) -> Any:
    return click.get_current_context().params.get(name)


@contextlib.contextmanager
def _server(settings: Settings, geometry_name: str | None, plan: _Plan) -> Iterator[tuple[str, float]]:
    """A server with the settings of this call, in a process of its own."""
    from minisgl_core.bench.online.server import started_server

    arguments = [*_flags(settings), "--max-waiting", str(max(settings.server.max_waiting, plan.most))]
    with contextlib.ExitStack() as stack:
        if geometry_name:
            from minisgl_core.bench.session import model_folder

            folder = stack.enter_context(model_folder(geometry(geometry_name)))
            arguments += ["--model", folder, "--dummy-weights", "--served-model-name", geometry_name]
        yield stack.enter_context(started_server(arguments))


def _flags(settings: Settings) -> list[str]:
    """The flags of this call as arguments; the other settings, the child reads where this process has."""
    flags: list[str] = []
    if config := _context_parameter("config"):
        flags += ["--config", config]
    for choice in _context_parameter("backend"):
        flags += ["--backend", choice]
    for name, source in settings.sources.items():
        if source.startswith("--"):
            section, _, key = name.partition(".")
            value = getattr(getattr(settings, section), key)
            if SECTIONS[section].model_fields[key].annotation is bool:
                flags.append(source if value else f"--no-{source[2:]}")
            else:
                flags += [flag_name(section, key), str(value)]
    return flags


class _Run:
    """The measurement of one server."""

    def __init__(self, plan: _Plan, given: dict[str, Any], objectives: dict[str, float]) -> None:
        self._plan, self._given, self._objectives = plan, given, objectives

    def measure(self, url: str, start_s: float | None) -> int:
        """Warm up, measure each load, report. Exits with 1 if no request was answered."""
        from minisgl_core.bench.online.http import parse_url
        from minisgl_core.bench.online.server import read_facts

        endpoint = parse_url(url, os.environ.get("OPENAI_API_KEY", ""))
        facts = read_facts(endpoint)
        load, target = self._plan.load(self._given, facts["vocab_size"]), self._target(endpoint, facts["model"])
        _allow_files()
        self._warm_up(load, target)
        points: list[dict[str, Any]] = []
        interrupted = False
        try:
            for number, point in enumerate(self._plan.points):
                points.append(self._point(load, target, point, number))
        except KeyboardInterrupt:
            interrupted = True
            click.echo(f"\ninterrupted after {len(points)} of {len(self._plan.points)} loads", err=True)
        if points:
            self._report(points, {**facts, "start_s": start_s}, load, target)
        return 130 if interrupted else 0 if any(point["completed"] for point in points) else 1

    def _target(self, endpoint: Any, model: str) -> Target:
        from minisgl_core.bench.online.measure import Target

        given = self._given
        return Target(endpoint, model, given["chat"], given["temperature"], given["timeout"])

    def _requests(self, load: Load, target: Target, point: Point, number: int) -> list[Any]:
        from minisgl_core.bench.online.server import detokenize

        requests = load.draw(point, number)
        if not self._given["chat"] and self._given["prompts"] == "ids":
            return requests
        return [
            one
            if isinstance(one.prompt, str)
            else one._replace(prompt=detokenize(target.endpoint, target.model, one.prompt))
            for one in requests
        ]

    def _warm_up(self, load: Load, target: Target) -> None:
        from dataclasses import replace

        from minisgl_core.bench.online.load import Point
        from minisgl_core.bench.online.measure import send_all

        if not self._given["warm_up"]:
            return
        short = replace(load, requests=self._given["warm_up"], trace=(), duration_s=None)
        answers, _ = send_all(target, self._requests(short, target, Point(float("inf")), -1), None)
        failed = [answer for answer in answers if answer.error is not None]
        if len(failed) == len(answers):
            why = f"{failed[0].error}: {failed[0].detail}"
            raise EngineError(f"no request of the warm-up was answered ({why})", field="--warm-up")

    def _point(self, load: Load, target: Target, point: Point, number: int) -> dict[str, Any]:
        from minisgl_core.bench.online import measure_point

        requests = self._requests(load, target, point, number)
        title = f"{self._plan.labels[number]}, requests"
        with progress_bar(title, len(requests), shown=shows_progress()) as bar:
            return measure_point(target, requests, point, self._objectives, bar.update)

    def _report(self, points: list[dict[str, Any]], facts: dict[str, Any], load: Load, target: Target) -> None:
        from minisgl_core.bench.online.report import client_warning, error_lines, plot

        labels = self._plan.labels[: len(points)]
        for line in filter(None, (*error_lines(points, labels), client_warning(points, labels))):
            click.echo(line, err=True)
        if self._given["json_file"] != _STDOUT:
            _print(facts["model"], points, labels)
        if self._given["json_file"] is not None:
            _keep(self._given["json_file"], self._content(points, facts, load, target))
        if self._given["plot"] is not None:
            chart = plot(f"{facts['model']}: load of each measurement", points, labels)
            write_whole(self._given["plot"], chart, "--plot", field="--plot")

    def _content(
        self, points: Sequence[dict[str, Any]], facts: dict[str, Any], load: Load, target: Target
    ) -> dict[str, Any]:
        from minisgl_core.bench.provenance import commit, invocation, versions

        given = self._given
        return {
            "mode": "online",
            **facts,
            "client": {"commit": commit(), "versions": versions(), "command": invocation(), "cpus": os.cpu_count()},
            "load": {
                **load.facts,
                "temperature": given["temperature"],
                "prompts": "chat" if given["chat"] else given["prompts"],
                "warm_up": given["warm_up"],
                "timeout_s": target.timeout_s,
            },
            "points": list(points),
        }


def _allow_files() -> None:
    """As many open connections as the system allows this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _print(model: str, points: Sequence[dict[str, Any]], labels: Sequence[str]) -> None:
    from minisgl_core.bench.online.report import SWEEP_HEADERS, point_rows, sweep_rows

    if len(points) > 1:
        click.echo(f"{model}, latencies in milliseconds\n")
        print_table(SWEEP_HEADERS, sweep_rows(points, labels))
        return
    rates, latencies = point_rows(points[0])
    print_table((f"{model}, {labels[0]}", ""), rates)
    click.echo()
    print_table(("milliseconds", "mean", "p50", "p90", "p99"), latencies)


def _keep(target: str, content: dict[str, Any]) -> None:
    if target == _STDOUT:
        print_json(content)
    else:
        write_whole(Path(target), json.dumps(content, indent=1) + "\n", "--json", field="--json")
