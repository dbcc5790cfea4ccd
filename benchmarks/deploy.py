"""Measure the cost of a deployment beside training: bytes on the wire and seconds of a round.

A real SuperLink and real SuperNodes with TLS and authentication. The nodes reach the SuperLink through a
relay that counts every byte in both directions: what TLS, HTTP and Flower's own calls add is in it.

    python benchmarks/deploy.py --data mnist --train-size 2000
    python benchmarks/deploy.py --data small.npz --model resnet18 --rounds 3

A large model is tested after each round on all test data, at the server: choose data with few test images.
"""

import argparse
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from fedcsd.deploy.local import LocalDeployment
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.federation.callbacks import Callbacks
from fedcsd.federation.evaluation import Record


class Relay:
    """Listens beside the SuperLink and passes everything on, counted."""

    def __init__(self, address: str):
        host, _, port = address.rpartition(":")
        self.there = host, int(port)
        self.down = self.up = 0
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self.listener.accept()
            try:
                far = socket.create_connection(self.there)
            except OSError:  # the SuperLink is not there, or no longer
                near.close()
                continue
            for source, target, up in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._pass, args=(source, target, up), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while some := source.recv(1 << 16):
                with self.lock:
                    self.up, self.down = self.up + up * len(some), self.down + (not up) * len(some)
                target.sendall(some)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class Marks(Callbacks):
    """Return the bytes that the relay had counted at the end of each round."""

    def __init__(self, relay: Relay):
        self.relay = relay
        self.seen: list[tuple[int, int]] = []

    def round(self, record: Record, rounds: int) -> None:
        self.seen.append((self.relay.down, self.relay.up))


def measure(federation: LocalDeployment, relay: Relay, out: Path, values: dict[str, Any]) -> list[float]:
    """Return for a round after the first: bytes that must be sent, bytes of messages, bytes on the wire, seconds."""
    status, marks = federation.run({**values, "out": str(out)}), Marks(relay)
    federation.follow(out, status, marks, values["rounds"])
    records = RunDirectory(out).history()[1:]
    size = sum(t.nbytes for t in load_file(out / "model.safetensors").values() if t.is_floating_point())
    weights = 2 * size * values["clients"]  # down and up
    messages = sum(r["bytes_down"] + r["bytes_up"] for r in records) / len(records)
    down, up = (b - a for a, b in zip(marks.seen[0], marks.seen[-1], strict=True))
    wire = (down + up) / len(records)
    mean = {key: sum(r[key] for r in records) / len(records) for key in ("seconds", "seconds_outside")}
    return [weights, messages, wire, wire / weights, mean["seconds"], mean["seconds_outside"]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="digits")
    parser.add_argument("--train-size", type=int, default=0)
    parser.add_argument("--model", default="auto")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--methods", default="fedavg,fedcsd,fedcsd without client-held teacher")
    options = parser.parse_args()
    values = {"data": options.data, "train_size": options.train_size, "model": options.model, "beta": 0.5}
    values |= {"clients": options.nodes, "rounds": options.rounds, "epochs": 1, "join_timeout": 120.0}
    head = ("weights", "messages", "wire", "wire/weights", "seconds", "outside training")
    print(
        f"{options.model} on {options.data}, {options.nodes} nodes; of a round after the first, down and up"
    )
    print(f"{'':36}" + "".join(f"{name:>18}" for name in head))
    with tempfile.TemporaryDirectory(prefix="fedcsd-deploy-") as name:
        folder = Path(name)
        with LocalDeployment(folder / "deploy", options.nodes) as federation:
            relay = Relay(federation.address)
            federation.reached_at = relay.address
            federation.start()
            for number, label in enumerate(options.methods.split(",")):
                own = {"method": label.split()[0], "client_teacher": "without" not in label}
                found = measure(federation, relay, folder / f"run-{number}", {**values, **own})
                cells = [f"{n:18,.0f}" for n in found[:3]] + [f"{n:18.3f}" for n in found[3:]]
                print(f"{label:36}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
