"""``minisgl explain``: the plan for a model, a config and a device, and every backend that was not chosen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import click

from minisgl_core.builtin.devices import detect_device
from minisgl_core.calibration.choose import apply
from minisgl_core.calibration.store import Loaded, is_timed
from minisgl_core.errors import UsageError
from minisgl_core.installation import exclusion_lines
from minisgl_core.modelconfig import ModelConfig, dequantised, read_model_config
from minisgl_core.modelconfig.geometries import GEOMETRIES, geometry
from minisgl_core.plugin_api.devices import DEVICE_CHOICES, DEVICE_KINDS
from minisgl_core.registry import DeviceFacts, Plan, PlanQuery, discover, wants_graph
from minisgl_core.registry.explain import CandidateReport, Explanation, explain
from minisgl_core.settings.schema import Settings
from minisgl_core.tokenizer import read_chat_template

from .measured import calibration_json, print_calibration
from .options import settings_options
from .output import json_option, print_json, print_table
from .start import find_model, refuse_two_models

__all__ = ["command", "model_of", "plan_query"]

_DEMO: Final = "smollm2-135m"
"""The geometry of the demo model."""
_OTHER_PURPOSE = ("op", "architecture")
"""Codes of reasons that say: this backend is for something else."""


@click.command(name="explain")
@settings_options("model", "engine", without=("engine.device",))
@click.option("--geometry", "geometry_name", metavar="NAME", help=f"A shape without weights: {', '.join(GEOMETRIES)}.")
@click.option("--device", metavar="DEVICE", help="cpu, cuda, or hardware that is not here, such as sm90. [auto]")
@json_option
def command(settings: Settings, geometry_name: str | None, device: str | None, as_json: bool) -> int:
    """Show which backends would run, and why not the others.

    Without a model it is about the demo model's shape; nothing is downloaded for that. Exits with 1 if nothing would
    run.
    """
    facts, elsewhere = _device(device or settings.engine.device)
    name, model = _named_model(settings, geometry_name, facts)
    registry = discover(allow=settings.allow, deny=settings.deny)
    query, measured = plan_query(settings, model, facts), Loaded(None)
    left_out = _why_left_out(settings.engine.calibrated, elsewhere)
    if left_out is None:
        query, measured = apply(query, model, registry)
    answer = explain(query, registry, elsewhere=elsewhere)
    untimed = {item.label for item in registry.candidates("linear") if not is_timed(item.spec)}
    usable = ((entry.entry, item.backend) for entry in answer.entries for item in entry.usable())
    candidates = [(entry.label, name) for entry, name in usable if not (entry.role == "linear" and name in untimed)]
    note = dequantised(model, query.dtype)
    if as_json:
        about = {"model": name, "architecture": model.architecture, "device": str(facts), "elsewhere": elsewhere}
        print_json(
            {
                **about,
                "weights": note,
                **answer.to_json(),
                "calibration": calibration_json(measured, answer.plan, candidates, left_out),
            }
        )
    else:
        _print(answer, f"{model.architecture} on {facts}" + (" (not this machine)" if elsewhere else ""))
        if note:
            click.echo(f"\nnote: {note}")
        print_calibration(measured, answer.plan, candidates, left_out)
    return 0 if answer.plan else 1


def _why_left_out(calibrated: bool, elsewhere: bool) -> str | None:
    """Why the answer ignores all measurements; None = it follows them."""
    if elsewhere:
        return "the device is not here"
    return None if calibrated else "calibrated is off (--no-calibrated, MINISGL_CALIBRATED or the config file)"


def _named_model(settings: Settings, geometry_name: str | None, device: DeviceFacts) -> tuple[str, ModelConfig]:
    """(what the answer is about, its config): the demo model's shape, with a message, if nothing is named."""
    if geometry_name or settings.model.path:
        return geometry_name or settings.model.path, model_of(settings, geometry_name)
    demo = replace(geometry(_DEMO), dtype="float32", quantised=True)  # as its file is
    message = f"no model is named: this is about the demo model's shape ({_DEMO}, {demo.dtype_on(device.kind)})"
    click.echo(f"{message}; --model DIR or --geometry NAME asks about another", err=True)
    return _DEMO, demo


def plan_query(settings: Settings, model: ModelConfig, device: DeviceFacts) -> PlanQuery:
    """The question that these settings ask of the plugins."""
    engine = settings.engine
    return PlanQuery(
        model=model,
        device=device,
        dtype=model.dtype_on(device.kind) if settings.model.dtype == "auto" else settings.model.dtype,
        page_size=engine.page_size,
        tp_size=engine.tp_size,
        max_seq_len=engine.max_seq_len_override or 0,
        graph=wants_graph(0 if settings.debug.record else engine.cuda_graph_max_bs, device),
        max_running_req=engine.max_running_req,
        backends=settings.backends,
        options=settings.options,
        allow=settings.allow,
        deny=settings.deny,
        chat_template=read_chat_template(find_model(settings)) if settings.model.path else "",
    )


def model_of(settings: Settings, geometry_name: str | None) -> ModelConfig:
    """The config of ``--model`` or ``--geometry``."""
    refuse_two_models(settings, geometry_name)
    if geometry_name:
        return geometry(geometry_name)
    if not settings.model.path:
        raise UsageError(
            "no model is named", field="--model", remedy=f"give --model DIR, or --geometry {next(iter(GEOMETRIES))}"
        )
    return read_model_config(find_model(settings))


def _device(text: str) -> tuple[DeviceFacts, bool]:
    """(facts, is it a device that is not here?)"""
    match = re.fullmatch(r"sm(\d{2,3})", text)
    if match:
        kind = next(name for name, facts in DEVICE_KINDS.items() if facts.has_capability)
        return DeviceFacts(kind, sm=int(match[1])), True
    if text not in DEVICE_CHOICES:
        raise UsageError(
            f"--device is {text!r}",
            field="--device",
            value=text,
            remedy=f"use {', '.join(DEVICE_KINDS)}, or such as sm90 (H100, H200)",
        )
    return detect_device(text), False


def _print(answer: Explanation, name: str) -> None:
    if answer.plan is None:
        click.echo(f"{name}: no plan. {answer.error}")
    else:
        _print_plan(answer.plan, name)
    for line in answer.remarks:
        click.echo(f"note: {line}")
    click.echo(f"\nCandidates, judged at page_size={answer.page_size}")
    for entry in answer.entries:
        click.echo(f"\n{entry.entry.label}")
        _print_candidates(entry.candidates)
    for plugin in answer.failures:
        click.echo(f"\nplugin {plugin.distribution} failed to load: {plugin.failure}")
    for line in exclusion_lines(answer.excluded):
        click.echo(f"\n{line}: their backends are no candidates")
    for note in answer.notes:
        click.echo(f"\nnote: {note.distribution}: {note.text}")


def _print_plan(plan: Plan, name: str) -> None:
    graphs = "decode steps in graphs" if plan.graph else "no graphs"
    click.echo(f"{name}: {plan.dtype}, page_size={plan.page_size}, {plan.kv_layout}, {graphs}, plan {plan.digest()}\n")
    rows = [(bucket.label, bucket.choice.label, bucket.choice.version) for bucket in plan.buckets]
    print_table(("ENTRY", "BACKEND", "VERSION"), rows)
    click.echo(f"{plan.pool_writer.role}:{plan.pool_writer.label} writes the KV pool")
    for choice in plan.choices("linear"):
        if fused := plan.fused(choice):
            click.echo(
                f"{choice.label} may take {' and '.join(sorted(fused))} into its products, where its options allow it "
                "and it finds that faster"
            )
        for op, why_not in plan.fusions(choice).items():
            if why_not:
                click.echo(f"{choice.label} could take {op} into its products, but {why_not}")
    for line in plan.fallbacks:
        click.echo(f"fallback: {line}")


def _print_candidates(candidates: Sequence[CandidateReport]) -> None:
    """Those of another purpose (they lack the operation or the architecture) share a line."""
    others = [item for item in candidates if any(reason.code in _OTHER_PURPOSE for reason in item.reasons)]
    for candidate in candidates:
        if candidate not in others or len(others) == len(candidates):
            _print_candidate(candidate)
    if others and len(others) < len(candidates):
        field = next(reason.field for reason in others[0].reasons if reason.code in _OTHER_PURPOSE)
        click.echo(f"  rejected   for other {field}: {', '.join(item.backend for item in others)}")


def _print_candidate(candidate: CandidateReport) -> None:
    click.echo(f"  {candidate.status.ljust(9)}  {candidate.backend} {candidate.version}")
    if candidate.preferred:
        click.echo(f"             - {candidate.preferred}")
    for reason in candidate.reasons:
        click.echo(f"             - {reason}")
    for change in candidate.would_allow:
        click.echo(f"             > to allow it: {change}")
    if candidate.to_install:
        click.echo(f"             > not installed here: {'; '.join(candidate.to_install)}")
