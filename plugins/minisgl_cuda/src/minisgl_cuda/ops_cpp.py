"""Ops backend ``cuda`` in CUDA C++: what runs between the matrix products, launched in a few microseconds."""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from .kernels import DEVICES, library
from .launch import Alive, CompiledLauncher, Kernel, Launcher, Run, Shape

if TYPE_CHECKING:
    from minisgl_core.plugin_api import OpsSetup, RopeStoreArgs

__all__ = ["ACT", "ADD_NORM", "INSTANCES", "NORM", "ROPE", "CompiledOps", "act_shape", "norm_shape", "rope_shape"]

_NORM_FIELDS = (
    *("out", "x", "residual", "weight"),
    *("out_step", "x_step", "residual_step", "width", "tokens", "eps"),
)
_EPS = frozenset({"eps"})
NORM: Final = Kernel("minisgl::rms_norm", _NORM_FIELDS, _EPS)
ADD_NORM: Final = Kernel("minisgl::add_rms_norm", _NORM_FIELDS, _EPS)
ACT: Final = Kernel("minisgl::act_and_mul", ("out", "x", "x_step", "width", "tokens", "blocks_per_row"))
ROPE: Final = Kernel(
    "minisgl::qk_norm_rope_store",
    (
        *("qkv", "q_weight", "k_weight", "positions", "cos_sin", "k_cache", "v_cache", "out_loc"),
        *("qkv_step", "angle_step", "k_slot_step", "k_head_step", "v_slot_step", "v_head_step"),
        *("q_heads", "kv_heads", "width", "rotary", "tokens", "blocks_per_token", "eps"),
    ),
    _EPS,
)

BYTES: Final = 16
"""Of a piece: what a thread moves at a time where everything is a multiple of it, else single elements."""
INSTANCES: Final = {
    torch.bfloat16: ("minisgl::BFloat16, 8", "minisgl::BFloat16, 1"),
    torch.float16: ("minisgl::Float16, 8", "minisgl::Float16, 1"),
    torch.float32: ("float, 4", "float, 1"),
}
"""Template arguments: by pieces, by elements."""

WARP: Final = 32
BLOCK: Final = 256
WIDE_BLOCK: Final = 512
HELD: Final = 4
"""Pieces of a row that one thread of a norm keeps in registers"""
HEADS: Final = 16
"""Heads of one block, at most"""
SPREAD: Final = 256
"""Rows up to which the threads of a row are many and have little to do each: small batches are bound by latency."""


def _parts(total: int, of: int) -> int:
    """How many parts of this size hold ``total``."""
    return -(-total // of)


@lru_cache(maxsize=1024)
def norm_shape(tokens: int, pieces: int) -> Shape:
    """Whole warps for each row."""
    per_thread = 1 if tokens <= SPREAD else HELD
    lanes = min(WIDE_BLOCK, _parts(pieces, WARP * per_thread) * WARP)
    rows = max(1, min(BLOCK // lanes, tokens // SPREAD))
    return Shape(_parts(tokens, rows), lanes, rows)


@lru_cache(maxsize=1024)
def act_shape(tokens: int, pieces: int) -> tuple[Shape, int]:
    """Rows are cut into parts or share a block; the second number is the blocks of one row."""
    per_thread = 1 if tokens <= SPREAD else 2
    parts = _parts(pieces, BLOCK * per_thread)
    lanes = _parts(pieces, WARP * per_thread * parts) * WARP
    rows = max(1, min(BLOCK // lanes, tokens // SPREAD)) if parts == 1 else 1
    return Shape(_parts(tokens, rows) * parts, lanes, rows), parts


@lru_cache(maxsize=1024)
def rope_shape(tokens: int, heads: int, pairs: int) -> tuple[Shape, int]:
    """A power of two of threads for each head, up to a warp; the second number is the blocks of one token."""
    lanes = min(WARP, 1 << (pairs - 1).bit_length())
    whole = WARP // lanes  # heads that fill a warp
    most = max(whole, min(HEADS, BLOCK // lanes))
    parts = _parts(heads, most)
    rows = _parts(_parts(heads, parts), whole) * whole
    return Shape(tokens * parts, lanes, rows), parts


class Instances(NamedTuple):
    """One kernel for one dtype."""

    size: int
    """Bytes of an element"""
    pieces: Run
    elements: Run


class Standing(NamedTuple):
    """What the calls of one layer's ``qk_norm_rope_store`` share: tensors that stay where they are as long as the
    backend lives, and what follows from them.
    """

    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    cos_sin: torch.Tensor
    v_cache: torch.Tensor
    size: int
    """Bytes of an element"""
    joint: int
    """The united bits of all their addresses and lengths in bytes."""
    gains: tuple[int, int]
    tables: tuple[int, int, int]
    """Addresses of ``cos_sin`` and the caches"""
    steps: tuple[int, int, int, int, int]
    """Rows of ``cos_sin``; slots and heads of the caches"""
    kv_heads: int
    width: int
    rotary: int
    pieces: tuple[Run, int]
    elements: tuple[Run, int]
    """With how many of them a head's half has to pair up or copy."""

    def is_for(
        self,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        cos_sin: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> bool:
        """Do these go with the same k cache as before?"""
        return (
            self.v_cache is v_cache
            and self.q_weight is q_weight
            and self.k_weight is k_weight
            and self.cos_sin is cos_sin
        )


class Prepared(NamedTuple):
    """The kernels of one backend, and its layers."""

    norm: dict[torch.dtype, Instances]
    add_norm: dict[torch.dtype, Instances]
    rope: dict[torch.dtype, Instances]
    act: dict[torch.dtype, Instances]
    standing: dict[int, Standing]
    """By the ``id`` of the k cache; an entry ends with that tensor."""


_PREPARED: Alive[Prepared] = Alive()


def _rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, number: int) -> None:
    tokens, width = x.shape
    if not tokens:
        return
    size, run, elements = _PREPARED.find(number).norm[x.dtype]
    to, at, gains = out.data_ptr(), x.data_ptr(), weight.data_ptr()
    out_step, step, pieces = out.stride()[0], x.stride()[0], width * size // BYTES
    if (to | at | gains | (out_step | step | width) * size) % BYTES:
        run, pieces = elements, width
    values = (to, at, 0, gains, out_step, step, 0, width, tokens, eps)
    run(norm_shape(tokens, pieces), (out, x, None, weight), values)


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, number: int) -> None:
    tokens, width = x.shape
    if not tokens:
        return
    size, run, elements = _PREPARED.find(number).add_norm[x.dtype]
    at, to, gains = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
    step, residual_step, pieces = x.stride()[0], residual.stride()[0], width * size // BYTES
    if (at | to | gains | (step | residual_step | width) * size) % BYTES:
        run, pieces = elements, width
    values = (at, at, to, gains, step, step, residual_step, width, tokens, eps)
    run(norm_shape(tokens, pieces), (x, x, residual, weight), values)


def _act_and_mul(out: torch.Tensor, x: torch.Tensor, number: int) -> None:
    tokens, width = out.shape
    if not tokens:
        return
    size, run, elements = _PREPARED.find(number).act[x.dtype]
    to, at, step, pieces = out.data_ptr(), x.data_ptr(), x.stride()[0], width * size // BYTES
    if (to | at | (step | width) * size) % BYTES:
        run, pieces = elements, width
    shape, parts = act_shape(tokens, pieces)
    run(shape, (out, x), (to, at, step, width, tokens, parts))


def _qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_loc: torch.Tensor,
    number: int,
) -> None:
    tokens, row = qkv.shape
    if not tokens:
        return
    prepared = _PREPARED.find(number)
    own = prepared.standing.get(id(k_cache))
    if own is None or not own.is_for(q_weight, k_weight, cos_sin, v_cache):
        own = _standing(prepared.rope[qkv.dtype], q_weight, k_weight, cos_sin, k_cache, v_cache)
        prepared.standing[id(k_cache)] = own
        # Its id may be another tensor's afterwards. And a pool that was only tried out must not live on here.
        weakref.finalize(k_cache, prepared.standing.pop, id(k_cache), None)
    at, step, (run, pairs) = qkv.data_ptr(), qkv.stride()[0], own.pieces
    if (own.joint | at | step * own.size) % BYTES:
        run, pairs = own.elements
    heads = row // own.width
    shape, parts = rope_shape(tokens, heads, pairs)
    tensors = (qkv, q_weight, k_weight, positions, cos_sin, k_cache, v_cache, out_loc)
    angles, k_at, v_at = own.tables
    # fmt: off
    run(shape, tensors, (
        at, *own.gains, positions.data_ptr(), angles, k_at, v_at, out_loc.data_ptr(),
        step, *own.steps,
        heads - 2 * own.kv_heads, own.kv_heads, own.width, own.rotary, tokens, parts, eps,
    ))
    # fmt: on


def _standing(
    kernels: Instances,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> Standing:
    size, (_, _, kv_heads, width), half = kernels.size, k_cache.shape, cos_sin.shape[1] // 2
    gains = (0, 0) if q_weight is None or k_weight is None else (q_weight.data_ptr(), k_weight.data_ptr())
    tables = (cos_sin.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr())
    _, k_slot, k_head, _ = k_cache.stride()
    _, v_slot, v_head, _ = v_cache.stride()
    angle_step, rest = cos_sin.stride()[0], width - half
    joint = gains[0] | gains[1] | tables[0] | tables[1] | tables[2] | angle_step * 4
    joint |= (width | half | k_slot | k_head | v_slot | v_head) * size
    return Standing(
        *(q_weight, k_weight, cos_sin, v_cache),
        size,
        joint,
        gains,
        tables,
        (angle_step, k_slot, k_head, v_slot, v_head),
        kv_heads,
        width,
        2 * half,
        (kernels.pieces, rest * size // BYTES),
        (kernels.elements, rest),
    )


_RMS_NORM = library.register(
    "cpp_rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps, int number) -> ()", _rms_norm, DEVICES
)
_ADD_RMS_NORM = library.register(
    "cpp_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps, int number) -> ()",
    _add_rms_norm,
    DEVICES,
)
_QK_NORM_ROPE_STORE = library.register(
    "cpp_qk_norm_rope_store(Tensor(a!) qkv, Tensor? q_weight, Tensor? k_weight, float eps, Tensor positions, "
    "Tensor cos_sin, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor out_loc, int number) -> ()",
    _qk_norm_rope_store,
    DEVICES,
)
_ACT_AND_MUL = library.register("cpp_act_and_mul(Tensor(a!) out, Tensor x, int number) -> ()", _act_and_mul, DEVICES)


class CompiledOps:
    """float32 inside; all tensors but angles and integers are of one dtype. x, residual and qkv are overwritten where
    the protocol allows it.

    ``launcher``: what runs the kernels; by default they are compiled for the platform's GPU.
    """

    def __init__(self, setup: OpsSetup, options: object = None, *, launcher: Launcher | None = None) -> None:
        if launcher is None:
            if setup.platform is None:
                raise ValueError("ops:cuda launches on the platform's stream; OpsSetup.platform is None")
            launcher = CompiledLauncher(setup.platform)
        self._number = _PREPARED.add(self, _prepare(launcher))
        self._all_reduce = setup.comm.all_reduce
        self._split = (setup.q_heads, setup.kv_heads, setup.kv_heads)
        self._heads, self._dim = setup.q_heads + 2 * setup.kv_heads, setup.head_dim

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x (T, N) -> new (T, N)."""
        out = torch.empty_like(x)
        _RMS_NORM(out, x, weight, eps, self._number)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual += x`` and ``x = rms_norm(residual)``, both in place; returns (x, residual)."""
        _ADD_RMS_NORM(x, residual, weight, eps, self._number)
        return x, residual

    def allreduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`add_rms_norm` of x summed over the ranks."""
        x = self._all_reduce(x)
        _ADD_RMS_NORM(x, residual, weight, eps, self._number)
        return x, residual

    def qk_norm_rope_store(
        self, qkv: torch.Tensor, args: RopeStoreArgs, positions: torch.Tensor, out_loc: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv (T, (H+2K)*D), changed in place; returns its q (T, H, D), k and v (T, K, D) as views."""
        q_weight, k_weight, eps, cos_sin, k_cache, v_cache = args
        _QK_NORM_ROPE_STORE(qkv, q_weight, k_weight, eps, positions, cos_sin, k_cache, v_cache, out_loc, self._number)
        q, k, v = qkv.view(qkv.shape[0], self._heads, self._dim).split_with_sizes(self._split, 1)
        return q, k, v

    def act_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, 2I) -> new (T, I)."""
        tokens, width = x.shape
        out = x.new_empty((tokens, width // 2))
        _ACT_AND_MUL(out, x, self._number)
        return out

    def close(self) -> None:
        """Let go of the layers' tensors."""
        _PREPARED.find(self._number).standing.clear()


def _prepare(launcher: Launcher) -> Prepared:
    def instances(kernel: Kernel) -> dict[torch.dtype, Instances]:
        return {
            dtype: Instances(dtype.itemsize, *(launcher.prepare(kernel, arguments) for arguments in both))
            for dtype, both in INSTANCES.items()
        }

    return Prepared(instances(NORM), instances(ADD_NORM), instances(ROPE), instances(ACT), {})
