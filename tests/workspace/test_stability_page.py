"""docs/reference/stability.md lists every version of every role's API, and the last is the one that is served."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.version import Version

from minisgl_core.plugin_api import API_VERSIONS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "stability.md").read_text(encoding="utf-8")


def test_each_role_has_a_changelog_that_ends_with_the_version_that_is_served() -> None:
    sections = re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    listed = {role: re.findall(r"^- \*\*([\d.]+)\*\* \S", text, re.MULTILINE) for role, text in sections}
    assert {role: versions[-1] for role, versions in listed.items()} == dict(API_VERSIONS)
    for versions in listed.values():
        assert versions[0] == "1.0" and versions == sorted(versions, key=Version)
