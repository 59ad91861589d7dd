"""A fake ``flashinfer``: plan and run of its paged decode and prefill wrappers, ``fast_decode_plan``, sampling."""

from __future__ import annotations

from typing import Any, Final

import torch

from .checks import int32, refuse_unless_default, require
from .flashinfer_base import PlannedWrapper
from .flashinfer_sampling import sampling_from_probs, top_k_renorm_probs, top_p_renorm_probs

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "sampling_from_probs",
    "top_k_renorm_probs",
    "top_p_renorm_probs",
]

_CUDA_CORE_RATIOS: Final = (1, 2, 3, 4, 6, 8)
_CTAS: Final = 2 * 132
"""Blocks that the planner aims for on an H200: two per multiprocessor."""
_UNUSED_RUN: Final[dict[str, object]] = dict.fromkeys(
    ("q_scale", "k_scale", "v_scale", "sinks", "skip_softmax_threshold_scale_factor", "kv_cache_sf")
)


class BatchDecodeWithPagedKVCacheWrapper(PlannedWrapper):
    """One query per row; it sees all keys, or those that ``window_left`` leaves."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        refuse_unless_default("decode wrapper", {"jit_args": None}, locals())
        require(backend in ("auto", "fa2", "fa3"), f"the fake decode wrapper has no backend {backend!r}")
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._use_tensor_cores = use_tensor_cores
        self._pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if use_cuda_graph:
            fixed = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            self._pages = _fixed_buffers(*fixed)

    @property
    def use_tensor_cores(self) -> bool:
        """True if it runs on the prefill kernel."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        """The optional arguments are keywords, as in the real one."""
        require(not deprecated_positional_args, "pass optional arguments of plan() by keyword")
        geometry = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan_impl(indptr, indices, last_page_len, *geometry, **kwargs)

    def _plan_impl(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        unused = dict.fromkeys(("o_data_type", "data_type", "rope_scale", "rope_theta", "block_tables", "seq_lens"))
        refuse_unless_default(
            "decode plan()", {**unused, "window_right": 0, "fixed_split_size": None, "q_len_per_req": 1}, locals()
        )
        self._check_geometry(len(last_page_len), num_qo_heads, num_kv_heads, head_dim, disable_split_kv)
        self._check_pages(indptr, indices, last_page_len, page_size)
        self._pages = _placed(
            self._pages if self._use_cuda_graph else None, indptr, indices, last_page_len, self.device
        )
        self._write_plan(torch.arange(len(indptr), dtype=torch.int32), indptr.cpu())
        facts = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left, "sm_scale": sm_scale}
        dtypes = {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "logits_soft_cap": logits_soft_cap}
        self._keep(num_qo_heads, num_kv_heads, head_dim, page_size, **facts, **dtypes)

    def _check_geometry(self, rows: int, q_heads: int, kv_heads: int, head_dim: int, disable_split_kv: bool) -> None:
        ratio = q_heads // kv_heads
        if not self._use_tensor_cores:
            fits = ratio in _CUDA_CORE_RATIOS
            require(fits, f"the CUDA-core kernel has no group size {ratio}; use_tensor_cores=True has")
        elif self._use_cuda_graph:
            require(not disable_split_kv, "a graph's tiles past the last row have no mask with disable_split_kv")
            tile = 16 if ratio <= 16 else 64 if ratio <= 64 else 128
            tiles = max(_CTAS // kv_heads, -(-rows * ratio // tile) + rows - 1)
            size, there = q_heads * tiles * tile * (head_dim + 1) * 4, self._float_workspace_buffer.numel()
            require(size <= there, f"partial results of {rows} rows need {size} bytes of workspace, there are {there}")

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """q (B, H, D) -> ``out`` or a new tensor of its shape; with ``return_lse`` also the base-2 logsumexp (B, H)."""
        refuse_unless_default("decode run()", {**_UNUSED_RUN, "q_len_per_req": None, "args": ()}, locals())
        require(self._plan is not None and self._pages is not None, "run() before plan()")
        assert self._pages is not None
        return self._run(q, paged_kv_cache, self._pages, out, lse, return_lse, window_left)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Plan without changing the fixed buffers; only after a first ``plan()``."""
    unused = dict.fromkeys(("data_type", "rope_scale", "rope_theta", "fixed_split_size"))
    refuse_unless_default("fast_decode_plan", {**unused, "q_len_per_req": 1}, locals())
    require(self._plan is not None, "fast_decode_plan() before the first plan(), which loads the kernel")
    require(self._use_cuda_graph, "the fake fast_decode_plan serves wrappers with fixed buffers only")
    assert self._pages is not None
    host = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    for name, tensor in (("indptr", host), ("indices", indices), ("last_page_len", last_page_len)):
        int32(name, tensor)
    rows = len(self._pages[2])
    require(len(last_page_len) == rows, f"{len(last_page_len)} rows for a wrapper of {rows}")
    require(len(indices) <= len(self._pages[1]), "more pages than the fixed buffer holds")
    self._check_geometry(rows, num_qo_heads, num_kv_heads, head_dim, disable_split_kv)
    self._write_plan(torch.arange(rows + 1, dtype=torch.int32), host)
    facts = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left, "sm_scale": sm_scale}
    dtypes = {"q_data_type": q_data_type or "float16", "kv_data_type": kv_data_type, "logits_soft_cap": logits_soft_cap}
    self._keep(num_qo_heads, num_kv_heads, head_dim, page_size, **facts, **dtypes)


class BatchPrefillWithPagedKVCacheWrapper(PlannedWrapper):
    """The last tokens of each row against all of its keys."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        unused = dict.fromkeys(("custom_mask_buf", "mask_indptr_buf", "jit_args", "jit_kwargs"))
        refuse_unless_default("prefill wrapper", {**unused, "use_cuda_graph": False}, locals())
        require(backend in ("auto", "fa2", "fa3"), f"the fake prefill wrapper has no backend {backend!r}")
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph)
        self._pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """``qo_indptr`` (B+1) counts query tokens, ``paged_kv_indptr`` (B+1) pages."""
        names = ("head_dim_vo", "custom_mask", "packed_custom_mask", "rope_scale", "rope_theta", "o_data_type")
        items = ("prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr", "seq_lens", "seq_lens_q")
        sizes = ("block_tables", "max_token_per_sequence", "max_sequence_kv", "fixed_split_size")
        unused = dict.fromkeys((*names, *items, *sizes))
        refuse_unless_default("prefill plan()", {**unused, "token_pos_in_items_len": 0}, locals())
        int32("qo_indptr", qo_indptr)
        require(len(qo_indptr) == len(paged_kv_indptr), f"{len(qo_indptr)} and {len(paged_kv_indptr)} offsets")
        self._check_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._pages, self.causal = _placed(None, *pages, self.device), causal
        self._write_plan(qo_indptr.cpu(), paged_kv_indptr.cpu())
        facts = {"pos_encoding_mode": pos_encoding_mode, "window_left": window_left, "sm_scale": sm_scale}
        dtypes = {"q_data_type": q_data_type, "kv_data_type": kv_data_type, "logits_soft_cap": logits_soft_cap}
        self._keep(num_qo_heads, num_kv_heads, head_dim_qk, page_size, **facts, **dtypes)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """q (T, H, D) -> ``out`` or a new tensor of its shape; with ``return_lse`` also the base-2 logsumexp (T, H)."""
        others = {"use_fp16_softmax": None, "uses_spcompress": None, "args": ()}
        refuse_unless_default("prefill run()", {**_UNUSED_RUN, **others}, locals())
        require(self._plan is not None and self._pages is not None, "run() before plan()")
        assert self._pages is not None
        return self._run(q, paged_kv_cache, self._pages, out, lse, return_lse, window_left)


def _fixed_buffers(
    indptr: torch.Tensor | None, indices: torch.Tensor | None, last_page_len: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if indptr is None or indices is None or last_page_len is None:
        raise ValueError("with use_cuda_graph the wrapper needs all three page buffers")
    for name, tensor in (("indptr", indptr), ("indices", indices), ("last_page_len", last_page_len)):
        int32(f"the {name} buffer", tensor)
    if len(indptr) != len(last_page_len) + 1:
        raise ValueError(f"an indptr buffer of {len(indptr)} for {len(last_page_len)} rows")
    return indptr, indices, last_page_len


def _placed(
    fixed: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The page list on the device: in the fixed buffers if there are any."""
    if fixed is None:
        return indptr.to(device), indices.to(device), last_page_len.to(device)
    if len(last_page_len) != len(fixed[2]):
        raise ValueError(f"{len(last_page_len)} rows for a wrapper with buffers of {len(fixed[2])}")
    if len(indices) > len(fixed[1]):
        raise ValueError(f"{len(indices)} pages for a buffer of {len(fixed[1])}")
    fixed[0].copy_(indptr)
    fixed[1][: len(indices)].copy_(indices)
    fixed[2].copy_(last_page_len)
    return fixed
