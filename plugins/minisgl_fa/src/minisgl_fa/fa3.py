"""FlashAttention 3 on Hopper: any page size, split-KV decode, packed GQA.

The kernels zero-fill what they load beyond a row's end, with one exception: prefill over pages that are a multiple of
its key block uses TMA, which loads whole pages. Their unused tail is multiplied by zero and must be finite.

Layers call the library's operator instead of its public functions, which add two layers of Python made for training.
These cost the host more than everything else in a layer (measured on an H200: 190 us per call).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from minisgl_core.plugin_api import CannotRun, Reason

from .base import FlashAttention

if TYPE_CHECKING:
    import torch

    from minisgl_core.plugin_api import AttentionSetup, BatchLike, LayerFacts

    from .options import FlashAttentionOptions

__all__ = ["FlashAttention3", "Operator"]

_UNPAGED = "attention:fa/unpaged"
_CALLS = "attention:fa/calls"
_UNBOUNDED = (-1, -1)
_NAMESPACES: Final = ("flash_attn_3_gpu", "flash_attn_3_cuda")
"""The library's names of its operators, newest first."""
_GIVEN: Final = (
    *("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "softmax_scale"),
    *("is_causal", "window_size_left", "window_size_right", "scheduler_metadata", "num_splits", "pack_gqa"),
)
"""The arguments of the operator that a call passes by name."""


class FlashAttention3(FlashAttention):
    """``flash_attn_interface``, on paged rows, or on the new rows alone if they are all keys of a pass."""

    def __init__(self, setup: AttentionSetup, options: FlashAttentionOptions | None = None) -> None:
        super().__init__(setup, options)
        self._library: Any = import_module("flash_attn_interface")
        self._operator = Operator(self._library)
        self._attend = self._operator.run
        self._kinds = tuple(dict.fromkeys(setup.layers))

    def prepare_metadata(self, batch: BatchLike) -> None:
        """Check whether no row of a prefill pass has a cached prefix; its keys then need not be read from the pool."""
        view = batch.view
        fresh = batch.phase == "prefill" and view.q_lens_host is not None and view.q_lens_host == view.kv_lens_host
        batch.scratch[_UNPAGED] = fresh and self._options.unpaged_prefill

    def update_metadata(self, batch: BatchLike) -> None:
        """Build the arguments of each layer's call other than q, k and v.

        Layers with the same facts share them, and those with the same window share a tile schedule.
        """
        unpaged = batch.scratch.get(_UNPAGED, False)
        schedules: dict[tuple[int, int], torch.Tensor] = {}
        calls = {}
        for facts in self._kinds:
            window = self._window_size(facts)
            if self._options.schedule_once and not unpaged and window not in schedules:
                schedules[window] = self._schedule(batch, window)
            rows = self._unpaged_rows(batch) if unpaged else self._paged_rows(batch, schedules.get(window))
            calls[facts] = self._operator.after_qkv(
                softmax_scale=facts.scale,
                window_size_left=window[0],
                window_size_right=window[1],
                pack_gqa=self._options.pack_gqa,
                **rows,
            )
        batch.scratch[_CALLS] = [calls[facts] for facts in self._layers]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: BatchLike
    ) -> torch.Tensor:
        """q (T, H, D) -> new (T, H, D); keys and values come from the pool unless the pass has all of them."""
        scratch = batch.scratch
        if not scratch.get(_UNPAGED):
            k, v = self._caches[layer_id]
        if batch.phase == "decode":
            q = q.unsqueeze(1)
        out: torch.Tensor = self._attend(q, k, v, *scratch[_CALLS][layer_id])[0]
        return out.squeeze(1) if batch.phase == "decode" else out

    def _unpaged_rows(self, batch: BatchLike) -> dict[str, Any]:
        view = batch.view
        return {
            "cu_seqlens_q": view.cu_q_device,
            "cu_seqlens_k": view.cu_q_device,
            "max_seqlen_q": view.max_q,
            "max_seqlen_k": view.max_q,
            "is_causal": True,
            "num_splits": self._num_splits(decode=False),
        }

    def _paged_rows(self, batch: BatchLike, schedule: torch.Tensor | None) -> dict[str, Any]:
        view, decode = batch.view, batch.phase == "decode"
        rows = {
            "seqused_k": view.kv_lens_device,
            "page_table": view.page_ids_device,
            "is_causal": not decode,  # the one query of a decode row sees every key
            "scheduler_metadata": schedule,
            "num_splits": self._num_splits(decode),
        }
        return rows if decode else {**rows, "cu_seqlens_q": view.cu_q_device, "max_seqlen_q": view.max_q}

    def _schedule(self, batch: BatchLike, window: tuple[int, int]) -> torch.Tensor:
        # Every argument must equal that of the call itself, or the schedule would be for another kernel.
        s, view = self._setup, batch.view
        decode = batch.phase == "decode"
        schedule: torch.Tensor = self._library.get_scheduler_metadata(
            view.kv_lens_device.shape[0],
            1 if decode else view.max_q,
            self._longest(view),
            s.q_heads,
            s.kv_heads,
            s.head_dim,
            view.kv_lens_device,
            qkv_dtype=s.dtype,
            cu_seqlens_q=None if decode else view.cu_q_device,
            page_size=view.page_size,
            causal=not decode,
            window_size=window,
            num_splits=self._num_splits(decode),
            pack_gqa=self._options.pack_gqa,
        )
        return schedule

    def _num_splits(self, decode: bool) -> int:
        return self._options.decode_num_splits if decode else self._options.prefill_num_splits

    def _window_size(self, facts: LayerFacts) -> tuple[int, int]:
        left = self._window(facts)
        return _UNBOUNDED if left is None else (left, 0)


class Operator:
    """The library's forward operator. Raises :class:`CannotRun` if the library has no such operator."""

    def __init__(self, library: Any) -> None:
        space = next((found for name in _NAMESPACES if (found := getattr(library, name, None)) is not None), None)
        self.run: Any = getattr(getattr(space, "fwd", None), "default", None)
        if self.run is None:
            raise _refusal("none")
        arguments = self.run._schema.arguments[3:]
        self._place = {argument.name: place for place, argument in enumerate(arguments)}
        self._defaults = [a.default_value if a.has_default_value() else None for a in arguments]
        if missing := [name for name in _GIVEN if name not in self._place]:
            raise _refusal(f"one without {', '.join(missing)}")

    def after_qkv(self, **given: Any) -> tuple[Any, ...]:
        """The arguments after q, k and v in a call.

        Operators are called by position, which is the fastest way, and versions differ in their number of arguments.
        The last argument given is the last one passed.
        """
        rest = list(self._defaults)
        for name, value in given.items():
            rest[self._place[name]] = value
        return tuple(rest[: 1 + max(self._place[name] for name in given)])


def _refusal(found: str) -> CannotRun:
    return CannotRun(
        Reason(
            code="requires",
            field="flash_attn_interface",
            wanted="the operator flash_attn_3.fwd",
            supported=found,
            fix="install a newer FlashAttention 3: one that registers its operators with torch",
        )
    )
