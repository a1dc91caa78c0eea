"""Texts that several claims quote."""

from experiments.reproduce.rows import Source

BOOK = Source(
    "Huyen, AI Engineering, O'Reilly 2025, chapter 9 (summaries and excerpts were read, not the book)",
    was_read=True,
)
QUOTED_BOOK = Source("Huyen, AI Engineering, O'Reilly 2025, chapter 9")
"""Source of figures of the same book that none of these excerpts has."""
PAGED_ATTENTION = Source(
    "Kwon et al., PagedAttention, SOSP 2023, abstract", "https://arxiv.org/abs/2309.06180", was_read=True
)
VLLM_BLOG = Source(
    "vLLM's blog, vLLM: Easy, Fast, and Cheap LLM Serving with PagedAttention, June 2023",
    "https://blog.vllm.ai/2023/06/20/vllm.html",
    was_read=True,
)
PROMPT_CACHING = Source(
    "Anthropic, Prompt caching with Claude, August 2024, table of use cases",
    "https://www.anthropic.com/news/prompt-caching",
    was_read=True,
)
ANYSCALE_METRICS = Source(
    "Anyscale, Reproducible Performance Metrics for LLM inference, November 2023, summary",
    "https://www.anyscale.com/blog/reproducible-performance-metrics-for-llm-inference",
    was_read=True,
)
FLASH_DECODING_PP = Source(
    "Hong et al., FlashDecoding++, MLSys 2024, abstract (copies were read)",
    "https://arxiv.org/abs/2311.01282",
    was_read=True,
)
PALM = Source(
    "Chowdhery et al., PaLM, 2022, section 4.1 (copies were read)",
    "https://arxiv.org/abs/2204.02311",
    was_read=True,
)
FLASH = Source(
    "Dao et al., FlashAttention, NeurIPS 2022, figure 1 (copies were read)",
    "https://arxiv.org/abs/2205.14135",
    was_read=True,
)
POPE = Source(
    "Pope et al., Efficiently scaling transformer inference, MLSys 2023, abstract and page 3",
    "https://arxiv.org/abs/2211.05102",
    was_read=True,
)
