"""The memory that reading a trace takes, in a process of its own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from experiments.bench.memory import peak_mib
{imports}
before = peak_mib()
for each in {read}: pass
print(peak_mib() - before)
"""


def peak_mib_of(imports, read, path):
    """Returns the peak resident memory, in MiB above that after the imports, of reading a trace.

    read: the expression that is iterated; sys.argv[1] is the path in it.
    """
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(imports=imports, read=read), str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return float(ended.stdout)
