"""``minisgl serve``: the OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import TYPE_CHECKING, Final

import click

from minisgl_core.errors import UsageError
from minisgl_core.settings.schema import Settings

from .options import settings_options
from .start import find_model, refuse_choice, start_llm

if TYPE_CHECKING:
    from minisgl_core.llm.llm import ProcessLLM

__all__ = ["command"]

_NEEDED: Final = ("fastapi", "uvicorn", "prometheus_client")


@click.command(name="serve")
@settings_options("model", "engine", "server")
def command(settings: Settings) -> int:
    """Serve a model through OpenAI's API.

    Listens at once and answers with status 503 until the model is loaded; /ready says when. Ctrl-C or SIGTERM ends it
    once the requests that run are answered. A browser shows a chat, the engine and all routes at /. Without a model the
    demo model is served.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the server needs {', '.join(missing)}, which is not installed",
            remedy=f"pip install {' '.join(name.replace('_', '-') for name in missing)}",
        )
    from minisgl_core.server.run import bind, serve
    from minisgl_core.server.state import ServerOptions

    own, engine = settings.server, settings.engine
    refuse_choice(settings)
    if engine.launcher == "torchrun":
        from minisgl_core.llm.torchrun import follow

        follow(engine.tp_size, engine.distributed_timeout_s)  # before the other ranks listen at the same port
    listener = bind(own.host, own.port)
    with listener:
        path = find_model(settings)
        name = own.served_model_name or path.name.removesuffix(".gguf")
        origins = tuple(origin.strip() for origin in own.cors_origins.split(",") if origin.strip())
        options = ServerOptions(
            name,
            own.api_key,
            own.max_waiting,
            origins,
            request_timeout_s=own.request_timeout_s,
            hung_step_s=own.hung_step_s,
            page=own.page,
        )
        _log_access()
        host, port = listener.getsockname()[:2]
        click.echo(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}, loading {name}", err=True)

        def load() -> ProcessLLM:
            from minisgl_core.llm.llm import ProcessLLM

            llm = start_llm(ProcessLLM, settings, path, requests=settings.engine.max_running_req)
            click.echo(f"ready: http://{f'[{host}]' if ':' in host else host}:{port}/v1", err=True)
            return llm

        serve(listener, options, load)
    return 0


def _log_access() -> None:
    """One JSON object a line on standard error."""
    log = logging.getLogger("minisgl.access")
    log.setLevel(logging.INFO)
    log.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers = [handler]
