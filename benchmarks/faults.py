"""The campaign of tests/faults in its long form: thousands of kills, damaged and hostile files, counted by outcome.

    python benchmarks/faults.py            # some 5,000 trials, about an hour on two cores

No trial may end in a wrong result without a word, a traceback or a hang; the first that does fails its test, and what
it was is in the output.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from common import RESULTS, commit, hardware

from longrope2.files import package_versions, write_json

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=22, help="times as many trials as the tests make")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the JSON file")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as counts:
        environment = {**os.environ, "FAULTS_SCALE": str(options.scale), "FAULTS_COUNTS": counts}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "slow",
            "-n",
            "auto",
            "-o",
            "faulthandler_timeout=0",
            "tests/faults",
        ]
        passed = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(counts).iterdir())]
    outcomes = {
        kind: dict(sum((Counter(each.get(kind, {})) for each in found), Counter()))
        for kind in sorted({kind for each in found for kind in each})
    }
    trials = sum(sum(each.values()) for each in outcomes.values())
    result = {
        "name": "faults",
        "trials": trials,
        "passed": passed,
        "outcomes": outcomes,
        "seconds": time.monotonic() - began,
        "hardware": hardware(),
        "versions": package_versions("torch", "transformers"),
        "commit": commit(),
    }
    write_json(options.output / "faults.json", result)
    print(f"{trials:,} trials, {'none' if passed else 'some'} wrong: {outcomes}")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
