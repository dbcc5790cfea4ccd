"""FedAvg as one writes it first: a deepcopy of the model for each client, a DataLoader, torch.optim.SGD,
an average of state dicts. One process, with one thread or all cores', whichever is faster here."""

import copy

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from workload import accuracy, arguments, choose_threads, read


def main() -> None:
    folder, rounds, marks = arguments()
    work = read(folder)
    threads = choose_threads(work)
    model, (x_test, y_test) = work.network(), work.test()
    marks.round(accuracy(model, x_test, y_test))
    for cohort in work.cohorts[:rounds]:
        states: list[tuple[int, dict[str, Tensor]]] = []
        for number in cohort:
            local = copy.deepcopy(model)
            local.train()
            sgd = work.optimizer(local)
            client = TensorDataset(*work.client(number))
            loader = DataLoader(client, batch_size=work.settings.batch_size, shuffle=True)
            for _ in range(work.settings.epochs):
                for x, y in loader:
                    sgd.zero_grad()
                    F.cross_entropy(local(x), y).backward()  # type: ignore[no-untyped-call]
                    sgd.step()
            states.append((len(client), local.state_dict()))
        total = sum(n for n, _ in states)
        model.load_state_dict(
            {name: torch.stack([s[name] * (n / total) for n, s in states]).sum(0) for name in states[0][1]}
        )
        marks.round(accuracy(model, x_test, y_test))
    marks.write(threads=threads)


if __name__ == "__main__":
    main()
