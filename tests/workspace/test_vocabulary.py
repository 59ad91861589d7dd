"""Retired words stay out of code, comments, docstrings, messages, documentation and file names.

``docs/glossary.md`` holds the words in use. Each entry of ``RETIRED`` names a word that one of them replaced.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
READ = {".py", ".md", ".toml", ".yml", ".cu", ".cuh", ".h", ".cpp", ".sh", ".tmpl"}
KERNELS = r"plugins/\w+/(src|tests)/|benchmarks/gpu_"

NOT_YET: dict[str, str] = {
    # Reasons that last.
    "tests/workspace/test_vocabulary.py": "the list itself",
    "docs/glossary.md": "its last table maps retired words to those in use",
}


class Word(NamedTuple):
    pattern: str
    """Regular expression; a space in it matches every run of spaces, underscores, hyphens and comment marks"""
    use: str
    """What to write instead"""
    where: str = ""
    """Regular expression of the paths in which the word is retired: all, if empty"""
    cased: bool = False
    """Upper and lower case differ: for names of classes"""


RETIRED = (
    # Prose that reads as translated.
    Word("tells?|told|untold|telling", "say, report, notify, pass; `metadata()`"),
    Word("beside", "next to, with, in addition to; `alternate_choice`"),
    Word("(stands?|standing|stood)(?! ?ins?(?![a-z]))", "be, mean, hold; `static_reasons`"),
    Word("whoever", "the caller that, any code that"),
    Word("nobody", "no caller, no one"),
    Word("somebody", "a caller, someone"),
    Word("asked for|asks for|asking for|ask for", "requested, requests"),
    Word("so many", "that many, at most N"),
    Word("(takes?|taken|took|taking) in(?! (order|turns?|changing))", "fuse, absorb"),
    Word("at hand", "available"),
    Word("the like", "similar"),
    Word("(hears?|heard) of", "is notified of"),
    Word("(goes|go|went) by", "follows, is ordered by"),
    Word("lets? go of", "release"),
    Word("(and|but) none else", "and no other"),
    Word("rooms|(?:a|the|every|each|other|lower|higher|shared) room", "package"),
    # Names.
    Word("rehears[a-z]*", "memory profiling"),
    Word("dearest[a-z]*", "worst_case_params, worst case"),
    Word("zombies?", "finished_in_flight"),
    Word("last words", "exit report"),
    Word("wire", "messages", where=r"minisgl_core/llm|tests/llm|docs/architecture"),
    Word("blam(e|es|ed|ing)", "error attribution, attribute, name"),
    Word("witness(es)?", "observer, instrumentation"),
    Word("watching", "instrumentation"),
    Word("crowds?|crowded", "stress, many requests at once"),
    Word("wish|wishes", "requirement"),
    Word("Here|Order", "context, ordering", where=r"(tools|tests)/gpu", cased=True),
    Word("guests?", "sandbox"),
    Word("neighbou?rs?|neighbou?ring", "adjacent (operation, row, value); fused prologue and epilogue"),
    Word("rigs?", "device fixture, `DeviceFixture`"),
    Word("subjects?", "backend_under_test, `BackendUnderTest`"),
    Word("trials?", "check run, search step, attempt"),
    Word("box|boxes", "capability set"),
    Word("Need|Standing", "requirement, static reasons", where=r"\.(py|pyi)$", cased=True),
    Word("settles?|settled|settling", "resolve loop; decide, decided"),
    Word("Stage", "DeviceContext", where=r"minisgl_core/engine|tests/engine", cased=True),
    Word("RowEdit|row edits?|work outside", "logits processors, `postprocess_logits`"),
    Word("edits", "logits processors", where=r"engine/|minisgl_core/core/"),
    Word("(?<!in)(?<!in[\\s_-])flight", "InFlightBatch, in_flight"),
    Word("quiet|quiet passes", "steps_until_refresh", where=r"minisgl_core/scheduler|tests/scheduler"),
    Word("CLAIMS|unused claims", "lookahead pages", cased=True),
    Word("check claims|registry[./]claims", "spec_validation"),
    Word("Slot", "PlanEntry", where=r"\.py$", cased=True),
    Word("Weight ?Slots?", "WeightTarget"),
    Word("[A-Za-z]*(Attention|Graph|KV|MoE|Ops|Linear|Comm|Sample|Lifetime)Cases?", "...Check", cased=True),
    # Words of kernels.
    Word("pieces?", "vector: what one thread moves at a time", where=KERNELS),
    Word("joint", "align_bits", where=KERNELS),
    Word("gains?", "weights (of a norm)", where=KERNELS),
    Word(r"(?<!cache[\x20_])lines", "rows", where=r"\.(cu|cuh)$|triton_ops/"),
)


def _spaced(word: Word) -> str:
    return word.pattern.replace(" ?", r"[\s_-]?").replace(" ", r"[\s#/*_-]+")


def _compiled(word: Word) -> re.Pattern[str]:
    start = "(?:(?<![A-Za-z])|(?-i:(?<=[a-z])(?=[A-Z])))"  # of a word, also within CamelCase and snake_case
    end = "(?-i:(?![a-z])(?:(?<![A-Z])|(?![A-Z])))"
    return re.compile(f"{start}(?:{_spaced(word)}){end}", 0 if word.cased else re.IGNORECASE)


PATTERNS = [(word, _compiled(word), re.compile(_spaced(word).lower()), re.compile(word.where)) for word in RETIRED]
"""A word, what finds it, what finds it and more in small letters, ten times as fast, and where it is retired."""


def retired_words(path: str, text: str) -> Iterator[str]:
    """Each retired word in the name and the text of a file, as "file:line: word: what to write instead"."""
    small = f"{path}\n{text}".lower()
    for word, pattern, rough, where in PATTERNS:
        if rough.search(small) and where.search(path):
            for hit in pattern.finditer(path):
                yield f"{path}:0: {hit[0]!r} in the file's name; use: {word.use}"
            for hit in pattern.finditer(text):
                line = text.count("\n", 0, hit.start()) + 1
                yield f"{path}:{line}: {' '.join(hit[0].split())!r}; use: {word.use}"


def _tracked() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in names if (Path(name).suffix in READ or name == "Makefile") and (ROOT / name).is_file()]


def test_no_file_uses_a_retired_word() -> None:
    found = [
        hit
        for name in _tracked()
        if not name.startswith(tuple(NOT_YET))
        for hit in retired_words(name, (ROOT / name).read_text(encoding="utf-8"))
    ]
    assert not found, f"{len(found)} retired words; docs/glossary.md has the words in use:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "text", "word"),
    [
        ("minisgl_core/a.py", '"""What a backend is told."""', "told"),
        ("minisgl_core/a.py", "def test_norms_beside_it(): ...", "beside"),
        ("minisgl_core/a.py", "# as the caller asked\n    # for", "asked # for"),
        ("minisgl_core/a.py", "class _Crowd: ...", "Crowd"),
        ("minisgl_core/a.py", "raise CannotStand()", "Stand"),
        ("minisgl_core/a.py", "from minisgl_core.layers import WeightSlot", "WeightSlot"),
        ("docs/a.md", "The `Rig` of a test", "Rig"),
        ("docs/a.md", "a room imports rooms below it", "rooms"),
        ("plugins/minisgl_cuda/src/a.cuh", "int joint = 0;", "joint"),
    ],
)
def test_a_planted_word_is_found_at_its_line(path: str, text: str, word: str) -> None:
    hits = list(retired_words(path, f"first line\n{text}\n"))
    assert any(hit.startswith(f"{path}:2: {word!r}; use: ") for hit in hits), hits


def test_a_planted_file_name_is_found() -> None:
    (hit,) = retired_words("minisgl_core/registry/guest.py", "")
    assert hit == "minisgl_core/registry/guest.py:0: 'guest' in the file's name; use: sandbox"


@pytest.mark.parametrize(
    "text",
    [
        "CPU stand-ins and a stand_in",
        "besides, a joint solve leaves room for the gain; in flight, InFlightBatch, batches_in_flight",
        "wires right rigor wishbone understand standalone outstanding STANDARD",
        "silu is swish; a slot is one token's place, and several Slots, slots are places",
    ],
)
def test_words_in_use_are_left_alone(text: str) -> None:
    assert list(retired_words("docs/a.md", text)) == []
