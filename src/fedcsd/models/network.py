"""Give any `nn.Module` flat weights and gradients, logits and features."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcsd import seeds
from fedcsd.errors import UserError, unknown
from fedcsd.kernels.chain import LinkedLayers, Pass
from fedcsd.kernels.vectors import slope_of
from fedcsd.models import layers
from fedcsd.weights import Layout, Weights, float_buffers


class Outputs(NamedTuple):
    """The logits [B, C] and penultimate features [B, D] that a model computes for a batch."""

    logits: Tensor
    features: Tensor


def concatenated(outputs: Sequence[Outputs]) -> Outputs:
    return Outputs(torch.cat([o.logits for o in outputs]), torch.cat([o.features for o in outputs]))


def find_classifier(module: nn.Module, images: Tensor, name: str = "") -> nn.Module:
    """Return the layer whose input are the features, found by trying the model on two images.

    It is the named one, or the linear layer whose output is the model's output.
    """
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
    """Make a model's tensors views of one flat vector, and its gradients views of another.

    Loading weights, an optimizer step and reading the result are then one operation each,
    for any number of layers. In bfloat16 (`bf16`, on a GPU) matrices and convolution kernels
    are rounded copies of the flat vector, which `refresh` makes anew before every step;
    the vector itself, its gradient and the optimizer stay in float32.
    """

    def __init__(self, module: nn.Module, images: Tensor, classifier: str = "", *, bf16: bool = False):
        self.module, self.bf16 = module, bf16
        self.forward: Callable[[Tensor], Tensor] = module
        self.classifier = find_classifier(module, images, classifier)
        self.layout = Layout.of(module, self.classifier)
        self.classifier.__class__ = tapped(type(self.classifier))
        self.norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
        if images.is_cuda:
            for norm in self.norms:
                if norm.momentum is not None:
                    norm.num_batches_tracked = None  # an unused count costs an operation for each layer
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._aside: list[tuple[nn.Module, str, Tensor]] = []  # integers, and what is not saved
        self._mode: tuple[bool, bool] | None = None
        self._bind()
        self._pass: Pass | None = None
        self.chain = self._chain()
        self.rounded = Rounded(self, module) if bf16 else None

    def _bind(self) -> None:
        """Move parameters and float buffers into the flat vector."""
        tensors = dict(self.module.named_parameters()) | dict(float_buffers(self.module))
        flat = torch.cat([tensors[name].detach().reshape(-1) for name in self.layout.names])
        self.flat = flat
        self.parameters = flat[: self.layout.trainable]
        self.gradient = torch.zeros_like(self.parameters)
        self.trained: list[nn.Parameter] = []
        for name, view in self.layout.split(flat).items():
            tensor = tensors[name]
            if isinstance(tensor, nn.Parameter):
                tensor.data = view
                if tensor.requires_grad:
                    self.trained.append(tensor)
            else:
                self._buffers.append((*self._place(name), view))
        for name, buffer in self.module.named_buffers():
            if name not in tensors:
                self._aside.append((*self._place(name), buffer))
        self._initial = [buffer.clone() for *_, buffer in self._aside]
        self.hold_buffers()

    def _place(self, name: str) -> tuple[nn.Module, str]:
        owner, _, leaf = name.rpartition(".")
        return self.module.get_submodule(owner), leaf

    def hold_buffers(self, *, keep: bool = False) -> None:
        """Restore the buffers of models that assign new ones; `keep` copies the values of the new ones."""
        for number, (owner, leaf, tensor) in enumerate((*self._buffers, *self._aside)):
            assigned = getattr(owner, leaf)
            if assigned is not tensor:
                averaged = number < len(self._buffers)
                if keep and (averaged or getattr(assigned, "shape", None) == tensor.shape):
                    tensor.copy_(assigned.detach())
                setattr(owner, leaf, tensor)

    def _chain(self) -> LinkedLayers | None:
        """Return the model for the kernels, or None if they cannot compute it."""
        links = self.module.links() if isinstance(self.module, layers.Chain) else None
        if links is None or self.bf16 or not self.flat.is_cpu:
            return None
        parts = torch.split(self.gradient, [p.numel() for p in self.trained])
        places = {id(p): part for p, part in zip(self.trained, parts, strict=True)}
        tensors = [tensor for weight, bias, _ in links for tensor in (weight, bias)]
        return LinkedLayers(links, [places.get(id(tensor)) for tensor in tensors])

    def steady(self, images: Tensor) -> bool:
        """Tell if such images have the same outputs in every mode and batch, to the last bit."""
        return self.chain is not None and self.chain.plan(images) is not None

    def record(self, images: Tensor) -> Outputs:
        """Compute outputs for a training step; `differentiate` follows with a loss of them."""
        plan = self.chain.plan(images) if self.chain is not None else None
        if self.chain is None or plan is None:
            return self(images)
        self._pass = made = self.chain.forward(plan, images)
        return Outputs(made.logits.requires_grad_(), made.features.requires_grad_())

    def __call__(self, images: Tensor) -> Outputs:
        """Compute logits and features of images [B, ...] in the present mode (train or eval)."""
        if self.chain is not None and not torch.is_grad_enabled():
            plan = self.chain.plan(images)
            if plan is not None:
                return Outputs(*self.chain.apply(plan, images))
        if self.rounded is not None:
            with torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False):
                logits = self.forward(self.rounded.arrange(images)).float()
        else:
            logits = self.forward(images)
        features = self.take_features()
        return Outputs(logits, features.float() if self.bf16 else features)

    def take_features(self) -> Tensor:
        """Return the classifier's input in the last forward pass."""
        layer: Any = self.classifier
        features, layer.tapped = layer.tapped, None
        return cast(Tensor, features)

    def differentiate(self, loss: Tensor) -> None:
        """Write the gradient of a loss, or of the mean of one for each sample [B], into `gradient`.

        A parameter that the loss does not depend on has zeros.
        """
        if self._pass is not None and self.chain is not None:
            made, self._pass = self._pass, None
            self.chain.backward(made, *slopes(loss, made.logits, made.features))
            return
        mean = loss.mean() if loss.dim() else loss
        gradients = torch.autograd.grad(mean, self.trained, allow_unused=True)
        if self.rounded is not None:
            self.rounded.gather(gradients)
            return
        pieces = [
            (torch.zeros_like(p) if g is None else g).reshape(-1)
            for p, g in zip(self.trained, gradients, strict=True)
        ]
        torch.cat(pieces, out=self.gradient)

    def refresh(self) -> None:
        """Round the flat vector's present values for a model in bfloat16."""
        if self.rounded is not None:
            self.rounded.refresh()

    def load(self, weights: Weights) -> None:
        """Copy weights into the model; buffers that are not weights start anew."""
        self.hold_buffers()
        self.flat.copy_(weights.flat)
        self.refresh()
        for (*_, buffer), initial in zip(self._aside, self._initial, strict=True):
            buffer.copy_(initial)

    def weights(self) -> Weights:
        """Return a copy of the present weights."""
        self.hold_buffers(keep=True)
        return Weights(self.layout, self.flat.clone())

    def remembers(self, images: Tensor) -> bool:
        """Tell if a forward pass in training changes a buffer, as BatchNorm does."""
        places = [*self._buffers, *self._aside]
        before = [tensor.clone() for *_, tensor in places]
        if not before:
            return False
        self.train()
        with torch.no_grad(), seeds.kept(cuda=images.is_cuda):
            self(images)
        changed = [
            getattr(owner, leaf) is not tensor or not torch.equal(tensor, old)
            for (owner, leaf, tensor), old in zip(places, before, strict=True)
        ]
        self.hold_buffers()
        for (*_, tensor), old in zip(places, before, strict=True):
            tensor.copy_(old)
        return any(changed)

    def train(self, *, single: bool = False) -> None:
        """Switch to training mode. A single sample has no batch statistics, so BatchNorm uses its running ones."""
        single = single and bool(self.norms)
        if self._mode != (True, single):
            self.module.train()  # a model may leave its BatchNorm in eval mode
            for norm in self.norms if single else ():
                norm.eval()
            self._mode = (True, single)

    def eval(self) -> None:
        """Switch to evaluation mode."""
        if self._mode != (False, False):
            self.module.eval()
            self._mode = (False, False)


def slopes(loss: Tensor, logits: Tensor, features: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of logits and features; a kernel's loss has computed its own already."""
    known = slope_of(loss, logits)
    if known is not None:
        return known * (1 / len(loss)), None
    mean = loss.mean() if loss.dim() else loss
    first, second = torch.autograd.grad(mean, (logits, features), allow_unused=True)
    return torch.zeros_like(logits) if first is None else first, second


_TAPPED: dict[type[nn.Module], type[nn.Module]] = {}


def tapped(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of layers that also keep their input.

    A hook could do the same, but torch.compile compiles a model with hooks anew for every copy.
    """
    if kind in _TAPPED.values():
        return kind
    if kind in _TAPPED:
        return _TAPPED[kind]

    class Tapped(kind):  # type: ignore[misc,valid-type]
        tapped: Tensor | None = None

        def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
            self.tapped = x
            return super().forward(x, *rest)  # type: ignore[no-any-return]

    Tapped.__name__, Tapped.__qualname__, Tapped.__module__ = (
        kind.__name__,
        kind.__qualname__,
        kind.__module__,
    )
    _TAPPED[kind] = Tapped
    return Tapped


class Rounded:
    """Keep a network's matrices and convolutions in bfloat16, the latter channels last.

    One operation rounds all of them and one copies all gradients back, where a cast for each layer would take
    hundreds. Kernels whose numbers lie in another order than in the flat vector are put in order before.
    """

    def __init__(self, network: Network, module: nn.Module):
        self.trained, self.parameters = network.trained, network.parameters
        self.channels_last = any(isinstance(m, nn.Conv2d) and m.in_channels >= 16 for m in module.modules())
        sizes = [p.numel() for p in self.trained]
        starts = list(itertools.accumulate(sizes, initial=0))
        values, self.slopes = (torch.split(some, sizes) for some in (self.parameters, network.gradient))
        self.exact: list[int] = []  # parameters by number
        self.straight: list[int] = []
        self.turned: list[int] = []
        there: list[Tensor] = []
        back: list[Tensor] = []
        for number, (p, value) in enumerate(zip(self.trained, values, strict=True)):
            if p.dim() < 2:
                self.exact.append(number)
            elif self._last(p) and 1 < p.shape[1] < p[0].numel():
                self.turned.append(number)
                order = self._flattened(torch.arange(p.numel(), device=value.device).view(p.shape))
                there.append(order.add(starts[number]))
                back.append(order.argsort().add(sum(len(some) for some in back)))
            else:
                self.straight.append(number)
            if p.dim() > 1:
                form = torch.channels_last if self._last(p) else torch.contiguous_format
                p.data = torch.empty_like(p, dtype=torch.bfloat16, memory_format=form)
        self.pieces = [sizes[n] for n in self.turned]
        if self.turned:  # where their numbers lie in the flat vector; where its numbers lie among them
            self.there, self.back = torch.cat(there).int(), torch.cat(back).int()
        self.in_order = self.parameters.new_empty(sum(self.pieces))
        self.exactly = [*(values[n] for n in self.straight), *torch.split(self.in_order, self.pieces)]
        self.rounded = [self._flattened(self.trained[n].data) for n in (*self.straight, *self.turned)]
        self.refresh()

    def _last(self, tensor: Tensor) -> bool:
        return self.channels_last and tensor.dim() == 4

    def _flattened(self, tensor: Tensor) -> Tensor:
        return (tensor.permute(0, 2, 3, 1) if self._last(tensor) else tensor).reshape(-1)

    def arrange(self, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=torch.channels_last) if self._last(images) else images

    def refresh(self) -> None:
        """Round the flat vector's present values into the bfloat16 tensors."""
        if self.turned:
            torch.index_select(self.parameters, 0, self.there, out=self.in_order)
        copy_all(self.rounded, self.exactly)

    def gather(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy gradients, each in its parameter's type and order, into the flat vector."""
        found = [
            self._flattened(torch.zeros_like(p) if g is None else g)
            for p, g in zip(self.trained, gradients, strict=True)
        ]
        rounded = [found[n] for n in self.straight]
        if self.turned:
            turned = torch.cat([found[n] for n in self.turned]).index_select(0, self.back)
            rounded += torch.split(turned, self.pieces)
        copy_all([self.slopes[n] for n in (*self.straight, *self.turned)], rounded)
        copy_all([self.slopes[n] for n in self.exact], [found[n] for n in self.exact])


def copy_all(places: list[Tensor], values: list[Tensor]) -> None:
    """Copy each value to its place, in one operation where PyTorch has it."""
    if places:
        torch._foreach_copy_(places, values)
