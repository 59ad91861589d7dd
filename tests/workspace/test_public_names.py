"""The names that others build on. A change here is a change of the public interface: it needs a decision record."""

from __future__ import annotations

from importlib import import_module

import pytest

PINNED = {
    "minisgl_core.core": ["Batch", "Context", "Req", "SamplingParams"],
    "minisgl_core.distributed": ["DistributedInfo"],
    "minisgl_core.engine": ["Engine", "EngineConfig"],
    "minisgl_core.env": ["ENV"],
    "minisgl_core.llm": ["LLM"],
    "minisgl_core.errors": [
        "AdmissionError",
        "BackendError",
        "CheckpointError",
        "ConfigError",
        "EngineError",
        "MinisglError",
        "UsageError",
    ],
    "minisgl_core.plugin_api": [
        "ANY",
        "API_VERSIONS",
        "AddNorm",
        "AnyValue",
        "AttentionBackend",
        "AttentionSetup",
        "BackendSpec",
        "BatchLike",
        "BatchView",
        "CannotRun",
        "Caps",
        "CapturedGraph",
        "CommSetup",
        "Communicator",
        "Event",
        "CompiledGrammar",
        "PARSER_PARTS",
        "CallArguments",
        "CallBegin",
        "CallEnd",
        "CallForm",
        "Content",
        "ParseRequest",
        "Parser",
        "ParserEvent",
        "ParserPart",
        "ParserSetup",
        "Reasoning",
        "TextParser",
        "ToolFacts",
        "partial_marker",
        "FUSABLE_OPS",
        "FusingLinear",
        "GRAMMAR_KINDS",
        "Grammar",
        "GrammarBackend",
        "GrammarError",
        "GrammarKind",
        "GrammarSetup",
        "HOST_ROLES",
        "Matcher",
        "mask_words",
        "GraphHost",
        "GraphLevel",
        "GraphRunner",
        "GraphSetup",
        "HOOK_OF_ROLE",
        "KVKernels",
        "KVPool",
        "KVSetup",
        "KernelLibrary",
        "LayerFacts",
        "LayerOps",
        "LinearBackend",
        "LinearSetup",
        "MemoryGauge",
        "MoEExecutor",
        "MoESetup",
        "MultipleOf",
        "OP_NAMES",
        "OneOf",
        "OpsSetup",
        "PROJECT",
        "Phase",
        "PinnedRing",
        "Platform",
        "PluginInfo",
        "PoisonHost",
        "ROLES",
        "Reason",
        "Role",
        "RopeStoreArgs",
        "SampleArgs",
        "SamplingMode",
        "StepOutput",
        "cache_dir",
        "compile_once",
        "find_compiled",
        "hookimpl",
        "host_compiler",
        "no_room",
        "padded_size",
    ],
}


@pytest.mark.parametrize("name", PINNED)
def test_promised_names_are_public(name: str) -> None:
    module = import_module(name)
    assert set(PINNED[name]) <= set(module.__all__)
    assert [public for public in module.__all__ if not hasattr(module, public)] == []


def test_the_plugin_api_is_pinned_whole() -> None:
    assert sorted(import_module("minisgl_core.plugin_api").__all__) == sorted(PINNED["minisgl_core.plugin_api"])


@pytest.mark.parametrize("name", PINNED)
def test_no_name_is_listed_twice(name: str) -> None:
    names = import_module(name).__all__
    assert len(names) == len(set(names))
