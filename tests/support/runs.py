"""Which settings the parity tests run: tables of checkpoints and settings, and the sets made of them."""

from __future__ import annotations

from typing import Any

from .pairwise import covering_array, full_product

__all__ = ["FACTORS", "FAMILIES", "MAX_RUNS", "VARIANTS", "all_with_one_rank", "all_with_two_ranks", "runs_in_ci"]

FAMILIES = ("q3", "q25", "moe", "moe2", "mistral-window", "s93")
"""One checkpoint of each: meets every pair of settings."""
VARIANTS = (
    "moe-mixed",
    "mistral-full",
    "qwen2-window",
    "llama-bias",
    "llama-linear",
    "llama-dynamic",
    "llama-llama3",
    "llama-yarn",
    "q3-untied",
    "q3-16q2kv",
    "q3-8q2kv",
    "q3-8q1kv",
    "q3-bf16",
    "q3-v4",
    "q3-sharded",
    "q3-text",
    "moe-v4",
    "moe-fused",
    "s93-gguf",
    "moe-gguf",
)
"""Met once each, by settings that change from one to the next."""
FACTORS: dict[str, tuple[Any, ...]] = {
    "page_size": (16, 1, 64),
    "chunk": (8192, 7, 32),
    "tp": (1, 2),
    "graph": (0, 4),
    "cache": ("radix", "naive"),
    "overlap": (True, False),
}
NO_TP = ("s93", "s93-gguf")
"""9 query and 3 kv heads cannot be cut in two."""
TP_VARIANTS = ("q3-8q1kv", "llama-bias")
"""Those that say something new with two ranks: a replicated kv head, biases."""
MAX_RUNS = 40


def runs_in_ci() -> list[dict[str, Any]]:
    """Every pair of settings with each family, and each variant once."""
    forbidden = {frozenset({("name", name), ("tp", 2)}) for name in NO_TP}
    families = covering_array({"name": FAMILIES, **FACTORS}, forbidden)
    settings = covering_array({name: levels for name, levels in FACTORS.items() if name != "tp"})
    variants = [
        {"name": name, **settings[i % len(settings)], "tp": 1 + (name in TP_VARIANTS)}
        for i, name in enumerate(VARIANTS)
    ]
    return [*families, *variants]


def all_with_one_rank(name: str, page_size: int, graph: int) -> list[dict[str, Any]]:
    """Every combination of the settings that only a scheduler reads, on one engine."""
    return full_product({"name": (name,), **FACTORS, "page_size": (page_size,), "graph": (graph,), "tp": (1,)})


def all_with_two_ranks() -> list[dict[str, Any]]:
    """Every combination of settings with each family, and with the variants to which ranks matter."""
    names = (*(name for name in FAMILIES if name not in NO_TP), *TP_VARIANTS)
    return full_product({"name": names, **FACTORS, "tp": (2,)})
