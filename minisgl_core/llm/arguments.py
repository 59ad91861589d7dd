"""Arguments of constructors and calls, and the names that other libraries have for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from minisgl_core.capsule.instrumentation import Instrumentation
from minisgl_core.core import SamplingParams
from minisgl_core.core.sampling_params import HINTS
from minisgl_core.engine import EngineConfig
from minisgl_core.engine.plan_resolution import DTYPES
from minisgl_core.errors import ConfigError, UsageError, nearest

if TYPE_CHECKING:
    import torch

__all__ = ["SETTINGS", "argument_hint", "engine_config", "refuse_unknown_arguments"]

_INSTRUMENTATION: Final = frozenset(field.name for field in fields(Instrumentation))
SETTINGS: Final = _INSTRUMENTATION | (
    {field.name for field in fields(EngineConfig)} - {"model_path", "tp_info", "dtype"}
)
"""The names that an LLM's ``settings`` may have. It sets the other fields of EngineConfig itself."""

_OTHER_NAMES: Final[Mapping[str, str]] = {
    "model": "path",
    "model_path": "path",
    "pretrained_model_name_or_path": "path",
    "torch_dtype": "dtype",
    "tensor_parallel_size": "tp_size",
    "tp": "tp_size",
    "max_model_len": "max_seq_len_override",
    "max_seq_len": "max_seq_len_override",
    "context_length": "max_seq_len_override",
    "gpu_memory_utilization": "memory_ratio",
    "mem_fraction_static": "memory_ratio",
    "max_num_seqs": "max_running_req",
    "max_running_requests": "max_running_req",
    "max_num_batched_tokens": "max_prefill_tokens",
    "chunked_prefill_size": "max_prefill_tokens",
    "block_size": "page_size",
    "num_gpu_blocks_override": "num_page_override",
    "device_map": "device",
    "random_seed": "seed",
    "load_format": "dummy_weights",
    "scheduling_policy": "queue",
    "schedule_policy": "queue",
}
"""Names that vLLM, SGLang and transformers have for settings that exist here."""
_OTHER_WAYS: Final[Mapping[str, str]] = {
    "enforce_eager": "set `cuda_graph_max_bs=0` to record no graphs",
    "disable_cuda_graph": "set `cuda_graph_max_bs=0` to record no graphs",
    "cuda_graph_sizes": "set `cuda_graph_max_bs` to the largest batch",
    "enable_prefix_caching": 'prefixes are cached unless you set `cache="naive"`',
    "disable_radix_cache": 'set `cache="naive"` to cache no prefixes',
    "enable_chunked_prefill": "long prompts are always cut, into chunks of `max_prefill_tokens`",
    "attention_backend": 'set `backends={"attention": "NAME"}`',
    "attn_implementation": 'set `backends={"attention": "NAME"}`',
    "sampling_backend": 'set `backends={"ops.sample": "NAME"}`',
    "tokenizer": "the tokenizer is read from the model's folder",
    "tokenizer_mode": "the tokenizer is read from the model's folder",
    "tokenizer_path": "the tokenizer is read from the model's folder",
    "trust_remote_code": "leave it out: no code of a checkpoint is ever run",
    "quantization": "leave it out: the format is read from the checkpoint",
    "revision": "download that revision, and give its folder as `path`",
    "pipeline_parallel_size": "there is no pipeline parallelism; use `tp_size`",
    "data_parallel_size": "start one LLM per replica",
    "disable_log_stats": "leave it out: nothing is logged per step",
}
_CALLS_OTHERS: Final[Mapping[str, str]] = {
    "sampling_params": "this is called `params` here",
    "generation_config": "this is called `params` here: give a SamplingParams",
    "prompt_token_ids": "give token ids as `prompts`",
    "input_ids": "give token ids as `prompts`",
    "inputs": "this is called `prompts` here",
    "prompt": "this is called `prompts` here",
    "conversation": "this is called `messages` here",
    "use_tqdm": "this is called `progress` here",
    "chat_template_kwargs": "give the template's variables as arguments of their own",
}
_SAMPLING: Final = {*(field.name for field in fields(SamplingParams)), *HINTS}


def engine_config(
    path: str | Path,
    dtype: torch.dtype | str | None,
    tp_size: int,
    backends: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
) -> EngineConfig:
    """The config that the arguments of an LLM describe. Raises :class:`ConfigError` for an unknown name or value."""
    _refuse_unknown_settings(settings)
    if not isinstance(cast("object", path), str | Path) or not str(path):
        raise ConfigError(f"`path` is {path!r}", field="path", value=path, remedy="give a model folder or file")
    if backends is not None and not isinstance(cast("object", backends), Mapping):
        raise ConfigError(
            f"`backends` is {backends!r}", field="backends", value=backends, remedy='give {"attention": "NAME"}'
        )
    if not isinstance(cast("object", tp_size), int) or isinstance(tp_size, bool) or tp_size < 1:
        raise ConfigError(
            f"`tp_size` is {tp_size!r}", field="tp_size", value=tp_size, remedy="give an integer of at least 1"
        )
    own = {name: settings[name] for name in settings.keys() - _INSTRUMENTATION}
    instrumentation = Instrumentation(**{name: settings[name] for name in settings.keys() & _INSTRUMENTATION})
    if instrumentation.active:
        if own.get("observer") is not None:
            raise ConfigError(
                "`observer` is given, and so is `record` or `shadow`, which need an observer of their own",
                field="observer",
                value=own["observer"],
                remedy="leave out one of them",
            )
        own["observer"] = instrumentation
    return EngineConfig(model_path=str(path), dtype=_dtype(dtype), backends=dict(backends or {}), **own)


def _refuse_unknown_settings(settings: Mapping[str, Any]) -> None:
    for name in settings:
        if name not in SETTINGS:
            remedy = (
                _OTHER_WAYS.get(name)
                or (f"LLM calls this `{_OTHER_NAMES[name]}`" if name in _OTHER_NAMES else "")
                or ("how to sample is set per call, in SamplingParams" if name in _SAMPLING else "")
                or nearest(name, {*SETTINGS, "path", "dtype", "tp_size"})
                or f"known are {', '.join(sorted(SETTINGS))}"
            )
            raise ConfigError(f"LLM has no setting `{name}`", field=name, value=settings[name], remedy=remedy)


def refuse_unknown_arguments(call: str, known: tuple[str, ...], given: Mapping[str, object]) -> None:
    """Raise :class:`UsageError` for the first ``given`` argument of ``call`` that is not ``known``."""
    for name, value in given.items():
        remedy = (
            argument_hint(name, value)
            or nearest(name, known)
            or f"known are {', '.join(known)}; how to sample is set in `params`"
        )
        raise UsageError(f"`{call}` has no argument `{name}`", field=name, value=value, remedy=remedy)


def argument_hint(name: str, value: object) -> str:
    """What to use here instead of an argument that other libraries have; empty for other names."""
    in_params = f"give it in `params`: SamplingParams({name}={value!r:.40})" if name in _SAMPLING - HINTS.keys() else ""
    return _CALLS_OTHERS.get(name) or HINTS.get(name) or in_params


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    if dtype == "auto":
        return None
    if dtype not in DTYPES:
        raise ConfigError(
            f"`dtype` is {dtype!r}", field="dtype", value=dtype, remedy=f"use auto, {', '.join(sorted(DTYPES))}"
        )
    return DTYPES[dtype]
