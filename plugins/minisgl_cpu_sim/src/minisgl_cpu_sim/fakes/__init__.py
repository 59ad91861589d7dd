"""Fakes of vendors' attention libraries, with their signatures and right results on CPU tensors.

They are for tests of plugins: the plugin's own code runs unchanged, in an engine or in the conformance kit::

    def test_mine(monkeypatch):
        inject(monkeypatch, "flashinfer")
        ...  # whatever imports flashinfer now gets the fake

They compute slowly and exactly, refuse what the real library would get wrong (:class:`VendorMisuse`), and say so if
asked for what they do not compute (:class:`NotImplementedError`). A GPU test compares each with the real one.
"""

from .checks import VendorMisuse
from .inject import FAKES, inject, on_cpu, with_attention

__all__ = ["FAKES", "VendorMisuse", "inject", "on_cpu", "with_attention"]
