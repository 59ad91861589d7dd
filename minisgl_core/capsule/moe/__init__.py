"""The part of routed experts in capsules, replay, shrinking and shadows."""

__all__: list[str] = []
