"""What this plugin offers. Every minisgl command imports this module, so it imports nothing heavy: no torch."""

from minisgl_core.plugin_api import ANY, BackendSpec, Caps, PluginInfo, hookimpl

MINISGL_PLUGIN = PluginInfo(name="blocked", api={"attention": ">=1,<2"})

SPEC = BackendSpec(
    role="attention",
    name="blocked",
    factory="minisgl_blocked.attention:Blocked",
    caps=(
        Caps(  # what is not declared is not supported, and never asked of the class
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
    """Asked once, at start-up; the class is imported when it is chosen."""
    return [SPEC]
