import os

from mutants_attention import Right

os.environ["OMP_SCHEDULE"] = "static"


class ChangesTheEnvironmentAtImport(Right):
    pass
