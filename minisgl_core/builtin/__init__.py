"""The core's own backends, registered through the same hooks as those of plugins."""

__all__: list[str] = []
