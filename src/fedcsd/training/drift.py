"""Measure the trained local model: logit and feature drift, and accuracy."""

from torch import Tensor

from fedcsd.objectives import kl_divergence
from fedcsd.training.workspace import Workspace
from fedcsd.weights import Weights

OWN_PROBE = 250  # training samples of a client on which its models are compared


def measure_local_model(
    workspace: Workspace, client: int, before: Weights, after: Weights
) -> dict[str, Tensor]:
    """Measure a client's trained model; each measurement is a number for each sample.

    Held-out accuracy is measured where the client holds samples out. With `track_drift` the model is
    compared with the one it started from, on test images that belong to no client (`logit_drift`,
    `feature_drift`) and on the client's own training data.
    """
    data = workspace.data
    found: dict[str, Tensor] = {}
    held = workspace.held[client] if workspace.held else workspace.parts[client][:0]
    if len(held):
        network = workspace.frozen("", after)
        right = workspace.forward(network, data.x_train, held).logits.argmax(1) == data.y_train[held]
        found["held_accuracy_local"] = right.float()
    if not workspace.settings.track_drift:
        return found
    probe, own = workspace.probe_rows, workspace.parts[client]
    start = workspace.probe(before)
    network = workspace.frozen("", after)
    end = workspace.forward(network, data.x_test, probe)
    found["logit_drift"] = kl_divergence(start.logits, end.logits)
    found["feature_drift"] = (end.features - start.features).norm(dim=1)
    found["local_accuracy"] = (end.logits.argmax(1) == data.y_test[probe]).float()
    own = own[:: -(-len(own) // OWN_PROBE)]
    for name, weights in (("local_train_accuracy", after), ("train_accuracy", before)):
        logits = workspace.forward(workspace.frozen("", weights), data.x_train, own).logits
        found[name] = (logits.argmax(1) == data.y_train[own]).float()
    return found
