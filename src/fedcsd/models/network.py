"""Any `nn.Module` as what training needs: flat weights and gradients, logits and features."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcsd.errors import UserError, unknown
from fedcsd.weights import Layout, Weights, float_buffers


class Outputs(NamedTuple):
    """What a model says of a batch: logits [B, C] and penultimate features [B, D]."""

    logits: Tensor
    features: Tensor


def find_classifier(module: nn.Module, images: Tensor, name: str = "") -> nn.Module:
    """The layer whose input are the features: the one named, or the linear layer whose output is the
    model's output, found by trying it on two images."""
    seen: list[tuple[nn.Linear, Tensor]] = []
    hooks = [
        linear.register_forward_hook(lambda linear, _, output: seen.append((linear, output)))
        for linear in module.modules()
        if isinstance(linear, nn.Linear)
    ]
    was_training = module.training
    try:
        with torch.no_grad():
            logits = module.eval()(images)
    except Exception as error:
        shape = "×".join(map(str, images.shape[1:]))
        raise UserError(
            f"images of shape {shape} do not fit the model ({_first_line(error)}): choose another --model"
        ) from error
    finally:
        module.train(was_training)
        for hook in hooks:
            hook.remove()
    for linear, output in reversed(seen):
        if output is logits and not name:
            return linear
    if name:
        return _named(module, name)
    names = [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    raise UserError(
        "the model does not end in an nn.Linear layer: name the layer whose input are the features with --classifier"
        + (f" ({' or '.join(names[-3:])})" if names else "")
    )


def _named(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        raise unknown("layer (--classifier)", name, [n for n, _ in module.named_modules() if n]) from None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


class Network:
    """A model whose tensors are views of one flat vector, with its gradient in another.

    Loading weights, taking an optimizer step and reading the result are then single operations,
    however many layers there are.
    """

    def __init__(self, module: nn.Module, images: Tensor, classifier: str = ""):
        self.module = module
        self.classifier = find_classifier(module, images, classifier)
        self.layout = Layout.of(module, self.classifier)
        self.classifier.register_forward_pre_hook(self._keep_features)
        self.norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
        self._features: Tensor | None = None
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._mode: tuple[bool, bool] | None = None
        self._bind()
        self._integers = [(b, b.clone()) for b in module.buffers() if not b.is_floating_point()]

    def _bind(self) -> None:
        """Move parameters and float buffers into the flat vector, gradients into theirs."""
        tensors = dict(self.module.named_parameters()) | dict(float_buffers(self.module))
        flat = torch.cat([tensors[name].detach().reshape(-1) for name in self.layout.names])
        self.flat = flat
        self.parameters = flat[: self.layout.trainable]
        self.gradient = torch.zeros_like(self.parameters)
        start = 0
        for name, view in self.layout.split(flat).items():
            tensor = tensors[name]
            if isinstance(tensor, nn.Parameter):
                tensor.data = view
                if tensor.requires_grad:
                    tensor.grad = self.gradient[start : start + view.numel()].view_as(view)
            else:
                owner, _, leaf = name.rpartition(".")
                self._buffers.append((self.module.get_submodule(owner), leaf, view))
            start += view.numel()
        self._hold_buffers()

    def _hold_buffers(self, *, keep: bool = False) -> None:
        """Put the buffers back into the flat vector, for models that assign new ones to their names;
        `keep` takes over what was assigned."""
        for owner, leaf, view in self._buffers:
            assigned = getattr(owner, leaf)
            if assigned is not view:
                if keep:
                    view.copy_(assigned)
                setattr(owner, leaf, view)

    def _keep_features(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._features = inputs[0]

    def __call__(self, images: Tensor) -> Outputs:
        """Logits and features of images [B, ...] in the present mode (train or eval)."""
        logits = self.module(images)
        features, self._features = self._features, None
        assert features is not None
        return Outputs(logits, features)

    def load(self, weights: Weights) -> None:
        self._hold_buffers()
        self.flat.copy_(weights.flat)
        for buffer, initial in self._integers:
            buffer.copy_(initial)

    def weights(self) -> Weights:
        """A copy of the present weights."""
        self._hold_buffers(keep=True)
        return Weights(self.layout, self.flat.clone())

    def train(self, *, single: bool = False) -> None:
        """Training mode. One sample has no batch statistics: BatchNorm then uses its running ones."""
        single = single and bool(self.norms)
        if self._mode != (True, single):
            self.module.train()
            for norm in self.norms:
                norm.train(not single)
            self._mode = (True, single)

    def eval(self) -> None:
        if self._mode != (False, False):
            self.module.eval()
            self._mode = (False, False)
