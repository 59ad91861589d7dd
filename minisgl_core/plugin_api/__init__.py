"""The one module that a plugin imports. It imports neither torch nor any kernel library."""

from .attention import AttentionBackend, AttentionSetup, LayerFacts
from .batch import BatchLike, BatchView, KVPool, StepOutput
from .comm import CommSetup, Communicator
from .compiling import cache_dir, compile_once, find_compiled, host_compiler, no_room
from .grammar import (
    GRAMMAR_KINDS,
    CompiledGrammar,
    Grammar,
    GrammarBackend,
    GrammarError,
    GrammarKind,
    GrammarSetup,
    Matcher,
    mask_words,
)
from .graph import GraphHost, GraphRunner, GraphSetup, PoisonHost, padded_size
from .hooks import HOOK_OF_ROLE, PROJECT, hookimpl
from .kernels import KernelLibrary
from .kv import KVKernels, KVSetup
from .linear import FUSABLE_OPS, AddNorm, FusingLinear, LinearBackend, LinearSetup
from .moe import MoEExecutor, MoESetup
from .ops import OP_NAMES, LayerOps, OpsSetup, RopeStoreArgs, SampleArgs, SamplingMode
from .pinned import PinnedRing
from .platform import CapturedGraph, Event, MemoryGauge, Platform
from .spec import (
    ANY,
    API_VERSIONS,
    HOST_ROLES,
    ROLES,
    AnyValue,
    BackendSpec,
    CannotRun,
    Caps,
    GraphLevel,
    MultipleOf,
    OneOf,
    Phase,
    PluginInfo,
    Reason,
    Role,
)

__all__ = [
    "ANY",
    "API_VERSIONS",
    "FUSABLE_OPS",
    "GRAMMAR_KINDS",
    "HOOK_OF_ROLE",
    "HOST_ROLES",
    "OP_NAMES",
    "PROJECT",
    "ROLES",
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
    "CompiledGrammar",
    "Event",
    "FusingLinear",
    "Grammar",
    "GrammarBackend",
    "GrammarError",
    "GrammarKind",
    "GrammarSetup",
    "GraphHost",
    "GraphLevel",
    "GraphRunner",
    "GraphSetup",
    "KVKernels",
    "KVPool",
    "KVSetup",
    "KernelLibrary",
    "LayerFacts",
    "LayerOps",
    "LinearBackend",
    "LinearSetup",
    "Matcher",
    "MemoryGauge",
    "MoEExecutor",
    "MoESetup",
    "MultipleOf",
    "OneOf",
    "OpsSetup",
    "Phase",
    "PinnedRing",
    "Platform",
    "PluginInfo",
    "PoisonHost",
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
    "mask_words",
    "no_room",
    "padded_size",
]
