"""A conversation whose earlier turns are not computed again: python examples/chat_prefix.py MODEL"""

import sys

from minisgl_core import LLM, SamplingParams

with LLM(sys.argv[1]) as llm:
    messages = [{"role": "system", "content": "You answer in one sentence."}]
    for question in ("What is a prefix cache?", "And what is it good for?"):
        messages.append({"role": "user", "content": question})
        (answer,) = llm.chat(messages, SamplingParams(max_tokens=32))
        messages.append({"role": "assistant", "content": answer.text})
        # The second prompt begins with the first one: most of it is in the cache already.
        print(f"{question} {answer.text!r}: {answer.cached_tokens} of {answer.prompt_tokens} prompt tokens were cached")
