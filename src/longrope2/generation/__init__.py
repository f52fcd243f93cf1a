"""The short/long switch in generation: original RoPE while a row fits the original window, rescaled beyond."""
