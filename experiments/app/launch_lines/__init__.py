"""Settings from the command line with which somebody starts vLLM, SGLang or TensorRT-LLM."""
