"""Two models in one process, asked at the same time: python examples/two_models.py MODEL OTHER_MODEL"""

import sys
from concurrent.futures import ThreadPoolExecutor

from minisgl_core import LLM, SamplingParams


def answer(llm: LLM) -> str:
    """Each engine runs on a thread of its own."""
    return llm.generate("The capital of France is", SamplingParams(max_tokens=16), progress=False)[0].text


model, other = sys.argv[1:]
# On a GPU each gets a share of the memory that is free when it starts.
with LLM(model, memory_ratio=0.4) as first, LLM(other, memory_ratio=0.6) as second, ThreadPoolExecutor() as pool:
    for name, text in zip((model, other), pool.map(answer, (first, second)), strict=True):
        print(f"{name}: {text!r}")
