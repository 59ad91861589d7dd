"""Host time of one scheduler step in steady decode, without a model."""

from __future__ import annotations

import time

import numpy as np
from commandline import Parser

from minisgl_core.core import SamplingParams
from minisgl_core.scheduler import NewReq, Scheduler
from minisgl_core.testing import NullEngine


def time_steady_decode(batch_size: int, steps: int = 200, page_size: int = 16) -> float:
    """Host time of one scheduler step in steady decode, in microseconds: the median over ``steps``."""
    length = 64 + steps + 80
    engine = NullEngine(
        num_pages=batch_size * -(-length // page_size) + 64,
        page_size=page_size,
        max_seq_len=length + 64,
        max_running_req=batch_size,
        vocab_size=32000,
        eos_token_ids=frozenset([2]),
        max_prefill_tokens=1 << 20,
    )
    scheduler = Scheduler(engine)
    params = SamplingParams(max_tokens=length - 8)
    prompts = np.random.default_rng(0).integers(3, 32000, (batch_size, 64), dtype=np.int32)
    scheduler.apply([NewReq(uid, prompt, params) for uid, prompt in enumerate(prompts)])
    for _ in range(20):
        scheduler.step()
    marks = [time.perf_counter()]
    for _ in range(steps):
        scheduler.step()
        marks.append(time.perf_counter())
    return float(np.median(np.diff(marks))) * 1e6


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    for size in (1, 8, 64, 256):
        for page in (1, 16):
            print(f"batch {size:4} page {page:3}: {time_steady_decode(size, page_size=page):7.1f} us per step")
