"""Measure Flower's simulation runtime with many nodes on this machine: seconds, and memory of all processes.

python studies/deploy_simulation.py --nodes 50 --rounds 3
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import psutil
import tomli_w

from fedcsd.deploy.app import write_app
from fedcsd.deploy.local import alive, read_status
from fedcsd.deploy.processes import MARK, Processes, free_ports, marked, wait_for_server
from fedcsd.experiments.runs.run_folder import RunDirectory


class Memory:
    """The largest sum of what the processes with a mark have to themselves, looked at now and then."""

    def __init__(self, mark: str):
        self.mark, self.most, self.processes, self.going = f"{MARK}={mark}".encode(), 0, 0, True
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while self.going:
            sizes = []
            for number in marked(self.mark):
                try:
                    sizes.append(psutil.Process(number).memory_full_info().pss)
                except psutil.Error:
                    continue
            self.most, self.processes = max(self.most, sum(sizes)), max(self.processes, len(sizes))
            time.sleep(1)


def simulate(folder: Path, nodes: int, rounds: int, method: str, data: str) -> dict[str, float]:
    with Processes(folder) as processes:
        port = free_ports(1)[0]
        options = ["--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation"]
        processes.start("superlink", ["flower-superlink", "--simulation", "--insecure", *options])
        connection = {"address": f"127.0.0.1:{port}", "insecure": True}
        home = folder / "cli"
        home.mkdir()
        config = {"superlink": {"default": "here", "here": connection}}
        (home / "config.toml").write_text(tomli_w.dumps(config))
        status = folder / "status.json"
        values = {"method": method, "data": data, "clients": nodes, "rounds": rounds, "epochs": 1}
        values |= {"min_samples": 1, "out": str(folder / "run"), "status": str(status)}
        write_app(folder / "app", values)
        wait_for_server(f"127.0.0.1:{port}", None, processes)
        memory, began = Memory(processes.mark), time.monotonic()
        resources = f"num-supernodes={nodes} client-resources-num-cpus=1 init-args-num-cpus=2"
        processes.call(["flwr", "run", str(folder / "app"), "here", "--federation-config", resources])
        while not (facts := read_status(status)).get("finished"):
            if "error" in facts or (facts and not alive(facts["pid"])):
                raise SystemExit(f"failed: {facts.get('error', 'it ended')}; see {processes.logs}")
            time.sleep(0.2)
        history = RunDirectory(folder / "run").history()
        memory.going = False
        return {
            "seconds in all": time.monotonic() - began,
            "seconds of a round": sum(r["seconds"] for r in history) / len(history),
            "clients of the last round": history[-1]["clients"],
            "memory of all processes, GB": memory.most / 1e9,
            "processes": memory.processes,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--method", default="fedcsd")
    parser.add_argument("--data", default="digits")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedcsd-simulation-") as folder:
        found = simulate(Path(folder), options.nodes, options.rounds, options.method, options.data)
    print(f"{options.nodes} nodes, {options.rounds} rounds, {options.method} on {options.data}")
    for name, value in found.items():
        print(f"{name:32} {value:8.1f}")


if __name__ == "__main__":
    main()
