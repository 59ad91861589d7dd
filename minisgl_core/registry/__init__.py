"""Plugins: discovered, resolved, explained, built. Nothing here imports torch."""

from minisgl_core.plan import Bucket, Choice, Plan, PlanEntry
from minisgl_core.plugin_api.devices import DeviceFacts, wants_graph

from .build import build, fuses, load_class
from .discover import discover
from .query import PlanQuery
from .records import Candidate, PluginRecord, Registry
from .resolve import resolve_plan

__all__ = [
    "Bucket",
    "Candidate",
    "Choice",
    "DeviceFacts",
    "Plan",
    "PlanEntry",
    "PlanQuery",
    "PluginRecord",
    "Registry",
    "build",
    "discover",
    "fuses",
    "load_class",
    "resolve_plan",
    "wants_graph",
]
