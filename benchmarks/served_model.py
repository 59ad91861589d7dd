"""What ``serving.py`` measures with: a tiny model with a tokenizer, a server without any, clients that leave, and
what processes use.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minisgl_core.bench.model_folder import write_geometry
from minisgl_core.bench.online.load import Request
from minisgl_core.bench.online.measure import Target
from minisgl_core.modelconfig.geometries import geometry

__all__ = ["canned_server", "cpu_seconds", "idle", "leave", "memory_mib", "write_tiny_model"]

EVENT = (
    b'data: {"object": "text_completion", "id": "cmpl-0123456789abcdef0123456789abcdef", "created": 1700000000, '
    b'"model": "canned", "choices": [{"index": 0, "text": " token", "finish_reason": null, "stop_reason": null, '
    b'"logprobs": null}], "usage": null}\n\n'
)


def write_tiny_model(folder: Path) -> Path:
    """The geometry ``tiny`` without weights, and a tokenizer of bytes, pairs of letters and an end."""
    model = replace(geometry("tiny"), eos_token_ids=(geometry("tiny").vocab_size - 1,))
    write_geometry(model, folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    small = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    merges = [(a, b) for a in small for b in small][: model.vocab_size - len(letters) - 1]
    tokens = letters + [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def memory_mib() -> float:
    """Of all processes that descend from this one, pages that they share divided among them."""
    return sum(map(_proportional_mib, _descendants(os.getpid())))


def cpu_seconds() -> tuple[float, float]:
    """Processor time of the server that descends from this process: of its front, and of the processes behind it."""
    (front,) = [process for process in _descendants(os.getpid()) if b"\0serve\0" in _command(process)]
    return _cpu_seconds(front), sum(map(_cpu_seconds, _descendants(front)))


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def _cpu_seconds(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _descendants(parent: int) -> list[int]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it has ended
    found, pending = [], [parent]
    while pending:
        children = [process for process, owner in parents.items() if owner == pending[0]]
        found += children
        pending = pending[1:] + children
    return found


def _proportional_mib(process: int) -> float:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


async def leave(target: Target, requests: Sequence[Request]) -> None:
    """Open each stream, and close its connection at the first event."""
    for some in _batches(requests, 50):
        await asyncio.gather(*(_leave(target, one) for one in some))


def _batches(items: Sequence[Request], size: int) -> Iterator[Sequence[Request]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]


async def _leave(target: Target, request: Request) -> None:
    endpoint = target.endpoint
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    writer.write(target.encode(request))
    await reader.readuntil(b"data: ")
    writer.transport.abort()


def idle(target: Target, within_s: float = 60.0) -> bool:
    """Whether no request runs or waits, soon."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        with urllib.request.urlopen(f"{target.endpoint.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        counts = [float(line.split()[-1]) for line in lines if line.startswith("minisgl_num_requests_")]
        if len(counts) >= 2 and not any(counts):
            return True
        time.sleep(0.1)
    return False


@contextmanager
def canned_server() -> Iterator[str]:
    """A process that answers each request with as many equal events as it wants tokens. Yields its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_canned, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def _serve_canned(connection: Connection) -> None:
    async def serve() -> None:
        server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=1024)
        connection.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    import json

    while not reader.at_eof():
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
        except asyncio.IncompleteReadError:
            break
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        count = json.loads(await reader.readexactly(length))["max_tokens"]
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(count):
            writer.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
            await writer.drain()
            await asyncio.sleep(0)  # the events of all connections take turns, as those of a batch do
        used = json.dumps({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}}).encode()
        end = b"data: %s\n\ndata: [DONE]\n\n" % used
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(end), end))
        await writer.drain()
    writer.close()
