"""Two answers at once in one event loop, piece by piece: python examples/streaming.py MODEL"""

import asyncio
import sys

from minisgl_core import AsyncLLM, SamplingParams


async def read(llm: AsyncLLM, name: str, prompt: str) -> None:
    """Print one answer as it comes."""
    async for chunk in llm.stream(prompt, SamplingParams(max_tokens=32)):
        print(f"{name}: {chunk.text!r}", flush=True)


async def main() -> None:
    """Both streams share the engine's passes."""
    async with AsyncLLM(sys.argv[1]) as llm:
        await asyncio.gather(read(llm, "a", "The capital of France is"), read(llm, "b", "def add(x, y):"))


asyncio.run(main())
