"""FedCSD distils from a smoothed teacher, weighted by the similarity of class prototypes.

Yan et al., "Rethinking Client Drift in Federated Learning: A Logit Perspective" (the paper's Algorithm 1).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedcsd.aggregation import lerp, weighted_mean
from fedcsd.config import option
from fedcsd.errors import UserError
from fedcsd.kernels import csd
from fedcsd.methods.base import Ask, Method, Server
from fedcsd.objectives import authors_csd_loss, average_over_holders, class_prototypes, soft_label_mask
from fedcsd.training import Batch, Client
from fedcsd.weights import Values, Weights


@dataclass(frozen=True)
class FedCSD(Method):
    """Distil from a moving-average teacher, its logits weighted by class-prototype similarity and masked."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "base": {"similarity": False, "mask": "none", "teacher": "global"},
        "m1": {"teacher": "global"},
        "m2": {"mask": "none"},
        "m3": {"similarity": False},
        "forcible": {"mask": "forcible"},
        "uniform": {"target": "uniform"},
        "scaled": {"similarity_scale": "classes"},
        "authors": {"variant": "authors"},
    }

    mu: float = option(0.001, "weight of the distillation term", ge=0)
    tau: float = option(10.0, "temperature of the soft labels", gt=0)
    alpha: float = option(0.9, "momentum of the teacher's moving average", ge=0, le=1)
    similarity: bool = option(True, "weight the teacher's logits by prototype similarity")
    mask: Literal["adaptive", "forcible", "none"] = option(
        "adaptive", "which soft labels to keep: p_y > 1/C, argmax = y, or all"
    )
    teacher: Literal["average", "global"] = option(
        "average", "the moving average of global models, or the last one"
    )
    target: Literal["teacher", "uniform"] = option(
        "teacher", "control: a uniform target with the same mask and weight"
    )
    similarity_scale: Literal["none", "classes"] = option(
        "none", "control: 'classes' multiplies the similarity by C"
    )
    variant: Literal["paper", "authors"] = option(
        "paper", "'authors' is what the authors' released code computes"
    )

    def __post_init__(self) -> None:
        parts = (self.similarity, self.mask, self.target, self.similarity_scale, self.teacher)
        if self.variant == "authors" and parts != (True, "adaptive", "teacher", "none", "average"):
            raise UserError(
                "method.variant=authors has no switches: leave similarity, mask, teacher, target and similarity_scale alone"
            )
        if self.similarity_scale == "classes" and (not self.similarity or self.target == "uniform"):
            raise UserError(
                "method.similarity_scale=classes does nothing without similarity or with target=uniform: leave it out"
            )

    def start(self, server: Server) -> None:
        server.teacher = server.weights
        server.prototypes = server.weights.flat.new_zeros(server.classes, server.classes)

    def round(self, server: Server, ask: Ask) -> None:
        # The weights go out with the first request: a client that holds the last teacher makes the new
        # one from them, so that only the prototypes are sent in addition to FedAvg's weights.
        values = {"weights": server.weights, "teacher": server.teacher}
        if self.similarity and self.target == "teacher" and self.variant == "paper":
            replies = ask(self.prototypes, **values)
            server.prototypes = average_over_holders(
                ((r["prototypes"], r["held"]) for r in replies), last=server.prototypes
            )
            values["prototypes"] = server.prototypes
        replies = ask(self.train, **values)
        server.weights = weighted_mean(replies)
        server.teacher = (
            server.weights
            if self.teacher == "global"
            else lerp(server.teacher, server.weights, 1 - self.alpha)
        )

    def prototypes(self, client: Client, weights: Weights, teacher: Weights) -> Values:
        """Compute the mean teacher logits of each class, and which classes the client holds."""
        prototypes, counts = class_prototypes(client.outputs(teacher).logits, client.labels, client.classes)
        return {"prototypes": prototypes, "held": counts > 0}

    def train(
        self, client: Client, weights: Weights, teacher: Weights, prototypes: Tensor | None = None
    ) -> Values:
        if self.variant == "authors":
            outputs, labels = client.training_outputs(teacher)
            own, _ = class_prototypes(outputs.logits, labels, client.classes)
            return client.train(
                weights,
                self.authors_loss,
                frozen={"teacher": teacher},
                given={"prototypes": own},
                frozen_mode="train",
            )
        self.measure(client, client.outputs(teacher).logits)
        return client.train(
            weights,
            self.loss,
            frozen={"teacher": teacher},
            given={} if prototypes is None else {"prototypes": prototypes},
        )

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute `CE + μ · L_CSD` of `objectives.csd_loss` as one operation, and the entropy of its target."""
        loss, spread = csd(
            batch.logits,
            batch.frozen["teacher"].logits,
            batch.given.get("prototypes"),
            batch.labels,
            mu=self.mu,
            tau=self.tau,
            similarity=self.similarity,
            mask=self.mask,
            target=self.target,
            similarity_scale=self.similarity_scale,
        )
        return loss, {"target_entropy": spread}

    def authors_loss(self, batch: Batch) -> Tensor:
        """Compute `(1 − μ) · CE + μ · τ² KL` with the prototypes of this client alone."""
        csd = authors_csd_loss(
            batch.logits,
            batch.frozen["teacher"].logits,
            batch.given["prototypes"],
            batch.labels,
            tau=self.tau,
        )
        return (1 - self.mu) * batch.cross_entropy + self.mu * csd

    def measure(self, client: Client, teacher_logits: Tensor) -> None:
        """Measure the teacher on local data, and the mask's effect on its errors."""
        right = teacher_logits.argmax(1) == client.labels
        kept = soft_label_mask(teacher_logits, client.labels, self.mask)
        filtered = 1 - kept
        client.note("teacher_accuracy", right)
        client.note("mask_rate", kept)
        client.note("wrong_filtered", filtered, ~right)
        client.note("right_lost", filtered, right)
