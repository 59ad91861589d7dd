"""Whose code failed in a step: a plugin's error is its author's to hear of, and the user's to avoid."""

from __future__ import annotations

import traceback

from minisgl_core.errors import EngineError, MinisglError
from minisgl_core.registry import Choice, Plan
from minisgl_core.registry.records import CORE

__all__ = ["blamed"]


def blamed(error: BaseException, plan: Plan) -> BaseException:
    """The error itself, or if a plugin's backend raised it, an :class:`EngineError` that names the backend."""
    if isinstance(error, MinisglError) or not isinstance(error, Exception):
        return error
    choice = _culprit(error, plan)
    if choice is None:
        return error
    return EngineError(
        f"{choice.role} backend {choice.label} {choice.version} failed in a step: {type(error).__name__}: {error}",
        field=f"backends.{choice.role}",
        value=choice.name,
        remedy=f"choose another with --backend {choice.role}=NAME, and tell its author",
    )


def _culprit(error: BaseException, plan: Plan) -> Choice | None:
    """The backend whose package the innermost frame outside the core and torch belongs to."""
    choices = [bucket.choice for bucket in plan.buckets if bucket.choice.distribution != CORE]
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    for module in reversed(modules):
        same_module = [choice for choice in choices if choice.factory.partition(":")[0] == module]
        same_package = [choice for choice in choices if _package(choice.factory) == _package(module)]
        for choice in (*same_module, *same_package):
            return choice
    return None


def _package(path: str) -> str:
    return path.partition(":")[0].partition(".")[0]
