"""Answers calls to a peer: run by the interpreter of the peer's environment, which has nothing of ours.

Reads a JSON object per line from standard input: the arguments of a prediction. Writes one per line: the
figures, CPU seconds (without the start of the process) and, if there is none, the peer's reason.

    python peer_program.py NAME      NAME: a key of `PEERS`
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from typing import Any


def aisimulate(config: dict[str, Any]) -> dict[str, Any]:
    """Replays the traffic of a configuration; returns the summary of AISimulate."""
    predict, package = import_module("aisimulate.predict"), import_module("aisimulate")
    found = predict.run_prediction(
        package.CorePredictionConfig.model_validate(config),
        stack="engine",
        runner_factory=package.EngineReplayRunnerFactory(),
    )
    if found.summary.get("prediction_status") == "invalid":
        raise ValueError(found.summary["diagnostic"])
    return dict(found.summary)


def aiconfigurator(arguments: dict[str, Any]) -> dict[str, Any]:
    """Estimates one configuration; returns TTFT and TPOT in ms, as `aiconfigurator cli estimate` does."""
    found = import_module("aiconfigurator.cli.api").cli_estimate(**arguments)
    return {"ttft": float(found.ttft), "tpot": float(found.tpot), "version": found.backend_version}


PEERS = {"aisimulate": aisimulate, "aiconfigurator": aiconfigurator}


def main() -> None:
    """Answers the calls of standard input; whatever the peer prints goes to standard error."""
    call = PEERS[sys.argv[1]]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        began = time.process_time()
        try:
            answer["figures"] = call(json.loads(line))
        except Exception as error:  # whatever a peer raises is its refusal
            answer["refusal"] = f"{type(error).__name__}: {error}"
        answer["cpu_s"] = time.process_time() - began
        print(json.dumps(answer, default=str), file=answers, flush=True)


if __name__ == "__main__":
    main()
