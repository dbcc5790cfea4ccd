import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedcsd.aggregation import lerp, weighted_mean
from fedcsd.errors import Diverged, UserError
from fedcsd.federation.ledger import Ledger
from fedcsd.federation.requests import means_of_notes
from fedcsd.messages import Reply, Torn, pack, unpack
from fedcsd.models.network import Network, find_classifier
from fedcsd.weights import Layout, Weights


def weights(*numbers: float) -> Weights:
    return Weights(Layout(("w",), ((len(numbers),),), len(numbers)), torch.tensor(numbers))


def reply(samples: int, *numbers: float) -> Reply:
    return Reply(0, samples, {"weights": weights(*numbers)})


def test_weighted_mean_worked_by_hand() -> None:
    mean = weighted_mean([reply(1, 1.0, 0.0), reply(3, 5.0, -4.0)])
    assert mean.flat.tolist() == [4.0, -3.0]


@given(
    numbers=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8),
    samples=st.lists(st.integers(1, 10**6), min_size=1, max_size=6),
)
def test_equal_clients_average_to_exactly_themselves(numbers: list[float], samples: list[int]) -> None:
    mean = weighted_mean([reply(n, *numbers) for n in samples])
    assert torch.equal(mean.flat, torch.tensor(numbers))


def test_no_replies_is_divergence() -> None:
    with pytest.raises(Diverged, match="no client"):
        weighted_mean([])


def test_lerp_is_a_moving_average_with_a_recipe() -> None:
    a, b = weights(0.0, 10.0), weights(1.0, 20.0)
    mixed = lerp(a, b, 0.25)
    assert mixed.flat.tolist() == [0.25, 12.5]
    assert mixed.recipe == (a.token, b.token, 0.25)
    assert torch.equal(lerp(a, b, 1.0).flat, b.flat)
    assert torch.equal(lerp(a, b, 0.0).flat, a.flat)


def batch_norm_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def test_layout_puts_trained_parameters_first_and_leaves_integers_out() -> None:
    model = batch_norm_model()
    model[0].bias.requires_grad_(False)
    layout = Layout.of(model)
    assert layout.names == (
        "0.weight",
        "1.weight",
        "1.bias",
        "3.weight",
        "3.bias",
        "0.bias",
        "1.running_mean",
        "1.running_var",
    )
    assert layout.trainable == 12 + 4 + 4 + 8 + 2
    assert layout.size == layout.trainable + 4 + 4 + 4


def test_mixed_types_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double())
    with pytest.raises(UserError, match=r"float32, torch\.float64"):
        Layout.of(model)


def test_network_is_views_of_one_vector() -> None:
    network = Network(batch_norm_model(), torch.zeros(2, 3))
    before = {name: t.clone() for name, t in network.module.state_dict().items()}
    network.load(network.weights().like(torch.arange(network.layout.size, dtype=torch.float32)))
    state = network.module.state_dict()
    assert state["0.weight"].flatten().tolist() == list(range(12))
    assert state["1.running_var"].tolist() == [network.layout.size - 4 + i for i in range(4)]
    assert state["1.num_batches_tracked"] == before["1.num_batches_tracked"] == 0
    network.train()
    loss = network(torch.randn(5, 3)).logits.square().sum()
    expected = torch.autograd.grad(loss, list(network.module.parameters()), retain_graph=True)
    network.differentiate(loss)
    assert torch.equal(network.gradient, torch.cat([g.flatten() for g in expected]))
    assert state["1.num_batches_tracked"] == 1
    network.load(network.weights())
    assert state["1.num_batches_tracked"] == 0  # each local training starts it anew


def test_features_are_the_classifiers_input() -> None:
    network = Network(batch_norm_model(), torch.zeros(2, 3))
    network.eval()
    logits, features = network(torch.randn(5, 3))
    assert features.shape == (5, 4)
    torch.testing.assert_close(network.classifier(features), logits)


def test_one_sample_does_not_break_batch_norm() -> None:
    network = Network(batch_norm_model(), torch.zeros(2, 3))
    before = network.weights()
    network.train(single=True)
    network(torch.randn(1, 3))
    assert torch.equal(network.flat, before.flat)  # running statistics were used, not changed
    network.train()
    network(torch.randn(2, 3))
    assert not torch.equal(network.flat, before.flat)


def test_tied_and_frozen_parameters_work() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.second(self.first(x)))

    network = Network(Tied(), torch.zeros(2, 4))
    assert network.layout.size == 16 + 4 + 4 + 8 + 2
    network.load(network.weights().like(torch.ones(network.layout.size)))
    assert network.module.second.weight.data_ptr() == network.module.first.weight.data_ptr()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)), "does not end in"),
        (nn.Sequential(nn.Linear(5, 2)), "do not fit the model"),
    ],
)
def test_models_that_do_not_fit_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_classifier(model, torch.zeros(2, 3))


def test_packing_keeps_everything_and_writes_shared_tensors_once() -> None:
    w = weights(1.0, 2.0)
    teacher = lerp(w, w, 0.5)
    values = {
        "weights": w,
        "again": w,
        "teacher": teacher,
        "held": torch.tensor([True, False]),
        "steps": 7,
        "none": torch.empty(0, 3),
    }
    blob = pack({"round": 3}, values)
    header, back = unpack(blob, w.layout)
    assert header == {"round": 3}
    assert back["steps"] == 7
    assert torch.equal(back["weights"].flat, w.flat)
    assert back["teacher"].recipe == teacher.recipe
    assert back["again"].token == back["weights"].token == w.token
    assert back["held"].tolist() == [True, False]
    assert len(blob) < len(pack({"round": 3}, {**values, "again": weights(1.0, 2.0)}))


@given(cut=st.floats(0, 0.999))
def test_a_torn_blob_is_told_from_a_whole_one(cut: float) -> None:
    w = weights(*np.arange(100.0))
    blob = pack({"round": 3}, {"weights": w})
    with pytest.raises(Torn):
        unpack(blob[: int(cut * len(blob))], w.layout)


def test_a_changed_byte_is_noticed() -> None:
    w = weights(*np.arange(100.0))
    blob = bytearray(pack({"round": 3}, {"weights": w}))
    blob[-50] ^= 1
    with pytest.raises(Torn, match="checksum"):
        unpack(bytes(blob), w.layout)


def test_notes_add_up_over_clients() -> None:
    merged = means_of_notes([{"a": (3.0, 4.0)}, {"a": (0.0, 4.0), "b": (1.0, 1.0)}, {"c": (0.0, 0.0)}])
    assert merged == {"a": 3 / 8, "b": 1.0}


def test_the_ledger_counts_what_must_be_sent() -> None:
    ledger = Ledger(3)
    first, prototypes = weights(*[0.0] * 10), torch.zeros(5)
    # Round 0: teacher and weights are one value; the second question only adds the prototypes.
    ledger.begin()
    assert ledger.send(0, [0, 1], {"weights": first, "teacher": first}) == 2 * 40
    assert ledger.send(0, [0, 1], {"weights": first, "teacher": first, "prototypes": prototypes}) == 2 * 20
    for client in (0, 1):
        ledger.took_part(0, [client])
    # Round 1: client 0 makes the new teacher itself, client 2 was away and must be sent it.
    second = weights(*[1.0] * 10)
    teacher = lerp(first, second, 0.1)
    ledger.begin()
    assert ledger.send(1, [0, 2], {"weights": second, "teacher": teacher}) == 40 + 80
    ledger.took_part(1, [0])
    ledger.took_part(1, [2])
    # Round 2: client 1 was away, so its teacher is too old to go on from.
    third = weights(*[2.0] * 10)
    saved = ledger.to_json()
    ledger = Ledger(3)
    ledger.from_json(saved)
    ledger.begin()
    assert ledger.send(2, [0, 1, 2], {"weights": third, "teacher": lerp(teacher, third, 0.1)}) == 40 + 80 + 40
