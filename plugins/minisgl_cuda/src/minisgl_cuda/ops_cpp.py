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
    *("out_stride", "x_stride", "residual_stride", "width", "tokens", "eps"),
)
_EPS = frozenset({"eps"})
NORM: Final = Kernel("minisgl::rms_norm", _NORM_FIELDS, _EPS)
ADD_NORM: Final = Kernel("minisgl::add_rms_norm", _NORM_FIELDS, _EPS)
ACT: Final = Kernel("minisgl::act_and_mul", ("out", "x", "x_stride", "width", "tokens", "blocks_per_row"))
ROPE: Final = Kernel(
    "minisgl::qk_norm_rope_store",
    (
        *("qkv", "q_weight", "k_weight", "positions", "cos_sin", "k_cache", "v_cache", "out_loc"),
        *("qkv_stride", "angle_stride", "k_slot_stride", "k_head_stride", "v_slot_stride", "v_head_stride"),
        *("q_heads", "kv_heads", "width", "rotary", "tokens", "blocks_per_token", "eps"),
    ),
    _EPS,
)

BYTES: Final = 16
"""Size of a vector: what one thread moves at a time where addresses, strides and widths are multiples of it; single
elements otherwise."""
INSTANCES: Final = {
    torch.bfloat16: ("minisgl::BFloat16, 8", "minisgl::BFloat16, 1"),
    torch.float16: ("minisgl::Float16, 8", "minisgl::Float16, 1"),
    torch.float32: ("float, 4", "float, 1"),
}
"""Template arguments by dtype: for vectors, for single elements."""

WARP: Final = 32
BLOCK: Final = 256
WIDE_BLOCK: Final = 512
HELD: Final = 4
"""Vectors of a row that one thread of a norm keeps in registers."""
HEADS: Final = 16
"""Most heads of one block."""
SPREAD: Final = 256
"""Up to this number of rows each row gets many threads with little work each: small batches are bound by latency."""


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@lru_cache(maxsize=1024)
def norm_shape(tokens: int, vectors: int) -> Shape:
    """Launch shape of a norm: whole warps for each row."""
    per_thread = 1 if tokens <= SPREAD else HELD
    lanes = min(WIDE_BLOCK, ceil_div(vectors, WARP * per_thread) * WARP)
    rows = max(1, min(BLOCK // lanes, tokens // SPREAD))
    return Shape(ceil_div(tokens, rows), lanes, rows)


@lru_cache(maxsize=1024)
def act_shape(tokens: int, vectors: int) -> tuple[Shape, int]:
    """Launch shape of the activation, and the number of blocks per row: long rows are cut, short ones share a block."""
    per_thread = 1 if tokens <= SPREAD else 2
    parts = ceil_div(vectors, BLOCK * per_thread)
    lanes = ceil_div(vectors, WARP * per_thread * parts) * WARP
    rows = max(1, min(BLOCK // lanes, tokens // SPREAD)) if parts == 1 else 1
    return Shape(ceil_div(tokens, rows) * parts, lanes, rows), parts


@lru_cache(maxsize=1024)
def rope_shape(tokens: int, heads: int, pairs: int) -> tuple[Shape, int]:
    """Launch shape of the rotary kernel, and the number of blocks per token.

    Each head gets a power of two of threads, up to a warp.
    """
    lanes = min(WARP, 1 << (pairs - 1).bit_length())
    whole = WARP // lanes  # heads that fill a warp
    most = max(whole, min(HEADS, BLOCK // lanes))
    parts = ceil_div(heads, most)
    rows = ceil_div(ceil_div(heads, parts), whole) * whole
    return Shape(tokens * parts, lanes, rows), parts


class Instances(NamedTuple):
    """The compiled variants of one kernel for one dtype."""

    size: int
    """Bytes of an element."""
    vectors: Run
    elements: Run


class LayerConstants(NamedTuple):
    """What all calls of one layer's ``qk_norm_rope_store`` share, computed once.

    The addresses are constant for the lifetime of the backend, so a call reads only those of its own inputs.
    """

    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    cos_sin: torch.Tensor
    v_cache: torch.Tensor
    size: int
    """Bytes of an element."""
    align_bits: int
    """Bitwise or of all addresses and of all strides and widths in bytes: 0 in the low bits means aligned."""
    weights: tuple[int, int]
    """Addresses of ``q_weight`` and ``k_weight``; 0 = no norm."""
    tables: tuple[int, int, int]
    """Addresses of ``cos_sin``, the k cache and the v cache."""
    strides: tuple[int, int, int, int, int]
    """In elements: a row of ``cos_sin``; a slot and a head of the k cache, and of the v cache."""
    kv_heads: int
    width: int
    rotary: int
    vectors: tuple[Run, int]
    elements: tuple[Run, int]
    """The kernel for single elements. The number in both is the pairs of one head, rotated or copied."""

    def is_for(
        self,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        cos_sin: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> bool:
        """True if these are the tensors that the constants were computed from."""
        return (
            self.v_cache is v_cache
            and self.q_weight is q_weight
            and self.k_weight is k_weight
            and self.cos_sin is cos_sin
        )


class Prepared(NamedTuple):
    """The kernels of one backend, and the constants of its layers."""

    norm: dict[torch.dtype, Instances]
    add_norm: dict[torch.dtype, Instances]
    rope: dict[torch.dtype, Instances]
    act: dict[torch.dtype, Instances]
    layers: dict[int, LayerConstants]
    """Keyed by the ``id`` of the k cache; an entry is removed with that tensor."""


_PREPARED: Alive[Prepared] = Alive()


def _rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, number: int) -> None:
    tokens, width = x.shape
    if not tokens:
        return
    size, run, elements = _PREPARED.find(number).norm[x.dtype]
    to, at, weights = out.data_ptr(), x.data_ptr(), weight.data_ptr()
    out_stride, step, vectors = out.stride()[0], x.stride()[0], width * size // BYTES
    if (to | at | weights | (out_stride | step | width) * size) % BYTES:
        run, vectors = elements, width
    values = (to, at, 0, weights, out_stride, step, 0, width, tokens, eps)
    run(norm_shape(tokens, vectors), (out, x, None, weight), values)


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, number: int) -> None:
    tokens, width = x.shape
    if not tokens:
        return
    size, run, elements = _PREPARED.find(number).add_norm[x.dtype]
    at, to, weights = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
    step, residual_stride, vectors = x.stride()[0], residual.stride()[0], width * size // BYTES
    if (at | to | weights | (step | residual_stride | width) * size) % BYTES:
        run, vectors = elements, width
    values = (at, at, to, weights, step, step, residual_stride, width, tokens, eps)
    run(norm_shape(tokens, vectors), (x, x, residual, weight), values)


def _act_and_mul(out: torch.Tensor, x: torch.Tensor, number: int) -> None:
    tokens, width = out.shape
    if not tokens:
        return
    size, run, elements = _PREPARED.find(number).act[x.dtype]
    to, at, step, vectors = out.data_ptr(), x.data_ptr(), x.stride()[0], width * size // BYTES
    if (to | at | (step | width) * size) % BYTES:
        run, vectors = elements, width
    shape, parts = act_shape(tokens, vectors)
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
    own = prepared.layers.get(id(k_cache))
    if own is None or not own.is_for(q_weight, k_weight, cos_sin, v_cache):
        own = _layer_constants(prepared.rope[qkv.dtype], q_weight, k_weight, cos_sin, k_cache, v_cache)
        prepared.layers[id(k_cache)] = own
        # Python may reuse the id for another tensor, and a pool that was made only to measure memory must be freed.
        weakref.finalize(k_cache, prepared.layers.pop, id(k_cache), None)
    at, step, (run, pairs) = qkv.data_ptr(), qkv.stride()[0], own.vectors
    if (own.align_bits | at | step * own.size) % BYTES:
        run, pairs = own.elements
    heads = row // own.width
    shape, parts = rope_shape(tokens, heads, pairs)
    tensors = (qkv, q_weight, k_weight, positions, cos_sin, k_cache, v_cache, out_loc)
    angles, k_at, v_at = own.tables
    # fmt: off
    run(shape, tensors, (
        at, *own.weights, positions.data_ptr(), angles, k_at, v_at, out_loc.data_ptr(),
        step, *own.strides,
        heads - 2 * own.kv_heads, own.kv_heads, own.width, own.rotary, tokens, parts, eps,
    ))
    # fmt: on


def _layer_constants(
    kernels: Instances,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> LayerConstants:
    size, (_, _, kv_heads, width), half = kernels.size, k_cache.shape, cos_sin.shape[1] // 2
    weights = (0, 0) if q_weight is None or k_weight is None else (q_weight.data_ptr(), k_weight.data_ptr())
    tables = (cos_sin.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr())
    _, k_slot, k_head, _ = k_cache.stride()
    _, v_slot, v_head, _ = v_cache.stride()
    angle_stride, rest = cos_sin.stride()[0], width - half
    align_bits = weights[0] | weights[1] | tables[0] | tables[1] | tables[2] | angle_stride * 4
    align_bits |= (width | half | k_slot | k_head | v_slot | v_head) * size
    return LayerConstants(
        *(q_weight, k_weight, cos_sin, v_cache),
        size,
        align_bits,
        weights,
        tables,
        (angle_stride, k_slot, k_head, v_slot, v_head),
        kv_heads,
        width,
        2 * half,
        (kernels.vectors, rest * size // BYTES),
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
    """Layer operations, computed in float32. All tensors except angles and integers have one dtype. ``x``, ``residual``
    and ``qkv`` are overwritten where the protocol allows it.

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
        """Release the tensors of all layers."""
        _PREPARED.find(self._number).layers.clear()


def _prepare(launcher: Launcher) -> Prepared:
    def instances(kernel: Kernel) -> dict[torch.dtype, Instances]:
        return {
            dtype: Instances(dtype.itemsize, *(launcher.prepare(kernel, arguments) for arguments in both))
            for dtype, both in INSTANCES.items()
        }

    return Prepared(instances(NORM), instances(ADD_NORM), instances(ROPE), instances(ACT), {})
