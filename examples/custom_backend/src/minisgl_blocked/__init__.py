"""The attention backend blocked."""
