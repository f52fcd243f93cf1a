"""Where to switch: needle retrieval with the original and with the long RoPE, length by length."""
