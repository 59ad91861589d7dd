"""Starts a model from settings, for ``generate`` and ``chat``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO, TypeVar

import click

from minisgl_core.errors import UsageError
from minisgl_core.plugin_api import Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from minisgl_core.capsule.shadow import ShadowReport
    from minisgl_core.core import SamplingParams
    from minisgl_core.llm.llm import BaseLLM
    from minisgl_core.registry import Plan
    from minisgl_core.settings.schema import Settings
    from minisgl_core.tokenizer import Tokenizer

    from .prompts import Prompt

F = TypeVar("F", bound="BaseLLM")

__all__ = [
    "backends_by_role",
    "find_model",
    "need_tokenizer",
    "plan_line",
    "refuse_choice",
    "refuse_early",
    "refuse_two_models",
    "report_shadow",
    "shows_progress",
    "start_llm",
]

_ROLES_SHOWN: Final[tuple[Role, ...]] = ("attention", "kv", "graph", "moe", "ops", "linear")
"""Roles that are shown; the others follow from device and model."""


def find_model(settings: Settings) -> Path:
    """The folder or file of the named model, or of the demo model; downloaded if necessary."""
    from minisgl_core.demo_model import DEMO_NAME, resolve_model_path

    return resolve_model_path(settings.model.path or DEMO_NAME)


def refuse_two_models(settings: Settings, geometry_name: str | None) -> None:
    """Refuse a geometry together with a model on the command line; it overrides a model from a file or a variable."""
    if geometry_name and settings.sources.get("model.path") == "--model":
        raise UsageError("--model and --geometry are both given", field="--geometry", remedy="give one of them")


def refuse_choice(settings: Settings) -> None:
    """Raise an error for invalid backends and options before a model is downloaded."""
    from minisgl_core.builtin.devices import detect_device
    from minisgl_core.registry import discover
    from minisgl_core.registry.resolve import check_choice

    if settings.backends or settings.options:
        registry = discover(allow=settings.allow, deny=settings.deny)
        check_choice(settings.backends, settings.options, registry, detect_device(settings.engine.device).kind)


def need_tokenizer(path: Path, *, chat: bool) -> Tokenizer:
    """The model's tokenizer; raises :class:`UsageError` if it has none, or for a chat no chat template.

    This is checked before the weights are read, which may take minutes. A path that is not a model is refused first,
    with :class:`CheckpointError`.
    """
    from minisgl_core.modelconfig import read_model_config
    from minisgl_core.tokenizer import load_tokenizer

    read_model_config(path)
    tokenizer = load_tokenizer(path)
    if tokenizer is None:
        raise UsageError(
            f"model {str(path)!r} has no tokenizer files, so it cannot read text",
            field="model",
            value=str(path),
            remedy="give token ids: minisgl generate --prompt-ids 1,2,3",
        )
    if tokenizer.refusal is not None:
        raise UsageError(
            f"model {str(path)!r} cannot read text: {tokenizer.refusal}",
            field="model",
            value=str(path),
            remedy="give token ids: minisgl generate --prompt-ids 1,2,3",
        )
    if chat and tokenizer.chat_template is None:
        raise UsageError(
            f"model {str(path)!r} has no chat template",
            field="model",
            value=str(path),
            remedy="use an instruct model, or minisgl generate with a plain prompt",
        )
    return tokenizer


def refuse_early(prompts: Sequence[Prompt], params: SamplingParams, settings: Settings, path: Path) -> None:
    """Raise :class:`AdmissionError` for a prompt that this model can never serve, before its weights are read."""
    from minisgl_core.llm import prepare_prompts
    from minisgl_core.modelconfig import read_model_config
    from minisgl_core.scheduler import Limits
    from minisgl_core.tokenizer import load_tokenizer

    model = read_model_config(path)
    context = settings.engine.max_seq_len_override or model.max_position_embeddings
    prepare_prompts(prompts, params, load_tokenizer(path), Limits(context, None, model.vocab_size))


def start_llm(kind: type[F], settings: Settings, path: Path, *, requests: int) -> F:
    """Start the model with these settings, for at most ``requests`` requests at a time.

    A KV pool for more would only cost time and memory. The plan is printed on standard error.
    """
    engine = settings.engine.model_dump()
    engine["max_running_req"] = min(engine["max_running_req"], requests)
    llm = kind(
        path,
        dtype=settings.model.dtype,
        backends=settings.backends,
        backend_options=settings.options,
        allow_plugins=settings.allow,
        deny_plugins=settings.deny,
        shadow=settings.shadow,
        **{**settings.debug.model_dump(), "record": settings.debug.record or None},
        progress=shows_progress(),
        **engine,
    )
    click.echo(plan_line(llm.plan), err=True)
    return llm


@contextlib.contextmanager
def report_shadow(llm: BaseLLM) -> Iterator[None]:
    """Report a shadow backend on standard error: now that it is compared, and at the end the result."""
    report = llm.shadow_report
    if report is None:
        yield
        return
    graphs = "; decode steps in graphs are not (--cuda-graph-max-bs 0)" if llm.plan.graph else ""
    click.echo(f"shadow {report.backend}: compared on every {report.every}. eager step{graphs}", err=True)
    try:
        yield
    finally:
        click.echo(f"shadow {report.backend}: {_shadow_result(llm.shadow_report or report)}", err=True)


def _shadow_result(report: ShadowReport) -> str:
    seen = f"{report.steps} steps, {report.layers} layers compared, worst error {report.worst_error:.2g}"
    if report.divergence is not None:
        return f"diverged at {report.divergence} ({seen})"
    if report.disabled:
        return f"disabled: {report.disabled} ({seen})"
    return seen if report.layers else "no step was compared"


def shows_progress() -> bool:
    """True if progress bars are shown: not in a log, which would keep every state of them."""
    stderr: TextIO | None = sys.stderr  # None if it was closed, despite its annotation
    return stderr is not None and stderr.isatty()


def backends_by_role(plan: Plan) -> dict[Role, list[str]]:
    """The backends of the roles that do not follow from device and model."""
    labels = {role: [choice.label for choice in plan.choices(role)] for role in _ROLES_SHOWN}
    return {role: names for role, names in labels.items() if names}


def plan_line(plan: Plan) -> str:
    """One line with device, dtype and the backends of each role; ``minisgl explain`` prints the details."""
    backends = [f"{role}={','.join(labels)}" for role, labels in backends_by_role(plan).items()]
    ranks = f" x {plan.tp_size}" if plan.tp_size > 1 else ""
    graphs = "graphs" if plan.graph else "no graphs"
    facts = f"{plan.architecture} on {plan.device}{ranks}, {plan.dtype}, page_size={plan.page_size}, {graphs}"
    writer = plan.pool_writer
    return f"plan {plan.digest()}: {facts}, {', '.join(backends)}; {writer.role}:{writer.label} writes the KV pool"
