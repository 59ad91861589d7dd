"""Stop strings: text is sent only when it can no longer be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

__all__ = ["StopMatcher"]


class StopMatcher:
    """Watches one sequence's text for stop strings.

    Of a stop string nothing is sent, however many tokens it spans; if what looked like one turns out not to be, all of
    it is. The earliest match in the text wins. Special tokens count as text here, though they are never sent, so a stop
    string may be one or contain one, and none reaches across one that it does not contain.
    """

    __slots__ = ("_held", "_longest", "_special", "_stops", "matched")

    def __init__(self, stops: str | Sequence[str]) -> None:
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._special: list[tuple[int, int]] = []
        """Where in the held text special tokens begin and end."""
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
        self._held += text
        matches = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if matches:
            place, self.matched = min(matches, key=itemgetter(0))
            text, self._held = self._release(place), ""
            return text
        return self._release(len(self._held) - self._possible_beginning(self._held))

    def push_special(self, text: str) -> str:
        """As :meth:`push`, for the text of a special token."""
        if self.stopped or not self._stops:
            return ""
        begin = len(self._held)
        self._special.append((begin, begin + len(text)))
        return self.push(text)

    def flush(self) -> str:
        """What is still held, when the text ends without the stop string."""
        return self._release(len(self._held))

    def _release(self, count: int) -> str:
        """Take the first ``count`` characters out of the held text, and special tokens out of these."""
        text, self._held = self._held[:count], self._held[count:]
        if not self._special:
            return text
        sent, place = [], 0
        for begin, end in self._special:
            sent.append(text[place:begin])
            place = max(place, end)
        sent.append(text[place:])
        self._special = [(max(begin - count, 0), end - count) for begin, end in self._special if end > count]
        return "".join(sent)

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
