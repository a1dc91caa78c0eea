"""Prints the statistics of a trace as the two config files of `workload=azure_conv_like`.

    python -m experiments.calibrate.workload_stats azure_2023_conv.csv.gz

This command printed configs/workload/arrivals/azure_conv_2023.yaml (the request rate of each minute) and
configs/workload/lengths/azure_conv_2023.yaml (quantiles of prompt and output lengths, and their rank
correlation).
"""

import argparse
import textwrap
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from scipy import stats

from sim.workload.formats import AzureCsv

# Steps of 2.5 %, finer in the tails: the longest 1 % of prompts hold many of the tokens.
PROBABILITIES = [0.0, 0.01, *(round(i / 40, 3) for i in range(1, 40)), 0.99, 0.999, 1.0]

CITATION = """\
# Statistics of the Azure LLM inference trace 2023, conversation.
# Source: github.com/Azure/AzurePublicDataset, CC-BY-4.0. Cite: Patel et al., "Splitwise: Efficient
# generative LLM inference using phase splitting", ISCA 2024.
# Printed by experiments/calibrate/workload_stats.py.
"""


def main() -> None:
    """Prints the statistics of a trace in the Azure CSV format as YAML."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="a trace in the Azure CSV format")
    for name, text in extract(parser.parse_args().trace).items():
        print(f"--- {name}\n{text}")


def extract(trace: Path) -> dict[str, str]:
    """Returns {file name below configs/workload: its text} for a trace in the Azure CSV format."""
    arrivals = list(AzureCsv(path=trace).source(seed=0, max_model_len=2**31).arrivals())
    arrival_s = np.array([arrival.request.arrival_s for arrival in arrivals])
    prompts = np.array([arrival.request.prompt.num_tokens for arrival in arrivals])
    outputs = np.array([arrival.num_output_tokens for arrival in arrivals])
    return {
        "arrivals/azure_conv_2023.yaml": _arrivals_yaml(arrival_s),
        "lengths/azure_conv_2023.yaml": _lengths_yaml(prompts, outputs),
    }


def _arrivals_yaml(arrival_s: np.ndarray) -> str:
    minutes = np.bincount((arrival_s // 60).astype(int)).astype(float)
    last_minute_s = arrival_s[-1] % 60  # the trace ends within its last minute
    minutes[-1] *= 60 / last_minute_s
    return (
        f"{CITATION}_target_: sim.workload.arrivals.PerMinute\n"
        "rate_scale: 1.0  # factor on the request rate\n"
        f"{_yaml_list('requests_per_minute', (f'{count:.4g}' for count in minutes))}"
    )


def _lengths_yaml(prompts: np.ndarray, outputs: np.ndarray) -> str:
    text = f"{CITATION}_target_: sim.workload.distributions.Lengths\n"
    text += f"rank_correlation: {stats.spearmanr(prompts, outputs).statistic:.4f}\n"
    for name, tokens in (("prompt_tokens", prompts), ("output_tokens", outputs)):
        quantiles = np.quantile(tokens, PROBABILITIES)
        text += f"{name}:\n  _target_: sim.workload.distributions.Quantiles\n"
        text += _yaml_list("probabilities", (f"{p:g}" for p in PROBABILITIES), indent="  ")
        text += _yaml_list("values", (f"{value:.6g}" for value in quantiles), indent="  ")
    return text


def _yaml_list(key: str, numbers: Iterable[str], indent: str = "") -> str:
    lines = textwrap.fill(
        ", ".join(numbers), 105, initial_indent=f"{indent}  ", subsequent_indent=f"{indent}  "
    )
    return f"{indent}{key}: [\n{lines}\n{indent}]\n"


if __name__ == "__main__":
    main()
