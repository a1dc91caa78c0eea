"""Weights under the engine's own names, from safetensors, from GGUF or random: `realengine.weights.load`."""
