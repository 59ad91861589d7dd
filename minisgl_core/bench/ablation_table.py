"""The table of an ablation in a file. One that is measured in several runs grows there, as long as all are alike."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minisgl_core.errors import UsageError
from minisgl_core.files import write_whole

from .ablate import Row
from .facts import differences
from .variants import DEFAULT, VARIANTS

__all__ = ["AblationTable"]

_ORDER: Final = {variant.name: place for place, variant in enumerate((DEFAULT, *VARIANTS))}
_FIELD: Final = "--out"


class AblationTable:
    """``facts`` are what all rows have in common, as JSON data; ``workloads`` is the work by mode.

    With a file, its rows are kept, and those that are added take the places of those of the same variant and mode. A
    row's ``relative`` stays: it is of the default that was measured beside it, see :meth:`other_default`. Several runs
    may add to one file at once, such as one on each GPU: it is read again before each writing, and says from the start
    what it is about.
    """

    def __init__(self, facts: Mapping[str, Any], workloads: Mapping[str, Any], path: Path | None = None) -> None:
        """Raises :class:`UsageError` for a file that holds no ablation, or one of other facts or other work."""
        self._facts, self._workloads, self._path = dict(facts), dict(workloads), path
        self._commands = [self._facts.pop("command")] if "command" in self._facts else []
        self._rows: dict[tuple[str, str], Row] = {}
        self._join()
        self._write()

    def _join(self) -> None:
        """Take over what the file holds, if it is there."""
        path = self._path
        if path is None or not path.exists():
            return
        kept = _read(path)
        works = {mode: facts for mode, facts in self._workloads.items() if mode in kept["workloads"]}
        found = differences(
            {**kept, **{_work(mode): kept["workloads"][mode] for mode in works}},
            {**self._facts, **{_work(mode): facts for mode, facts in works.items()}},
        )
        if found:
            raise UsageError(
                f"{_FIELD} {path} holds an ablation that this cannot be added to: {found}",
                field=_FIELD,
                value=str(path),
                remedy="name another file, or remove it",
            )
        self._commands = list(dict.fromkeys([*kept.get("commands", ()), *self._commands]))
        self._workloads = {**kept["workloads"], **self._workloads}
        self._rows = {(row["variant"], row["mode"]): row for row in kept["rows"]}

    @property
    def rows(self) -> list[Row]:
        """The defaults, then the variants in the order in which a whole ablation has them."""
        return sorted(self._rows.values(), key=lambda row: _ORDER.get(row["variant"], len(_ORDER)))

    @property
    def content(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {**self._facts, "commands": self._commands, "workloads": self._workloads, "rows": self.rows}

    def add(self, row: Row) -> None:
        """Also to the file, at once: what was measured before an end by force stays readable.

        A default that failed does not take the place of one that was measured, to which other rows relate.
        Raises :class:`UsageError` if the file has become one that cannot be added to.
        """
        self._join()
        place = row["variant"], row["mode"]
        if row["variant"] != DEFAULT.name or "rate" in row or "rate" not in self._rows.get(place, {}):
            self._rows[place] = row
        self._write()

    def other_default(self, row: Row) -> float | None:
        """The rate of the default that the row's ``relative`` is of, where that is not the default in this table."""
        if not row["relative"]:
            return None
        own = row["rate"] / row["relative"]
        standing = self._rows.get((DEFAULT.name, row["mode"]), {}).get("rate")
        return None if standing is not None and math.isclose(own, standing) else float(own)

    def _write(self) -> None:
        if self._path is not None:
            write_whole(self._path, json.dumps(self.content, indent=1) + "\n", _FIELD, field=_FIELD)


def _work(mode: str) -> str:
    return f"work of {mode}"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        works, rows = content["workloads"], content["rows"]
        if isinstance(works, dict) and all(isinstance(row["variant"], str) and row["mode"] in works for row in rows):
            return dict(content)
        problem = "its rows are of another kind"
    except (OSError, ValueError, LookupError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise UsageError(
        f"{_FIELD} {path} is there and holds no ablation to add to: {problem}",
        field=_FIELD,
        value=str(path),
        remedy="name another file, or remove it",
    )
