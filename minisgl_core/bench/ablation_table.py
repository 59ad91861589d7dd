"""The table of an ablation in a file, which may be measured in several runs under equal conditions."""

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
    """The rows of an ablation, optionally backed by a file.

    ``facts``: what all rows have in common, as JSON data. ``workloads``: the work by mode. Rows of the file are kept; a
    new row replaces that of the same variant and mode. The ``relative`` of a row refers to the default that was
    measured together with it, see :meth:`other_default`. Several runs may add to one file at once, such as one on each
    GPU: the file is read again before each write, and is created at the start.
    """

    def __init__(self, facts: Mapping[str, Any], workloads: Mapping[str, Any], path: Path | None = None) -> None:
        """Raises :class:`UsageError` for a file that is not an ablation, or has other facts or other work."""
        self._facts, self._workloads, self._path = dict(facts), dict(workloads), path
        self._commands = [self._facts.pop("command")] if "command" in self._facts else []
        self._rows: dict[tuple[str, str], Row] = {}
        self._join()
        self._write()

    def _join(self) -> None:
        """Add the rows of the file, if it exists."""
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
        """The table as plain JSON data."""
        return {**self._facts, "commands": self._commands, "workloads": self._workloads, "rows": self.rows}

    def add(self, row: Row) -> None:
        """Add a row, also to the file, so that it survives if the run is killed.

        A failed default does not replace a measured one, to which other rows refer. Raises :class:`UsageError` if rows
        cannot be added to the file any more.
        """
        self._join()
        place = row["variant"], row["mode"]
        if row["variant"] != DEFAULT.name or "rate" in row or "rate" not in self._rows.get(place, {}):
            self._rows[place] = row
        self._write()

    def other_default(self, row: Row) -> float | None:
        """The rate of the default that the ``relative`` of this row refers to, if it is not the default
        in this table.
        """
        if not row["relative"]:
            return None
        own = row["rate"] / row["relative"]
        present = self._rows.get((DEFAULT.name, row["mode"]), {}).get("rate")
        return None if present is not None and math.isclose(own, present) else float(own)

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
