"""Fakes of vendors' attention libraries, with their signatures and correct results on CPU tensors.

They are meant for tests of plugins: the plugin's code runs unchanged, in an engine or in the conformance kit::

    def test_mine(monkeypatch):
        inject(monkeypatch, "flashinfer")
        ...  # every import of flashinfer now gets the fake

They compute slowly and exactly, refuse calls that the real library would get wrong (:class:`VendorMisuse`), and raise
:class:`NotImplementedError` for what they do not compute. A GPU test compares each with the real one.
"""

from .checks import VendorMisuse
from .inject import FAKES, inject, on_cpu, with_attention

__all__ = ["FAKES", "VendorMisuse", "inject", "on_cpu", "with_attention"]
