"""Answer a file of prompts: python examples/batch_jsonl.py MODEL IN.jsonl OUT.jsonl

Each line of IN.jsonl is an object with a "prompt"; OUT.jsonl gets the same objects with the answer's fields added.
"""

import json
import sys

from minisgl_core import LLM, SamplingParams

model, source, target = sys.argv[1:]
with open(source) as lines:
    items = [json.loads(line) for line in lines]
with LLM(model) as llm:
    # One call: the engine batches the prompts as its memory allows.
    answers = llm.generate([item["prompt"] for item in items], SamplingParams(max_tokens=32))
with open(target, "w") as out:
    for item, answer in zip(items, answers, strict=True):
        out.write(json.dumps({**item, **answer.to_dict()}) + "\n")
