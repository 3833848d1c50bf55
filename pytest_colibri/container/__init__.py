"""Model containers: safetensors headers, expert geometry, weight formats, tiny models."""
