"""minisgl-fa: FlashAttention 3, 4 and 2 for minisgl."""
