"""The results of a run: a JSON file that is rewritten after every check, and a list."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from minisgl_core.errors import UsageError
from minisgl_core.files import write_whole
from minisgl_core.registry import DeviceFacts

from .check import ROOT, STATUSES, Check, Record

__all__ = ["Report", "brief", "default_path", "header_of", "merged"]

FORMAT: Final = 1
NOT_RUN: Final = "it was not run"
NO_REPORT: Final = ("no report of it was given",)


def default_path(device: DeviceFacts, part: tuple[int, int] | None = None) -> Path:
    """Such as ``benchmarks/results/gpu_check_h200.json`` in the checkout."""
    words = re.findall(r"[a-z0-9]+", device.name.lower()) if device.kind == "cuda" else ["cpu"]
    short = "-".join(word for word in words if word not in ("nvidia", "geforce")) or "cuda"
    suffix = f"_part{part[0]}of{part[1]}" if part else ""
    return ROOT / "benchmarks" / "results" / f"gpu_check_{short}{suffix}.json"


@dataclass
class Report:
    """All records by name. ``header``: device, versions, commit and options, as JSON data."""

    header: Mapping[str, Any]
    records: dict[str, Record] = field(default_factory=dict)
    seconds: float = 0.0

    def expecting(self, checks: Iterable[Check]) -> Report:
        """The same with these checks as unfinished, which they stay if the run is killed."""
        for check in checks:
            self.records[check.name] = Record(check.name, "unfinished", error=(NOT_RUN,), cases=check.cases)
        return self

    @property
    def counts(self) -> dict[str, int]:
        """Records by status."""
        found = Counter(record.status for record in self.records.values())
        return {status: found[status] for status in STATUSES}

    @property
    def passed(self) -> bool:
        """Nothing failed or is unfinished, and something is ok."""
        counts = self.counts
        return not counts["failed"] and not counts["unfinished"] and counts["ok"] > 0

    def cases(self) -> dict[int, dict[str, Any]]:
        """Reported fault -> its checks and whether they show that it is absent: the worst of those that were made."""
        found: dict[int, list[Record]] = {}
        for record in self.records.values():
            for number in record.cases:
                found.setdefault(number, []).append(record)
        return {
            number: {"status": _together(records), "checks": [record.name for record in records]}
            for number, records in sorted(found.items())
        }

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "format": FORMAT,
            **self.header,
            "seconds": round(self.seconds, 1),
            "passed": self.passed,
            "counts": self.counts,
            "checks": [record.to_json() for record in self.records.values()],
            "cases": {str(number): case for number, case in self.cases().items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """The inverse of :meth:`to_json`."""
        derived = ("format", "seconds", "passed", "counts", "checks", "cases")
        records = [Record.from_json(item) for item in data["checks"]]
        header = {key: value for key, value in data.items() if key not in derived}
        return cls(header, {record.name: record for record in records}, data["seconds"])

    @classmethod
    def read(cls, path: Path) -> Report:
        """From a file. Raises :class:`UsageError` for a file that holds no report."""
        try:
            data = json.loads(path.read_text())
            if data["format"] == FORMAT:
                return cls.from_json(data)
            problem = f"its format is {data['format']}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"{path} is no report: {problem}", field="--merge", value=str(path), remedy="give a file that --json wrote"
        )

    def write(self, path: Path) -> None:
        """Replace the file at once, so that a reader finds a whole report. Raises :class:`UsageError`."""
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n", "the report", field="--json")

    def show(self) -> str:
        """Every record in a line, the errors of those that failed, and the verdict."""
        width = max(map(len, self.records), default=0)
        rows = [
            f"{record.name:{width}}  {record.status:10} {record.seconds:6.1f} s  {brief(record)}"
            for record in self.records.values()
        ]
        lines = [_title(self.header.get("device", {})), *(row.rstrip() for row in rows)]
        for record in self.records.values():
            if record.status == "failed":
                lines += ["", f"FAILED {record.name}", *(f"  {line}" for line in record.error or ("no message",))]
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items() if count)
        verdict = "PASSED" if self.passed else "FAILED"
        return "\n".join([*lines, "", f"{verdict}: {counts or 'no check'}, {self.seconds:.0f} s"])


def brief(record: Record, length: int = 160) -> str:
    """Its figures, or why it is not ok, on one line."""
    if record.status != "ok":
        return next(iter(record.error), "")
    shown = {name: value for name, value in record.figures.items() if not isinstance(value, Mapping | list)}
    words = (f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items())
    text = ", ".join(words)
    return text if len(text) <= length else text[: length - 1] + "…"


def _title(device: Mapping[str, Any]) -> str:
    sm = f" sm{device['sm']}" if device.get("sm") else ""
    return f"gpu-check on {device.get('kind', '?')}{sm} {device.get('name', '')}".rstrip()


def _together(records: Sequence[Record]) -> str:
    made = {record.status for record in records}
    return next(status for status in ("failed", "unfinished", "ok", "skipped") if status in made)


def merged(reports: Sequence[Report]) -> Report:
    """One report of several parts of a run. Of two records of one check the later finished one counts.

    A missing part counts as an unfinished check. Raises :class:`UsageError` unless all reports are of one kind of
    device and of the same versions.
    """
    for key, what, remedy in (
        ("device", "devices", "merge reports of one device"),
        ("versions", "sets of versions", "merge reports of one installation"),
    ):
        found = {json.dumps(report.header.get(key), sort_keys=True) for report in reports}
        if len(found) != 1:
            text = f"the reports are of {len(found)} {what}"
            raise UsageError(text, field="--merge", value=len(found), remedy=remedy)
    whole = Report({**reports[0].header, "parts": [dict(report.header) for report in reports]})
    for report in reports:
        whole.seconds += report.seconds
        for name, record in report.records.items():
            if record.error == NO_REPORT:  # a part that was missing then: it is looked for anew below
                continue
            if record.status != "unfinished" or name not in whole.records:
                whole.records[name] = record
    for name in _missing_parts(reports):
        whole.records[name] = Record(name, "unfinished", error=NO_REPORT)
    return whole


def _runs(header: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The headers of all runs behind a report, which may be a joined one."""
    parts = header.get("parts")
    return [header] if parts is None else [run for part in parts for run in _runs(part)]


def _missing_parts(reports: Sequence[Report]) -> list[str]:
    """Such as ``part 2/3``: parts of divided runs that no report covers."""
    runs = [run for report in reports for run in _runs(report.header)]
    given = {str(part) for run in runs if (part := run.get("options", {}).get("part"))}
    counts = {int(part.partition("/")[2]) for part in given}
    wanted = [f"{number}/{count}" for count in sorted(counts) for number in range(1, count + 1)]
    return [f"part {part}" for part in wanted if part not in given]


def header_of(
    device: DeviceFacts, versions: Mapping[str, str], commit: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The part of a report before its checks."""
    kind = {"kind": device.kind, "sm": device.sm, "name": device.name, "driver": device.driver, "count": device.count}
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "device": kind,
        "versions": dict(versions),
        "commit": commit,
        "options": dict(options),
        "started": started,
    }
