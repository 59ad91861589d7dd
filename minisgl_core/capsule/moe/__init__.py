"""What capsules, replay, shrinking and shadows know of routed experts alone."""

__all__: list[str] = []
