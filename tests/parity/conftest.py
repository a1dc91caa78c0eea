"""Before vLLM is imported: no look at the network, and no chatter for each of thousands of schedulers."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
