"""The core's own backends, registered through the same hooks as anybody's."""

__all__: list[str] = []
