"""What capsules, replay, shrinking and shadows know of attention alone."""

__all__: list[str] = []
