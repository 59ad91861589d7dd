"""Plugins: found, checked, chosen, built. Nothing here imports torch."""

from .build import build, fuses, load_class
from .loader import discover
from .plan import Bucket, Choice, Plan
from .probe import detect_device
from .query import DeviceFacts, PlanEntry, PlanQuery, wants_graph
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
    "detect_device",
    "discover",
    "fuses",
    "load_class",
    "resolve_plan",
    "wants_graph",
]
