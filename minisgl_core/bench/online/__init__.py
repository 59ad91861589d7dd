"""A load on an OpenAI-compatible server, and what its clients observe."""

from .load import Load, Point, Request
from .measure import measure_point

__all__ = ["Load", "Point", "Request", "measure_point"]
