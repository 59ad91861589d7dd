"""The settings by section, each with its meaning. It imports pydantic: load it only where settings are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from minisgl_core.plugin_api.devices import DEVICE_CHOICES

__all__ = ["SECTIONS", "DebugSettings", "EngineSettings", "ModelSettings", "ServerSettings", "Settings"]

Positive = Annotated[int, Field(ge=1)]
if TYPE_CHECKING:
    Device = str
else:
    Device = Literal[DEVICE_CHOICES]
Text = Annotated[str, Field(min_length=1)]
"""An empty one is a mistake, such as a shell variable that is not set; to have none, leave the setting out."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError("input should not be true or false")
        return value


class ModelSettings(_Section):
    """``[model]``"""

    path: Text = Field(default="", description="folder or .gguf file of the model, or a name on the model hub")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="compute dtype; auto = the checkpoint's"
    )


class EngineSettings(_Section):
    """``[engine]``"""

    device: Device = Field(default="auto", description="where to run")
    tp_size: Positive = Field(default=1, description="tensor-parallel ranks")
    page_size: Positive | Literal["auto"] = Field(
        default="auto", description="tokens per KV page; auto = what the backends like"
    )
    cache: Literal["radix", "naive"] = Field(default="radix", description="prefix cache")
    queue: Literal["fifo", "priority"] = Field(default="fifo", description="order in which requests are admitted")
    max_running_req: Positive = Field(default=256, description="most requests in one batch")
    max_seq_len_override: Annotated[int, Field(ge=2)] | None = Field(
        default=None, description="longest prompt plus output; unset = the model's limit"
    )
    max_prefill_tokens: Positive = Field(default=8192, description="most new tokens of one prefill pass")
    num_page_override: Positive | None = Field(
        default=None, description="pages of the KV pool; unset = what memory allows"
    )
    memory_ratio: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.9, description="share of free memory for KV pool, graphs and passes"
    )
    cuda_graph_max_bs: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="largest batch to record graphs for; 0 = none; unset = the device's default"
    )
    calibrated: bool = Field(default=True, description="let auto follow the measurements of minisgl calibrate")
    seed: int = Field(default=0, description="seed of requests that have none")
    launcher: Literal["processes", "torchrun"] = Field(
        default="processes", description="who starts the ranks above 0: the engine, or torchrun (several machines)"
    )
    distributed_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None, description="port at which tensor-parallel ranks meet; unset = a free one"
    )
    distributed_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=120.0, description="seconds that ranks wait for each other"
    )
    grammar_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=5.0, description="seconds that one grammar may take to compile"
    )
    grammar_memory_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=2.0, description="GiB of memory that one grammar may take to compile"
    )
    dummy_weights: bool = Field(default=False, description="random weights, to measure speed without a checkpoint's")


class DebugSettings(_Section):
    """``[debug]``"""

    record: Text = Field(default="", description="folder for capsules of chosen steps; forces eager steps")
    record_role: Literal["attention", "moe"] = Field(default="attention", description="whose steps to record")
    record_steps: Text = Field(default="first:8", description="first:N, every:N, or numbers such as 0,5,7")
    record_max_mb: Positive = Field(default=256, description="steps with a larger capsule are skipped")


class ServerSettings(_Section):
    """``[server]``"""

    host: Text = Field(default="127.0.0.1", description="address to listen on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=8000, description="port to listen on; 0 = a free one")
    served_model_name: Text = Field(default="", description="what clients call the model; unset = its folder's name")
    api_key: Text = Field(default="", description="key that clients must send; unset = none")
    max_waiting: Annotated[int, Field(ge=0)] = Field(
        default=1024, description="requests that may wait; more get status 429"
    )
    cors_origins: Text = Field(
        default="", description="origins of web pages that may call the server, separated by commas; * = all"
    )
    request_timeout_s: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="longest time of a request in seconds, its wait included; 0 = no limit"
    )
    hung_step_s: Annotated[float, Field(gt=0)] = Field(
        default=60.0, description="seconds after which a step that has not ended makes /health answer 503"
    )
    page: bool = Field(default=True, description="serve a page to chat and to watch the engine at /")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything. ``backends`` and ``options`` are checked against the installed plugins when they are resolved."""

    model: ModelSettings
    engine: EngineSettings
    server: ServerSettings
    debug: DebugSettings
    allow: tuple[str, ...] | None
    """``plugins.allow``: distributions to load; None = all"""
    deny: tuple[str, ...]
    """``plugins.deny``"""
    backends: Mapping[str, Any]
    """``backends``: a name, a list of names or a table, by role"""
    options: Mapping[str, Mapping[str, Any]]
    """``backends.options``, by ``"ROLE:NAME"``"""
    shadow: Mapping[str, Any]
    """``backends.shadow``: a second backend to compare; checked by the engine"""
    sources: Mapping[str, str]
    """Where each value that is not a default was written, by ``section.key``; options by their table's name."""


SECTIONS: Final[dict[str, type[BaseModel]]] = {
    "model": ModelSettings,
    "engine": EngineSettings,
    "server": ServerSettings,
    "debug": DebugSettings,
}
"""The sections of plain keys; ``[backends]`` and ``[plugins]`` have shapes of their own."""
