"""Compare memory and time of 10,000 clients and of 100, with the same 50 in a round.

    python benchmarks/many_clients.py --data-dir DIR     # DIR/mnist/…parquet; without it, made-up images

FedCSD with the simple CNN on 60,000 images of 28×28. The clients that train are the same in both
federations, sample for sample: the small one holds them and 50 others. Rounds are interleaved;
medians are compared, and the peak of memory beyond the data set is measured over all processes.
"""

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from plain_loop import images

from fedcsd.data import Dataset, load
from fedcsd.experiments.experiment import Experiment, prepare
from fedcsd.federation.backends.local import LocalBackend, cores
from fedcsd.federation.rounds import Federation
from fedcsd.methods.fedcsd import FedCSD

CLIENTS, COHORT = 10_000, 50


class Peak(threading.Thread):
    """Record the largest memory of this process and its workers; shared pages count once (PSS)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.going = 0, True

    def now(self) -> int:
        main = psutil.Process()
        total = 0
        for process in (main, *main.children(recursive=True)):
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
        return total

    def run(self) -> None:
        while self.going:
            self.peak = max(self.peak, self.now())
            time.sleep(0.2)


def build(data: Dataset, clients: int, parts: list[np.ndarray] | None = None) -> Experiment:
    values = {
        "clients": clients,
        "partition": "iid",
        "min_samples": 1,
        "epochs": 1,
        "batch_size": 10,
        "participation": COHORT / clients,
    }
    values |= {"model": "simple_cnn", "data": "given from Python"}
    return prepare(values, method=FedCSD(), data=data, parts=(parts, []) if parts else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="folder with mnist/*.parquet")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    data = load("mnist", {}, arguments.data_dir) if arguments.data_dir else images(60_000)

    large = build(data, CLIENTS)
    cohort = sorted(np.random.default_rng(0).permutation(CLIENTS)[:COHORT].tolist())
    others = [k for k in range(CLIENTS) if k not in set(cohort)][: 100 - COHORT]
    small = build(data, 100, [large.parts[k] for k in [*cohort, *others]])
    # Both federations draw the clients that hold these rows.
    Federation.drawn = lambda self: (  # type: ignore[method-assign]
        cohort if self.settings.clients == CLIENTS else list(range(COHORT))
    )

    times: dict[str, list[float]] = {"100 clients": [], "10,000 clients": []}
    watch = Peak()
    runs = {}
    for name, experiment in (("100 clients", small), ("10,000 clients", large)):
        backend = LocalBackend(experiment.worker(), experiment.network.layout, cores())
        runs[name] = Federation(experiment, backend), backend
    before = watch.now()
    watch.start()
    for number in range(arguments.rounds + 1):
        for name, (federation, _) in runs.items():
            began = time.perf_counter()
            federation.step()
            federation.save()
            if number:
                times[name].append(time.perf_counter() - began)
    watch.going = False
    watch.join()
    for _, backend in runs.values():
        backend.close()

    size = sum(t.nbytes for t in (data.x_train, data.x_test, data.y_train, data.y_test))
    medians = {name: statistics.median(t) for name, t in times.items()}
    for name, median in medians.items():
        print(
            f"{name:16}{median:8.3f} s a round of {COHORT} clients ({min(times[name]):.3f} to {max(times[name]):.3f})"
        )
    ratio = medians["10,000 clients"] / medians["100 clients"]
    beyond = watch.peak - size
    print(f"a round among 10,000 clients takes {ratio:.2f} of one among 100")
    print(
        f"peak memory of both federations together {watch.peak / 2**20:.0f} MiB, {beyond / 2**20:.0f} MiB beyond the data set "
        f"({size / 2**20:.0f} MiB); {before / 2**20:.0f} MiB before the first round"
    )
    sys.exit(0 if ratio <= 1.3 and beyond < 1.5 * 2**30 else 1)


if __name__ == "__main__":
    main()
