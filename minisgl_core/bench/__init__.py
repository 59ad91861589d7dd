"""Throughput and latency of an engine on fixed work, and what the hardware would allow."""

from .workloads import WORKLOADS, Workload, make_workload

__all__ = ["WORKLOADS", "Workload", "make_workload"]
