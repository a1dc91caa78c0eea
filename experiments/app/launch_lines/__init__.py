"""Settings from the command line that starts a server of vLLM, SGLang or TensorRT-LLM."""
