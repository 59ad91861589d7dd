"""What FlashInfer's two fake wrappers share: workspaces, the page list, the plan that a run reads, the run itself.

A plan is worked out in the wrapper's host staging memory and copied to its int workspace, as the real one does, and a
run reads it from there: wrappers that share a workspace spoil each other's plans here, too. A plan says how many query
tokens each row has and how many of its pages will be visited; a row that has grown since then misses its newest keys.
With ``FLASHINFER_DISABLE_JIT=1`` a plan raises :class:`MissingJITCacheError` for kernels that are not prebuilt.
float32 is accepted on top of what the real library takes, so that results can be compared exactly.
"""

from __future__ import annotations

import os
from typing import Any, Final

import torch

from .attend import planned_attention
from .checks import int32, require, same_device

__all__ = ["PlannedWrapper", "dtype_of"]

_INT_WORKSPACE_BYTES: Final = 8 << 20
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


def dtype_of(given: str | torch.dtype) -> torch.dtype:
    """``"float16"`` and ``torch.float16`` are both accepted."""
    dtype = getattr(torch, given) if isinstance(given, str) else given
    require(dtype in _DTYPES, f"{dtype} is not supported")
    found: torch.dtype = dtype
    return found


class MissingJITCacheError(RuntimeError):
    """The real library's error for a kernel that is not prebuilt if ``FLASHINFER_DISABLE_JIT`` is 1."""


def _load_kernel(head_dim: int, facts: dict[str, Any]) -> None:
    """Load a kernel. The fake has the usual cache of prebuilt kernels: head_dim 64 and 128 without
    window and soft cap.
    """
    plain = facts["window_left"] < 0 and not facts["logits_soft_cap"]
    if os.environ.get("FLASHINFER_DISABLE_JIT") == "1" and not (plain and head_dim in (64, 128)):
        raise MissingJITCacheError("JIT compilation is disabled and the cache lacks the module")


class PlannedWrapper:
    """One wrapper's state. T tokens, B rows, H query heads, K kv heads, D head_dim, S page_size."""

    causal = False

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, use_cuda_graph: bool) -> None:
        require(kv_layout in ("NHD", "HND"), f"kv_layout is {kv_layout!r}, it has NHD and HND")
        self._layout = kv_layout
        self._use_cuda_graph = use_cuda_graph
        self.device = float_workspace_buffer.device
        int_workspace = torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self.reset_workspace_buffer(float_workspace_buffer, int_workspace)
        self._plan: dict[str, Any] | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """True if batch size and buffers are fixed."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the device memory for partial results and for the plan, and the staging memory of the latter."""
        for name, buffer in (("float", float_workspace_buffer), ("int", int_workspace_buffer)):
            require(buffer.data_ptr() % 16 == 0, f"the {name} workspace must be aligned to 16 bytes")
        same_device(float_workspace=float_workspace_buffer, int_workspace=int_workspace_buffer)
        self._float_workspace_buffer, self._int_workspace_buffer = float_workspace_buffer, int_workspace_buffer
        self._staging = torch.empty(int_workspace_buffer.shape, dtype=torch.uint8)

    def _write_plan(self, starts: torch.Tensor, indptr: torch.Tensor) -> None:
        """Query prefix sum (B+1) and page prefix sum (B+1), on the host -> the int workspace."""
        for name, prefix in (("qo_indptr", starts), ("the page indptr", indptr)):
            require(prefix.device.type == "cpu", f"{name} is planned from on the host")
            require(bool((prefix.diff() >= 0).all()), f"{name} must not fall: {prefix.tolist()}")
        rows = torch.tensor([len(indptr) - 1], dtype=torch.int32)
        content = torch.cat((rows, starts, indptr.diff())).to(torch.int32)
        size = 4 * len(content)
        require(size <= self._staging.numel(), f"the plan needs {size} bytes of int workspace")
        self._staging[:size].view(torch.int32).copy_(content)
        self._int_workspace_buffer[:size].copy_(self._staging[:size])

    @staticmethod
    def _check_pages(indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> None:
        for name, tensor in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
            int32(name, tensor)
        require(len(indptr) == len(last_page_len) + 1, f"{len(indptr)} offsets for {len(last_page_len)} rows")
        require(bool((indptr.diff() > 0).all()), f"every row needs a page: {indptr.tolist()}")
        require(int(indptr[-1]) <= len(indices), f"indptr ends at {int(indptr[-1])}, there are {len(indices)} pages")
        lasts = last_page_len.tolist()
        require(all(0 < n <= page_size for n in lasts), f"last_page_len {lasts} is not within 1..{page_size}")

    def _keep(self, q_heads: int, kv_heads: int, head_dim: int, page_size: int, **facts: Any) -> None:
        require(q_heads % kv_heads == 0, f"{q_heads} query heads on {kv_heads} kv heads")
        _load_kernel(head_dim, facts)
        if facts["pos_encoding_mode"] != "NONE":
            raise NotImplementedError("the fake wrappers encode no positions")
        q_dtype = dtype_of(facts["q_data_type"])
        kv_dtype = q_dtype if facts["kv_data_type"] is None else dtype_of(facts["kv_data_type"])
        scale = head_dim**-0.5 if facts["sm_scale"] is None else facts["sm_scale"]
        self._plan = {
            "heads": (q_heads, head_dim),
            "cache": (page_size, kv_heads, head_dim),
            "dtypes": (q_dtype, kv_dtype),
            "scale": float(scale),
            "left": facts["window_left"],
            "softcap": float(facts["logits_soft_cap"] or 0.0),
        }

    def _run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        window_left: int | None,
    ) -> Any:
        plan = self._plan
        require(plan is not None, "run() before plan()")
        assert plan is not None
        k_cache, v_cache = self._caches(paged_kv_cache)
        require(tuple(q.shape[1:]) == plan["heads"], f"q is {tuple(q.shape)}, planned (T, H, D) with {plan['heads']}")
        require(tuple(k_cache.shape[1:]) == plan["cache"], f"pages {tuple(k_cache.shape[1:])}, planned {plan['cache']}")
        given = (q.dtype, k_cache.dtype)
        if given != plan["dtypes"]:
            raise ValueError(f"q and cache are {given}, planned {plan['dtypes']}")
        require(k_cache.stride() == v_cache.stride(), "one set of strides serves keys and values")
        require(q.stride(-1) == 1 and k_cache.stride(-1) == 1, "heads must be contiguous")
        require(window_left in (None, plan["left"]), f"window_left {window_left} was not planned")
        same_device(q=q, cache=k_cache, workspace=self._int_workspace_buffer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        require(out.shape == q.shape and out.dtype == q.dtype, "out must be like q")
        if return_lse and lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        memory = self._int_workspace_buffer.view(torch.int32)
        facts = (plan["scale"], self.causal, plan["left"], plan["softcap"])
        planned_attention(q, k_cache, v_cache, memory, *pages, *facts, out, lse)
        return (out, lse) if return_lse else out

    def _caches(self, paged: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each seen as (P, S, K, D)."""
        keys, values = paged if isinstance(paged, tuple) else paged.unbind(1)
        return (keys, values) if self._layout == "NHD" else (keys.transpose(1, 2), values.transpose(1, 2))
