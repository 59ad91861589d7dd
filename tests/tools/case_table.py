"""The table of tests/cases/README.md: which test shows which reported case. As a script: writes the table anew.

A test says which case it shows by its name: ``test_case_48_...``, ``test_case_3_and_4_...``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Final

__all__ = ["CASES", "README", "find_tests", "listed_tests", "render"]

ROOT: Final = Path(__file__).parents[2]
README: Final = ROOT / "tests" / "cases" / "README.md"
CASES: Final = {
    1: "odd ratios of query to kv heads",
    2: "head widths 80, 96, 256; width that is not hidden / heads",
    3: "fewer kv heads than ranks",
    4: "q and k norms under kv replication",
    6: "gathering the head's logits for several rows",
    7: "row-parallel bias",
    8: "sampled id beyond the tokenizer",
    9: "`rope_parameters` and `rope_theta`",
    10: "`rope_scaling` that says default",
    11: "the old key `type`",
    12: "llama3 scaling values",
    14: "partial rotary embedding",
    15: "position of the first decode",
    16: "sliding window",
    17: "whole prompt cached on a page boundary",
    19: "integrity check",
    20: "eviction units",
    21: "prompts shorter than a page, split inside a page",
    22: "cached slots and reused table rows",
    23: "locks around a split",
    24: "cache hits do not change answers",
    26: "chunk boundaries",
    27: "tokens of unfinished chunks",
    28: "cached prompt again, with ranks",
    29: "prefill budget",
    30: "stopping at context or pool",
    31: "prompt at or beyond the context",
    33: "max_tokens beyond what is left",
    34: "pool after refused requests",
    35: "empty prompt",
    36: "max_tokens 0, -1, absent, 1",
    37: "stop token first",
    38: "tiny temperatures",
    39: "NaN, infinite and negative parameters",
    42: "extreme filters",
    43: "seeds per request",
    44: "ranks sample the same",
    45: "NaN logits",
    46: "greedy alone and among many requests",
    47: "several EOS ids",
    48: "stop string over several tokens",
    49: "characters in pieces",
    50: "double BOS",
    51: "template errors",
    65: "padding to graph sizes",
    67: "token ids of unused rows",
    68: "short and split sequences, page sizes",
    69: "no graphs, shutdown",
    71: "norm_topk_prob",
    72: "grouping tokens by expert",
    74: "shared experts, untouched input",
    75: "padding among expert ids",
    76: "a mixture without naming its backend",
    77: "tied and untied heads",
    78: "missing shard",
    79: "stray files",
    80: ".bin files only",
    81: "missing, extra, misshapen tensors",
    82: "loader memory",
    83: "the dtype key",
    101: "the by-hand outline, word for word",
    102: "NaN in the unused tail of a reused page",
    103: "one LLM called from several threads",
    104: "flags of special tokens from several sources",
    105: "GGUF keys of YaRN",
    106: "a custom op without device types in a strict emulated graph",
    107: "a special token as a stop string",
    108: "options of chat templates",
    109: "completion text that begins with a space",
    110: "GGUF in several files",
    111: "a GGUF tokenizer of an unknown kind",
    112: "empty tool calls, null content",
    113: "ties at the boundary of top-k and top-p",
    114: "NumPy scalars, tensors, generators and None as arguments",
    115: "a rare pause among equal prefills",
    116: "checking long prompts of token ids",
    117: "the first token of a short prompt",
    118: "`verify` outlives the backend that it checks",
    119: "faults that the conformance kit missed",
    120: "what `auto` prefers, and newly installed plugins",
    121: "a named kv backend writes the pool",
    122: "advice that works when it is followed",
    123: "a plugin built for another minor version of the core",
    124: "a stranger that reuses a backend's name",
    125: "the tutorial's install commands",
    126: "a linear backend that stores weights in its own format",
    127: "backend names, hints and calibration that mislead",
    128: "a full cache disk",
    129: "a named backend that this device cannot run",
    130: "a GGUF file whose weights are dequantised",
    131: "command-line input that was dropped in silence",
    132: "names that users of other engines type",
    133: "small faults of the command line",
    134: "`minisgl chat` at the keyboard",
    135: "shared-prefix runs answered from the cache",
    136: "host time of the runs themselves",
    137: "results that name their commit, device and runs",
    138: "stress answers after a near-tie",
    139: "skinny tiles for weights that were not measured",
    140: "limits, wall time and markers that say what is so",
    141: "kernels that may not be compiled here",
}
"""Those that must have a test: a CPU can show them, and they concern an engine without a server."""
_OTHERS: Final = {
    55: "client goes away",
    57: "aborts with ranks",
    59: "a worker dies",
    85: "requested name not found",
    86: "version mismatch",
    87: "duplicate names",
    88: "nothing heavy before it is needed",
    92: "books of an idle engine, with ranks",
}
_TEST: Final = re.compile(r"^(?:async )?def (test_\w*?case_\d+\w*)\(", re.MULTILINE)
_NUMBER: Final = re.compile(r"(?:case|and)_(\d+)(?=_|$)")
_ROW: Final = re.compile(r"^\| (\d+) \|[^|]*\| (.*) \|$", re.MULTILINE)


def find_tests() -> dict[int, list[str]]:
    """Case -> ``file::test`` of every test that names it."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted([*ROOT.glob("tests/*/test_*.py"), *ROOT.glob("plugins/*/tests/test_*.py")]):
        for name in _TEST.findall(path.read_text()):
            for number in _NUMBER.findall(name):
                found[int(number)].append(f"{path.relative_to(ROOT)}::{name}")
    return dict(found)


def listed_tests() -> dict[int, list[str]]:
    """The same, as the README says."""
    rows = _ROW.findall(README.read_text())
    return {int(number): re.findall(r"`([^`]+)`", tests) for number, tests in rows}


def render() -> str:
    found = find_tests()
    lines = [
        "# Reported cases and the tests that show them",
        "",
        "Each case is a fault that users of such engines have reported, as a small input with a right answer. A test",
        "carries the number in its name. Those here run on whole engines with real weights; the others on one part.",
        "Besides, `tests/models` holds every family to transformers' tokens and logits, and",
        "`tests/cases/test_random_workloads.py` plays random workloads against solo runs.",
        "",
        "This table is written by `python tests/tools/case_table.py`; a test sees that it leaves no case out.",
        "",
        "| case | what | tests |",
        "| --- | --- | --- |",
    ]
    titles = {**CASES, **_OTHERS}
    for number in sorted({*CASES, *found}):
        tests = " ".join(f"`{test}`" for test in found.get(number, []))
        lines.append(f"| {number} | {titles.get(number, 'see the tests')} | {tests} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    README.write_text(render())
