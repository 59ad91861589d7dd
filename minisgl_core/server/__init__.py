"""The OpenAI-compatible server: HTTP in front of an :class:`~minisgl_core.llm.AsyncLLM`.

Needs the packages of the extra ``serve`` (fastapi, uvicorn, prometheus-client).
"""

from __future__ import annotations

from .app import create_app
from .run import serve

__all__ = ["create_app", "serve"]
