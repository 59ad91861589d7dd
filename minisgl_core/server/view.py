"""The page at ``/``, and the data that it shows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

if TYPE_CHECKING:
    from fastapi import FastAPI

    from minisgl_core.llm import AsyncLLM

    from .metrics import Metrics
    from .state import ServerState

__all__ = ["PAGE_PATHS", "add_view"]

_FOLDER: Final = Path(__file__).with_name("page")
_TYPES: Final = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}
_FILES: Final = {
    "/" if file.suffix == ".html" else f"/page/{file.name}": file
    for file in sorted(_FOLDER.iterdir())
    if file.suffix in _TYPES
}
PAGE_PATHS: Final = (*_FILES, "/docs")
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def add_view(app: FastAPI, state: ServerState, metrics: Metrics) -> None:
    """Add the data, and the page unless it is switched off."""
    found: dict[str, Any] = {}

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        """What the engine does now: counts since the start, and histograms of latencies."""
        return metrics.to_json()

    @app.get("/plan")
    async def plan() -> dict[str, Any]:
        """Which backend serves each role, and why: every candidate with the reasons against it."""
        llm = state.need_model()
        if not found:
            found.update(await asyncio.to_thread(_plan_json, llm))
        return found

    if state.options.page:
        answers: dict[str, Response] = {"/docs": RedirectResponse("./#api", headers=_HEADERS)}
        for path, file in _FILES.items():
            answers[path] = Response(file.read_bytes(), media_type=_TYPES[file.suffix], headers=_HEADERS)
        app.router.routes += [Route(path, answer, methods=["GET"]) for path, answer in answers.items()]


def _plan_json(llm: AsyncLLM) -> dict[str, Any]:
    """The plan that serves, and what ``minisgl explain --json`` says about each of its entries."""
    # Imported here: a port that is taken must be reported at once.
    from minisgl_core.engine.plan_resolution import plan_query
    from minisgl_core.modelconfig import read_model_config
    from minisgl_core.plugin_api.devices import DeviceFacts
    from minisgl_core.registry import discover
    from minisgl_core.registry.explain import explain

    plan, config = llm.plan, llm.engine_config
    kind, _, capability = plan.device.partition(" sm")  # asking the device itself would take memory of it
    device = DeviceFacts(kind, sm=int(capability) if capability else None)
    query = plan_query(config, read_model_config(config.model_path), device)
    reasons = explain(query, discover(allow=query.allow, deny=query.deny))
    remarks = list(reasons.remarks)
    if reasons.plan is None or reasons.plan.summary() != plan.summary():
        remarks.append(
            "These reasons leave out what decided here: measurements of `minisgl calibrate`, or a given plan."
        )
    return {
        "plan": plan.to_json(),
        "digest": plan.digest(),
        "entries": [entry.to_json() for entry in reasons.entries],
        "remarks": remarks,
    }
