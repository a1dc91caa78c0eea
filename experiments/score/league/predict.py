"""Makes the kept predictions of a tool again: `python -m experiments.score.league.predict TOOL OUT [PYTHON]`.

TOOL is windtunnel or a peer. PYTHON is the interpreter of an environment that has the peer and nothing of
ours; `data/league/tools.csv` names the packages and versions:

    python3.11 -m venv peer
    peer/bin/pip install aisimulate==0.13.0.dev202610270000000085
    python -m experiments.score.league.predict aisimulate aisimulate.csv peer/bin/python

The file gets a row per row of the league: its id, the compared quantities, the CPU seconds, whether the tool
estimated operators that its tables lack, and a status: ok, or the reason of a refusal. If the run is
interrupted, the same command continues it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from experiments.score.league import own
from experiments.score.league.asked import Asked, RefusedError
from experiments.score.league.peers import PEERS, PeerProcess
from experiments.score.league.rows import COLUMNS, league_rows
from experiments.score.prediction_file import PredictionFile
from experiments.study.presets import NotSimulatedError
from sim.settings.errors import ConfigError

OURS = "windtunnel"


def answer_of(asked: Asked, predict: Callable[[Asked], dict[str, float]]) -> dict[str, object]:
    """Returns the line of the file for a row."""
    try:
        return {"id": asked.row["id"], **predict(asked), "status": "ok"}
    except (RefusedError, NotSimulatedError, ValueError) as error:
        return {"id": asked.row["id"], "status": " ".join(str(error).split())}


def main(arguments: Sequence[str] | None = None) -> int:
    """Predicts all rows of the league that the file lacks; returns 2 for a file that cannot be continued."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.score.league.predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tool", choices=(OURS, *PEERS), metavar="TOOL", help=", ".join((OURS, *PEERS)))
    parser.add_argument("out", type=Path, metavar="OUT", help="the file of predictions")
    parser.add_argument("python", type=Path, nargs="?", metavar="PYTHON", help="the peer's interpreter")
    options = parser.parse_args(arguments)
    if options.tool != OURS and (options.python is None or not options.python.is_file()):
        parser.error(f"PYTHON={options.python}: must be an interpreter that has {options.tool}")
    rows = league_rows().to_dict("records")
    file = PredictionFile(path=options.out, columns=COLUMNS, settings={"tool": options.tool})
    try:
        file.resume()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    file.begin()
    with ExitStack() as stack:
        predict = own.predict
        if options.tool != OURS:
            predict = stack.enter_context(PeerProcess(options.tool, options.python)).predict
        for row in rows:
            asked = Asked(row={str(name): value for name, value in row.items()})
            if str(row["id"]) not in file.rows:
                file.append(answer_of(asked, predict))
    file.finish([row["id"] for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
