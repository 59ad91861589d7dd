"""What was measured on this machine for a model's shapes, and what plan resolution makes of it.

:mod:`.store` keeps measurements and knows which of them still hold; :mod:`.choose` turns them into costs. Measuring
itself, with the conformance kit, is :mod:`minisgl_core.calibrate`.
"""

__all__: list[str] = []
