"""Throughput and latency of an engine on fixed work, and what the hardware would allow."""

from .measure import Result, measure
from .workloads import WORKLOADS, Workload, make_workload

__all__ = ["WORKLOADS", "Result", "Workload", "make_workload", "measure"]
