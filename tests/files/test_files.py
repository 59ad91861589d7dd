"""Files that results go to."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from minisgl_core.errors import UsageError
from minisgl_core.files import require_writable_file, require_writable_folder, write_whole


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def both_to(path: Path) -> list[Callable[[], None]]:
    """Trying the file out, and writing it."""
    return [
        partial(require_writable_file, path, "--out", field="--out"),
        partial(write_whole, path, "{}", "--out", field="--out"),
    ]


def test_folders_are_made_and_nothing_is_left_in_them(tmp_path: Path) -> None:
    require_writable_folder(tmp_path / "a" / "b", "results", field="--keep")
    require_writable_file(tmp_path / "c" / "rows.json", "--out", field="--out")
    assert listing(tmp_path) == ["a", "a/b", "c"]


def test_what_is_there_is_kept_until_it_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("old")
    require_writable_file(path, "--out", field="--out")
    assert path.read_text() == "old"
    write_whole(path, "new µ", "--out", field="--out")
    assert path.read_text(encoding="utf-8") == "new µ" and listing(tmp_path) == ["rows.json"]


@pytest.mark.parametrize("there", [True, False])
def test_what_a_link_points_to_is_written(tmp_path: Path, there: bool) -> None:
    (tmp_path / "results").mkdir()
    path, target = tmp_path / "latest.json", tmp_path / "results" / "rows.json"
    path.symlink_to(target)
    if there:
        target.write_text("old")
    require_writable_file(path, "--out", field="--out")
    write_whole(path, "new", "--out", field="--out")
    assert path.is_symlink() and target.read_text() == "new"
    assert listing(tmp_path) == ["latest.json", "results", "results/rows.json"]


def test_a_folder_that_cannot_be_made_is_refused_with_what_it_is_for(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "kept"
    with pytest.raises(UsageError) as caught:
        require_writable_folder(folder, "capsules", field="record")
    assert str(caught.value) == (
        f"capsules cannot be written to '{folder}': Not a directory; name a folder that you may write to"
    )
    assert (caught.value.field, caught.value.value) == ("record", str(folder))
    with pytest.raises(UsageError, match=r"; set THIS to another$"):
        require_writable_folder(folder, "capsules", field="THIS", remedy="set THIS to another")


@pytest.mark.parametrize(
    ("name", "why"), [("", "it is a folder"), ("file/rows.json", "Not a directory"), ("null", "it is no regular file")]
)
def test_a_file_that_cannot_be_written_is_refused_by_both(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "null").symlink_to("/dev/null")
    path = tmp_path / name
    for attempt in both_to(path):
        with pytest.raises(UsageError) as caught:
            attempt()
        assert str(caught.value).startswith(f"--out {path} cannot be written: {why}; name a file in a folder")
    assert listing(tmp_path) == ["file", "null"]


def test_a_file_that_is_read_only_is_refused_by_both_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "rows.json", tmp_path / "other.json"
    for each in (path, other):
        each.write_text("old")

    def refuses(target: Path, mode: int) -> bool:  # as the system does for anyone but root, who may write any file
        return not (target == path and mode == os.W_OK)

    monkeypatch.setattr(os, "access", refuses)
    for attempt in both_to(path):
        with pytest.raises(UsageError, match=r"--out .*rows\.json cannot be written: it is read-only; name a file"):
            attempt()
    for attempt in both_to(other):
        attempt()
    assert (path.read_text(), other.read_text()) == ("old", "{}")


def test_a_full_disk_leaves_the_old_content_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    path.write_text("old")
    whole = Path.write_text

    def half(self: Path, text: str, **options: str) -> int:
        whole(self, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(UsageError, match="No space left on device"):
        write_whole(path, "much that is new", "--out", field="--out")
    assert path.read_text() == "old" and listing(tmp_path) == ["rows.json"]
