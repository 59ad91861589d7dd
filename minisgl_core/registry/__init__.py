"""Plugins: found, checked, chosen, built. Nothing here imports torch."""

from .build import build, load_class
from .loader import discover
from .plan import Bucket, Choice, Plan
from .query import DeviceFacts, PlanQuery, Slot
from .records import Candidate, PluginRecord, Registry
from .resolve import resolve_plan

__all__ = [
    "Bucket",
    "Candidate",
    "Choice",
    "DeviceFacts",
    "Plan",
    "PlanQuery",
    "PluginRecord",
    "Registry",
    "Slot",
    "build",
    "discover",
    "load_class",
    "resolve_plan",
]
