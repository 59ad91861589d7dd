"""Backends in plain torch operations, for any device: slow, short, and correct."""
