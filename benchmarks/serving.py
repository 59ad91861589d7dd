"""What the server adds to the engine, and how it behaves under many clients.

    python benchmarks/serving.py [--parts NAME ..] [--rounds N] [--json FILE]
    python benchmarks/serving.py --parts curve prefill --geometry qwen3-0.6b --device cuda --json FILE    # on a GPU

The parts, each on a server in a process of its own:

- ``client``: processor time of our own client per event, against a server that sends canned events
- ``streams``: 1,000 clients that stream at once, and the same streams of AsyncLLM in this process
- ``throughput``: tokens per second over HTTP (the client counts bytes) and of ``LLM.generate``, 64 requests at once
- ``grammar``: steps per second of 16 rows, and of 16 rows of which one has a grammar
- ``memory``: memory of the server's processes after many requests of one token, and after requests that are left
- ``curve``: latencies at rising rates, and throughput at saturation compared with ``LLM.generate`` on the same work
- ``prefill``: gaps between tokens while a long prompt arrives every two seconds

The first five use a tiny model with random weights, so that the server is what is measured; the last two, --geometry.
Where two ways are compared, they take turns, and the figure is the median over rounds of their ratio or difference.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from commandline import Parser, about, amount, keep, output, positive, run
from served_model import canned_server, cpu_seconds, idle, leave, memory_mib, write_tiny_model
from tqdm import tqdm

from minisgl_core.bench import make_workload
from minisgl_core.bench.online.figures import summary
from minisgl_core.bench.online.http import Pool, parse_url
from minisgl_core.bench.online.load import Lengths, Load, Point, Request
from minisgl_core.bench.online.measure import Target, measure_point, send_all
from minisgl_core.bench.online.server import read_facts, started_server
from minisgl_core.bench.session import model_folder
from minisgl_core.core import SamplingParams
from minisgl_core.errors import MinisglError
from minisgl_core.modelconfig.geometries import geometry

ALL_AT_ONCE = Point(math.inf)
TINY = {"device": "cpu", "num_page_override": 65536, "max_seq_len_override": 2048, "max_running_req": 256}
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def flags(settings: dict[str, Any]) -> list[str]:
    """Settings as arguments of ``minisgl serve``."""
    return [text for key, value in settings.items() for text in (f"--{key.replace('_', '-')}", str(value))]


@contextmanager
def server(arguments: Sequence[str]) -> Iterator[Target]:
    """A server with room in its queue."""
    with started_server([*arguments, "--dummy-weights", "--max-waiting", "100000"]) as (url, _):
        endpoint = parse_url(url)
        yield Target(endpoint, read_facts(endpoint)["model"], temperature=0.0)


def drawn(requests: int, inputs: int, outputs: int, number: int) -> list[Request]:
    """New prompts for each number, so that no prefix is in the cache."""
    load = Load(requests, Lengths(inputs, inputs), Lengths(outputs, outputs), vocab_size=512)
    return load.draw(ALL_AT_ONCE, number)


def median_of(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The median of each figure, and all rounds."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]} | {"rounds": list(rounds)}


def turns(name: str, rounds: int, once: Callable[[int], dict[str, float]]) -> dict[str, Any]:
    """The same measurement several times after a warm-up."""
    once(0)
    return median_of([once(number) for number in tqdm(range(1, rounds + 1), desc=name)])


# ---- the parts -------------------------------------------------------------------------------------------------------


def client(options: Any, _: Path) -> dict[str, Any]:
    """How many events a second our client could read with a processor of its own."""
    with canned_server() as url:
        target = Target(parse_url(url), "canned")

        def once(number: int) -> dict[str, float]:
            answers, state = send_all(target, drawn(64, 8, options.tokens, number), None)
            events = sum(len(answer.times) for answer in answers)
            assert all(answer.error is None for answer in answers), answers[0]
            return {"cpu_us_per_event": state.cpu_s / events * 1e6, "events_per_cpu_s": events / state.cpu_s}

        return turns("client", options.rounds, once)


def streams(options: Any, folder: Path) -> dict[str, Any]:
    """Latencies of many streams at once, over HTTP and in process."""
    from minisgl_core.llm import AsyncLLM

    params = SamplingParams(max_tokens=32, **GREEDY)
    llm = AsyncLLM(folder, dummy_weights=True, progress=False, **TINY)

    async def one(request: Request) -> tuple[float, float]:
        begin, first = time.perf_counter(), 0.0
        async for chunk in llm.stream(list(request.prompt), params):
            first = first or (time.perf_counter() if chunk.token_ids else 0.0)
        return first - begin, time.perf_counter() - begin

    async def all_of(requests: Sequence[Request]) -> list[tuple[float, float]]:
        return list(await asyncio.gather(*map(one, requests)))

    try:
        with server(["--model", str(folder), *flags(TINY)]) as target:

            def once(number: int) -> dict[str, float]:
                requests = drawn(options.clients, 32, 32, number)
                found = measure_point(target, requests, ALL_AT_ONCE)
                if found["errors"]:
                    raise MinisglError(f"streams failed: {found['errors']}")
                alone = asyncio.run(all_of(requests))
                first, whole = (float(np.percentile([pair[at] for pair in alone], 99)) * 1e3 for at in (0, 1))
                return {
                    "errors": 0,
                    "http_ttft_p99_ms": found["ttft_ms"]["p99"],
                    "http_e2e_p99_ms": found["e2e_ms"]["p99"],
                    "alone_ttft_p99_ms": first,
                    "alone_e2e_p99_ms": whole,
                    "added_ttft_p99_ms": found["ttft_ms"]["p99"] - first,
                    "added_e2e_p99_ms": found["e2e_ms"]["p99"] - whole,
                    "client_lag_p99_ms": found["client"]["loop_lag_p99_ms"],
                }

            return {"clients": options.clients, **turns("streams", options.rounds, once)}
    finally:
        llm.shutdown()


async def count_bytes(target: Target, requests: Sequence[Request]) -> tuple[float, int]:
    """Seconds until all answers are complete, and their bytes."""
    pool, size, ended = Pool(target.endpoint), 0, 0
    encoded = [target.encode(request) for request in requests]

    def on_body(body: bytes, _: float) -> None:
        nonlocal size, ended
        size += len(body)
        ended += body.endswith(b"data: [DONE]\n\n")

    begin = time.perf_counter()
    statuses = await asyncio.gather(*(pool.request(data, on_body) for data in encoded))
    seconds = time.perf_counter() - begin
    pool.close()
    if set(statuses) != {200} or ended != len(requests):
        raise MinisglError(f"{len(requests) - ended} of {len(requests)} answers are incomplete: {set(statuses)}")
    return seconds, size


def throughput(options: Any, folder: Path) -> dict[str, Any]:
    """Tokens per second over HTTP and of ``LLM.generate``."""
    from minisgl_core.llm import LLM

    with (
        LLM(folder, dummy_weights=True, progress=False, **TINY) as llm,
        server(["--model", str(folder), *flags(TINY)]) as target,
    ):

        def once(number: int) -> dict[str, float]:
            requests = drawn(64, 64, options.tokens, number)
            before, client_s = cpu_seconds(), time.process_time()
            seconds, size = asyncio.run(count_bytes(target, requests))
            client_s = time.process_time() - client_s
            used = [now - then for then, now in zip(before, cpu_seconds(), strict=True)]
            begin, alone_s = time.perf_counter(), time.process_time()
            params = SamplingParams(max_tokens=options.tokens, **GREEDY)
            answers = llm.generate([list(one.prompt) for one in requests], params, progress=False)
            alone, alone_s = time.perf_counter() - begin, time.process_time() - alone_s
            tokens = sum(len(answer.token_ids) for answer in answers)
            assert tokens == 64 * options.tokens
            return {
                "http_tok_s": tokens / seconds,
                "generate_tok_s": tokens / alone,
                "ratio": alone / seconds,
                "bytes_per_token": size / tokens,
                "front_cpu_us_per_token": used[0] / tokens * 1e6,
                "engine_cpu_us_per_token": used[1] / tokens * 1e6,
                "client_cpu_us_per_token": client_s / tokens * 1e6,
                "generate_cpu_us_per_token": alone_s / tokens * 1e6,
            }

        return {"clients": 64, "tokens": options.tokens, **turns("throughput", options.rounds, once)}


def grammar(options: Any, folder: Path) -> dict[str, Any]:
    """Time of the same steps without a grammar, and with one in one of 16 rows."""
    from minisgl_core.llm import LLM

    plain = SamplingParams(max_tokens=options.tokens, **GREEDY)
    pattern = {"regex": f"[a-z ]{{{2 * options.tokens},}}"}
    with LLM(folder, dummy_weights=True, progress=False, **TINY) as llm:

        def seconds(number: int, first: SamplingParams) -> float:
            prompts = [list(one.prompt) for one in drawn(16, 64, 1, number)]
            begin = time.perf_counter()
            answers = llm.generate(prompts, [first, *[plain] * 15], progress=False)
            found = time.perf_counter() - begin
            if failed := [answer.error for answer in answers if answer.error is not None]:
                raise MinisglError(failed[0])
            assert all(len(answer.token_ids) == options.tokens for answer in answers)
            return found

        def once(number: int) -> dict[str, float]:
            without = seconds(2 * number, plain)
            constrained = seconds(2 * number + 1, SamplingParams(max_tokens=options.tokens, grammar=pattern, **GREEDY))
            steps = options.tokens
            return {"steps_s": steps / without, "grammar_steps_s": steps / constrained, "ratio": without / constrained}

        try:
            return {"rows": 16, **turns("grammar", options.rounds, once)}
        except MinisglError as error:  # no backend is installed, or the engine refuses grammars
            return {"skipped": " ".join(str(error).split())}


def memory(options: Any, folder: Path) -> dict[str, Any]:
    """Memory after a tenth of the requests, after all, and after requests that were left."""
    tenth = max(1, options.requests // 10)
    with server(["--model", str(folder), *flags(TINY)]) as target:
        found: list[float] = []
        for number in tqdm(range(10), desc="memory"):
            answers, _ = send_all(target, drawn(tenth, 8, 1, number), 64)
            failed = [answer for answer in answers if answer.error is not None]
            if failed:
                raise MinisglError(f"{len(failed)} requests failed: {failed[0].error}: {failed[0].detail}")
            found.append(memory_mib())
        asyncio.run(leave(target, drawn(options.aborts, 8, 1000, 10)))
        rests = idle(target)
        found.append(memory_mib())
    return {
        "requests": 10 * tenth,
        "aborts": options.aborts,
        "mib": found,
        "growth_mib": found[-2] - found[0],
        "growth_by_aborts_mib": found[-1] - found[-2],
        "idle_at_the_end": rests,
    }


def _offline(options: Any) -> list[Request]:
    """The work of ``minisgl bench offline``."""
    work = make_workload("offline", 0, options.work).within(geometry(options.geometry).vocab_size)
    if options.short:
        work = work.shortened(16).warm_up(16)
    return [Request(0.0, prompt, count) for prompt, count in zip(work.prompts, work.outputs, strict=True)]


@contextmanager
def geometry_server(options: Any) -> Iterator[Target]:
    """A server of the geometry with random weights."""
    with model_folder(geometry(options.geometry)) as folder, server(_geometry_arguments(options, folder)) as target:
        yield target


def _geometry_arguments(options: Any, folder: str) -> list[str]:
    more = ["--num-page-override", "20000"] if options.device == "cpu" else []
    context = str(min(geometry(options.geometry).max_position_embeddings, 16384))
    return ["--model", folder, "--device", options.device, "--max-seq-len-override", context, *more]


def curve(options: Any, _: Path) -> dict[str, Any]:
    """Figures at each rate, and throughput at saturation over that of ``LLM.generate``."""
    from minisgl_core.llm import LLM

    lengths = Lengths(6, 64) if options.short else Lengths(100, 1024)
    ids = min(10_000, geometry(options.geometry).vocab_size)
    load = Load(1, lengths, lengths, ids, duration_s=options.seconds)
    work = _offline(options)
    tokens = sum(request.output for request in work)
    with geometry_server(options) as target:
        send_all(target, work, None)
        saturated = [measure_point(target, work, ALL_AT_ONCE) for _ in range(options.rounds)]
        points = [
            measure_point(target, load.draw(Point(rate), number), Point(rate))
            for number, rate in enumerate(tqdm(options.rates, desc="rates"))
        ]
    with model_folder(geometry(options.geometry)) as folder, ExitStack() as stack:
        settings: dict[str, Any] = {"device": options.device, "max_seq_len_override": 4096}
        settings |= {"num_page_override": 20000} if options.device == "cpu" else {}
        llm = stack.enter_context(LLM(folder, dummy_weights=True, progress=False, **settings))
        prompts = [list(request.prompt) for request in work]
        params = [SamplingParams(temperature=0.0, max_tokens=one.output, ignore_eos=True) for one in work]
        alone = []
        for _ in range(options.rounds + 1):
            llm.clear_cache()
            begin = time.perf_counter()
            llm.generate(prompts, params, progress=False)
            alone.append(tokens / (time.perf_counter() - begin))
    http, offline = statistics.median(one["output_tok_s"] for one in saturated), statistics.median(alone[1:])
    return {
        "points": points,
        "saturated": saturated,
        "http_tok_s": http,
        "generate_tok_s": offline,
        "ratio": http / offline,
    }


def prefill(options: Any, _: Path) -> dict[str, Any]:
    """Gaps between events of 32 streams, alone and while long prompts arrive."""
    ids = min(10_000, geometry(options.geometry).vocab_size)
    long = 512 if options.short else 8192
    with geometry_server(options) as target:

        def gaps(number: int, every_s: float | None) -> dict[str, float]:
            steady = Load(32, Lengths(128, 128), Lengths(options.tokens, options.tokens), ids).draw(ALL_AT_ONCE, number)
            prompts = Load(20, Lengths(long, long), Lengths(1, 1), ids).draw(ALL_AT_ONCE, number + 100)
            late = [one._replace(at=every_s * (at + 1)) for at, one in enumerate(prompts)] if every_s else []
            answers, _ = send_all(target, steady + late, None)
            failed = [answer for answer in answers if answer.error is not None]
            if failed:
                raise MinisglError(f"{len(failed)} requests failed: {failed[0].error}: {failed[0].detail}")
            found = summary([b - a for one in answers[:32] for a, b in itertools.pairwise(one.times)])
            assert found is not None
            return found

        gaps(0, None)
        alone, beset = gaps(1, None), gaps(2, 2.0)
    ratios = {"p99_over_p50": beset["p99"] / beset["p50"], "p99_over_median_alone": beset["p99"] / alone["p50"]}
    return {"prompt": long, "alone_itl_ms": alone, "itl_ms": beset, **ratios}


PARTS: dict[str, Callable[[Any, Path], dict[str, Any]]] = {
    one.__name__: one for one in (client, streams, throughput, grammar, memory, curve, prefill)
}


def show(name: str, found: dict[str, Any]) -> None:
    """The figures of one part."""
    shown = [f"{key} {value:,.4g}" for key, value in found.items() if isinstance(value, int | float)]
    print(f"{name}: {found.get('skipped') or ', '.join(shown)}")


def main() -> None:
    """The chosen parts, one after the other."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=["client", "streams", "throughput", "grammar", "memory"]
    )
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--clients", type=positive, default=1000, help="of streams")
    parser.add_argument("--tokens", type=positive, default=256, help="of each answer, but for streams and memory")
    parser.add_argument("--requests", type=positive, default=50_000, help="of memory")
    parser.add_argument("--aborts", type=positive, default=1000, help="of memory")
    parser.add_argument("--geometry", default="tiny", help="of curve and prefill")
    parser.add_argument("--device", default="cpu", help="of curve and prefill")
    parser.add_argument("--rates", type=amount, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="of curve")
    parser.add_argument("--seconds", type=amount, default=20.0, help="of each rate of curve")
    parser.add_argument("--work", type=positive, default=256, help="requests of curve at saturation")
    parser.add_argument("--short", action="store_true", help="curve and prefill with short prompts and answers")
    parser.add_argument("--json", type=output, help="write raw results here")
    options = parser.parse_args()
    geometry(options.geometry)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny_model(Path(scratch) / "tiny")
        for name in options.parts:
            found[name] = PARTS[name](options, folder)
            show(name, found[name])
            if options.json:
                keep({**about(options, options.device), "repeat": options.rounds, "parts": found}, options.json)


if __name__ == "__main__":
    raise SystemExit(run(main))
