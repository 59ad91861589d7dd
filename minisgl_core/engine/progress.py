"""Progress bars for work that takes a while."""

from __future__ import annotations

from collections.abc import Callable

from tqdm import tqdm

__all__ = ["progress_bar"]


def progress_bar(title: str, total: int) -> Callable[[], None]:
    """A bar on stderr; the returned function moves it on by one, and closes it at the end."""
    bar = tqdm(total=total, desc=title, leave=False)

    def advance() -> None:
        bar.update(1)
        if bar.n >= total:
            bar.close()

    return advance
