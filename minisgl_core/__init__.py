"""minisgl: a serving engine for Hugging Face language models whose kernels are plugins."""

__version__ = "0.1.0"
