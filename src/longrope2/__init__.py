"""LongRoPE2: extend the context window of any RoPE language model and keep its short-context quality."""

__version__ = "0.1.0"
