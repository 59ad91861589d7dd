"""Attention's part of capsules, replay, shrinking and shadows."""

__all__: list[str] = []
