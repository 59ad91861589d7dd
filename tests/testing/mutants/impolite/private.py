from importlib import import_module

from mutants_attention import Right


class ImportsTheEngine(Right):
    def prepare_metadata(self, batch):
        from minisgl_core.engine import Engine  # noqa: F401

        import_module("minisgl_core.scheduler")
