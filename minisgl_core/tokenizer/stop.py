"""Stop strings: text is sent only when it can no longer be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

__all__ = ["StopMatcher"]


class StopMatcher:
    """Watches one sequence's text for stop strings.

    Of a stop string nothing is sent, however many tokens it spans; if what looked like one turns out not to be, all of
    it is. The earliest match in the text wins.
    """

    __slots__ = ("_held", "_longest", "_stops", "matched")

    def __init__(self, stops: str | Sequence[str]) -> None:
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was met: what follows is dropped."""

    @property
    def stopped(self) -> bool:
        """A stop string was met."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """The text that may be sent now."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        matches = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if matches:
            place, self.matched = min(matches, key=itemgetter(0))
            self._held = ""
            return text[:place]
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What is still held, when the text ends without the stop string."""
        text, self._held = self._held, ""
        return text

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
