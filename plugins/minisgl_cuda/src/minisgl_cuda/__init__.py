"""minisgl-cuda: what every NVIDIA backend of minisgl needs."""
