"""Fused layer operations in Triton. Shapes as in ``plugin_api.ops``."""
