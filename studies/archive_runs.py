"""Put runs into one parquet file without their weights, as results/ keeps them.

    python studies/archive_runs.py runs/paper/runs --out results/paper/mnist/runs.parquet

A folder stands for all runs in it. An archive that exists keeps its runs; a run of the same name is replaced.
"""

import argparse
from pathlib import Path

from fedcsd.experiments.runs import archive
from fedcsd.experiments.runs.recorded import RecordedRun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN", help="folders of runs, or archives")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the archive")
    arguments = parser.parse_args()
    runs: dict[str, RecordedRun] = dict(archive.read(arguments.out)) if arguments.out.exists() else {}
    for path in arguments.paths:
        found = [path] if archive.is_run(path) else archive.paths_in(path)
        runs |= {run.path.name: run for run in map(archive.open_run, found)}
    left = [name for name, run in runs.items() if not (run.summary or run.divergence)]
    if left:
        raise SystemExit(f"not finished: {', '.join(left)}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    archive.write(arguments.out, dict(sorted(runs.items())))
    print(f"{arguments.out}: {len(runs)} runs, {arguments.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
