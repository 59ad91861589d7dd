"""minisgl-moe: fused mixture-of-experts execution for minisgl."""
