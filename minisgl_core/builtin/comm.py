"""Role ``comm`` over torch.distributed: gloo between CPU ranks, NCCL between GPUs.

Process groups are built directly, without torch's global default group: several engines can live in one process.
The collectives are torch.library operations: graph recorders see them like any other.
"""

from __future__ import annotations

import itertools
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from minisgl_core.errors import EngineError

if TYPE_CHECKING:
    from minisgl_core.plugin_api import CommSetup

__all__ = ["TorchDistCommunicator", "report_loss"]

c10d: Any = dist  # its process-group classes carry no types

_DIGEST_BYTES = 128
_JOINED, _LOST = "joined/{}", "lost"
_POLL_S = 0.01
_handles = itertools.count()
_live: WeakValueDictionary[int, TorchDistCommunicator] = WeakValueDictionary()
"""Operations can only carry plain numbers, so each communicator has one; entries vanish with their owner."""

_library = torch.library.Library("minisgl_dist", "DEF")
_library.define("all_reduce_(Tensor(a!) x, int handle) -> ()")
_library.define("all_gather(Tensor x, int handle) -> Tensor")


def _all_reduce(x: torch.Tensor, handle: int) -> None:
    _live[handle].group.allreduce([x]).wait()


def _all_gather(x: torch.Tensor, handle: int) -> torch.Tensor:
    comm = _live[handle]
    parts = [torch.empty_like(x) for _ in range(comm.size)]
    comm.group.allgather([parts], [x.contiguous()]).wait()
    return torch.cat(parts, dim=-1)


for _key in ("CPU", "CUDA"):
    _library.impl("all_reduce_", _all_reduce, _key)
    _library.impl("all_gather", _all_gather, _key)


def report_loss(init_method: str, rank: int) -> None:
    """Notify the ranks that wait for each other at ``init_method`` that ``rank`` will never come, so that they need not
    wait until their time is over. Nothing happens if no rank waits there.
    """
    address = urlsplit(init_method)
    with suppress(RuntimeError):
        store = c10d.TCPStore(address.hostname, address.port, None, False, timedelta(seconds=5), False)
        store.set(_LOST, str(rank))


def _join(store: Any, rank: int, size: int, timeout_s: float) -> None:
    """Until all ranks are here. Raises RuntimeError if one is reported lost, or after ``timeout_s`` seconds."""
    store.set(_JOINED.format(rank), "")
    missing = [r for r in range(size) if r != rank]
    deadline = time.monotonic() + timeout_s
    while missing := [r for r in missing if not store.check([_JOINED.format(r)])]:
        if store.check([_LOST]):
            raise RuntimeError(f"rank {store.get(_LOST).decode()} is lost")
        if time.monotonic() > deadline:
            raise RuntimeError(f"after {timeout_s:g} s these are missing: {', '.join(map(str, missing))}")
        time.sleep(_POLL_S)


def _own_address(host: str, port: int) -> str:
    """The address under which the other ranks reach this machine: the one from which it reaches rank 0's."""
    (family, _, _, _, address) = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
        return own


class TorchDistCommunicator:
    """One process group per engine; free of charge with a single rank."""

    def __init__(self, setup: CommSetup, options: Any = None) -> None:
        self.rank, self.size = setup.rank, setup.size
        self.group: Any = None
        self._device = setup.device
        self._handle = next(_handles)
        _live[self._handle] = self
        if self.size > 1:
            self._connect(setup)

    def _connect(self, setup: CommSetup) -> None:
        address = urlsplit(setup.init_method)
        if not address.hostname or not address.port:
            raise EngineError(
                f"`init_method` is {setup.init_method!r}",
                field="init_method",
                value=setup.init_method,
                remedy="give tcp://HOST:PORT",
            )
        timeout = timedelta(seconds=setup.timeout_s)
        try:
            store = c10d.TCPStore(address.hostname, address.port, self.size, self.rank == 0, timeout, False)
            _join(store, self.rank, self.size, setup.timeout_s)
            named = c10d.PrefixStore("minisgl", store)
            own = _own_address(address.hostname, address.port)
            self.group = self._nccl(named, timeout) if self._device.type == "cuda" else self._gloo(named, timeout, own)
            self.barrier()
        except RuntimeError as error:
            raise EngineError(
                f"rank {self.rank} of {self.size} could not reach the others at {setup.init_method}: {error}",
                field="distributed_port",
                value=setup.init_method,
                remedy="check that every rank was started with the same port and that the port is free",
            ) from error

    def _gloo(self, store: Any, timeout: timedelta, own_address: str) -> Any:
        settings = c10d.ProcessGroupGloo._Options()
        settings._timeout = timeout
        # By address: the default looks the host's own name up, which sandboxes often cannot.
        settings._devices = [c10d.ProcessGroupGloo.create_device(hostname=own_address)]
        return c10d.ProcessGroupGloo(store, self.rank, self.size, settings)

    def _nccl(self, store: Any, timeout: timedelta) -> Any:
        settings = c10d.ProcessGroupNCCL.Options()
        settings._timeout = timeout
        return c10d.ProcessGroupNCCL(store, self.rank, self.size, settings)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            torch.ops.minisgl_dist.all_reduce_(x, self._handle)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.minisgl_dist.all_gather(x, self._handle) if self.size > 1 else x

    def check_equal(self, what: str, digest: str) -> None:
        if self.size == 1:
            return
        raw = digest.encode()[:_DIGEST_BYTES].ljust(_DIGEST_BYTES, b"\0")
        mine = torch.frombuffer(bytearray(raw), dtype=torch.uint8)[None].to(self._device, torch.int32)
        rows = self.all_gather(mine).reshape(self.size, _DIGEST_BYTES).cpu()
        texts = [bytes(row.to(torch.uint8).tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
        if len(set(texts)) > 1:
            listing = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise EngineError(
                f"the ranks disagree about the {what}: {listing}",
                field=what,
                value=digest,
                remedy="start every rank with the same config, versions and plugins",
            )

    def barrier(self) -> None:
        if self.size > 1:
            self.group.allreduce([torch.zeros(1, device=self._device)]).wait()

    def close(self) -> None:
        self.group = None
