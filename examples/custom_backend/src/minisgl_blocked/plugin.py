"""The backends of this plugin. Every minisgl command imports this module, so it must not import torch."""

from minisgl_core.plugin_api import ANY, BackendSpec, Caps, PluginInfo, hookimpl

MINISGL_PLUGIN = PluginInfo(name="blocked", api={"attention": ">=1,<2"})

SPEC = BackendSpec(
    role="attention",
    name="blocked",
    factory="minisgl_blocked.attention:Blocked",
    caps=(
        Caps(  # whatever is not declared is unsupported, and the class never receives it
            devices=("cpu", "cuda"),
            sm=ANY,
            dtypes=("float32", "bfloat16", "float16"),
            kv_dtypes=("float32", "bfloat16", "float16"),
            head_dims=ANY,
            gqa_ratios=ANY,
            page_sizes=ANY,
            kv_layouts=("NHD",),
            phases=("prefill", "decode"),
            graph="decode",
            features=frozenset({"window"}),
        ),
    ),
    options="minisgl_blocked.options:BlockedOptions",
    summary="torch's fused attention, queries in blocks",
)


@hookimpl
def minisgl_attention_backends() -> list[BackendSpec]:
    """Called once at start-up. The class is imported only if the backend is chosen."""
    return [SPEC]
