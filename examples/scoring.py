"""The perplexity of texts under a model: python examples/scoring.py MODEL TEXT ..."""

import math
import sys

from minisgl_core import LLM, SamplingParams

model, *texts = sys.argv[1:]
with LLM(model) as llm:
    # No token is generated; each token of the prompt but the first gets its log-probability.
    answers = llm.generate(texts, SamplingParams(max_tokens=0, prompt_logprobs=0), progress=False)
for text, answer in zip(texts, answers, strict=True):
    scores = [entry.logprob for entry in answer.prompt_logprobs or []]
    print(f"{math.exp(-sum(scores) / len(scores)):10.2f}  {text!r}")
