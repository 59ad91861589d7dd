"""The routes."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from minisgl_core import __version__

from .errors import APIError, add_handlers
from .gate import Gate
from .generation import answer_chat, answer_completion, answer_response
from .metrics import Metrics
from .responses_body import ResponsesBody
from .schema import AbortBody, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from .state import ServerState
from .strict import StrictRoute
from .view import add_view

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import StatelessLifespan

    from minisgl_core.engine import EngineConfig
    from minisgl_core.tokenizer import Tokenizer

__all__ = ["create_app"]


def create_app(state: ServerState, lifespan: StatelessLifespan[FastAPI] | None = None) -> FastAPI:
    """The application for one model. ``state.llm`` may be set later: until then generation answers with status 503."""
    app = FastAPI(
        title="minisgl",
        version=__version__,
        description="An OpenAI-compatible server.",
        lifespan=lifespan,
        docs_url=None,  # they load scripts from elsewhere; the page has a list of routes
        redoc_url=None,
    )
    app.router.route_class = StrictRoute
    metrics = Metrics(state)
    add_handlers(app)
    if state.options.cors_origins:
        origins = list(state.options.cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Gate, state=state, metrics=metrics)
    _add_generation(app, state, metrics)
    _add_tokens(app, state)
    _add_operations(app, state, metrics)
    add_view(app, state, metrics)
    return app


def _add_generation(app: FastAPI, state: ServerState, metrics: Metrics) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [_model(state)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model, if it has this name."""
        state.check_name(name)
        return _model(state)

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue one or several prompts."""
        _note_user(request, body.user)
        return await answer_completion(request, body, state, metrics)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Answer a conversation."""
        _note_user(request, body.user)
        return await answer_chat(request, body, state, metrics)

    @app.post("/v1/responses", response_model=None)
    async def responses(request: Request, body: ResponsesBody) -> Response:
        """Answer a conversation in the form of OpenAI's responses; nothing is stored."""
        _note_user(request, body.user)
        return await answer_response(request, body, state, metrics)

    @app.post("/abort")
    async def abort(body: AbortBody) -> dict[str, Any]:
        """End a request; the client that waits for it gets what came so far, or an error."""
        task = state.running.get(body.request_id)
        return {"aborted": task is not None and task.cancel()}


def _note_user(request: Request, user: str | None) -> None:
    if user is not None:
        request.scope["state"].setdefault("log", {})["user"] = user


def _model(state: ServerState) -> dict[str, Any]:
    card: dict[str, Any] = {"id": state.options.model_name, "object": "model", "owned_by": "minisgl"}
    length = None if state.llm is None else state.llm.max_seq_len
    return {**card, "created": state.created, "max_model_len": length}


def _add_tokens(app: FastAPI, state: ServerState) -> None:
    def tokenizer() -> Tokenizer:
        found = state.need_model().tokenizer
        if found is None:
            raise APIError(400, "the model has no tokenizer files; give and read token ids")
        return found

    async def call(function: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(function)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Token ids of a text, or of a conversation under the model's chat template."""
        state.check_name(body.model)
        own = tokenizer()
        if body.messages is not None:
            messages, options = body.messages, body.chat_template_kwargs or {}
            ids = await call(lambda: own.apply_chat_template(messages, **options))
        else:
            text, special = body.prompt or "", body.add_special_tokens
            ids = await call(lambda: own.encode(text, add_special_tokens=special))
        return {"tokens": ids, "count": len(ids), "max_model_len": state.need_model().max_seq_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        """The text of token ids."""
        state.check_name(body.model)
        own, size = tokenizer(), state.need_model().vocab_size
        if (beyond := max(body.tokens, default=0)) >= size:
            raise APIError(400, f"token id {beyond!s:.20} is not one of {size}", param="tokens")
        return {"prompt": await call(lambda: own.decode(body.tokens))}


def _add_operations(app: FastAPI, state: ServerState, metrics: Metrics) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the engine answers. Status 503 if it does not."""
        await state.check_health()
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether requests are accepted. Status 503 while the model is loaded and while the server shuts down."""
        state.need_model()
        return {"status": "ready"}

    @app.get("/metrics", response_model=None)
    async def read_metrics() -> Response:
        """For Prometheus."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """What runs: the plan, the settings, the versions."""
        llm = state.need_model()
        versions = {name: importlib.metadata.version(name) for name in ("torch", "fastapi", "uvicorn")}
        return {
            "model": state.options.model_name,
            "vocab_size": llm.vocab_size,
            "plan": llm.plan.to_json(),
            "config": _as_json(llm.engine_config),
            "versions": {"minisgl-core": __version__, **versions},
        }


def _as_json(config: EngineConfig) -> dict[str, Any]:
    """The settings; what JSON has no form for is written as text."""
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "plan"}
    return json.loads(json.dumps(values, default=str))  # type: ignore[no-any-return]
