"""The switch between original and rescaled RoPE where models are served: a plugin for vLLM, exact for each request."""
