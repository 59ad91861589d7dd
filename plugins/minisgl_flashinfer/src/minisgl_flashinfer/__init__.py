"""minisgl-flashinfer: FlashInfer attention and sampling for minisgl."""
