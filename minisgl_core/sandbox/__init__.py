"""Code that this project did not write runs here: in a throw-away process, or with its output diverted."""

from .imports import import_object
from .output import diverted_output, notify_if_slow
from .process import Sandbox, SandboxError

__all__ = ["Sandbox", "SandboxError", "diverted_output", "import_object", "notify_if_slow"]
