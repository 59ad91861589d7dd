"""Measures which backend is fastest on this machine, for this model's shapes.

:mod:`minisgl_core.calibration` keeps the result, where an engine reads it.
"""

__all__: list[str] = []
