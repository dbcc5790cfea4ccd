"""Load data sets of the Hugging Face hub, from the hub or from a folder with the same parquet files."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from fedcsd.data.dataset import Dataset
from fedcsd.data.sources.parquet import parquet, split_files
from fedcsd.errors import UserError, reason


@dataclass(frozen=True)
class Published:
    """A data set as it is published, with the preparation of the papers."""

    repo: str
    image: str
    label: str
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: str = "none"
    model: str = "auto"

    def load(self, name: str, folder: Path | None, *, client: str = "", keep_labels: int = 0) -> Dataset:
        """Load the data set from a folder, or else from the hub."""
        where = local_folder(name, folder) or download(self.repo)
        data = parquet(
            where, image=self.image, label=self.label, client=client, keep_labels=keep_labels, title=name
        )
        data = data.normalised(self.mean, self.std) if self.mean else data
        return replace(data, augment=self.augment, model=self.model)


def local_folder(name: str, folder: Path | None) -> Path | None:
    """Return the folder with this data set's files: FOLDER/name, or FOLDER itself if it holds them."""
    if folder is None:
        return None
    if (folder / name).is_dir() and split_files(folder / name)["train"]:
        return folder / name
    if any(folder.glob("*.parquet")) and split_files(folder)["train"]:
        return folder
    raise UserError(
        f"{folder} holds no {name}: it should have {name}/train-….parquet, "
        f"and {name}/test-….parquet if the data has a test set of its own"
    )


def download(repo: str, instead: str = "--data-dir or FEDCSD_DATA") -> Path:
    """Return the folder of a hub data set's parquet files; the hub's own cache keeps them."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise UserError(
            f"{repo} is on the Hugging Face hub: `pip install huggingface_hub` to fetch it, "
            f"or give a folder with its parquet files as {instead}"
        ) from None
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        return Path(snapshot_download(repo, repo_type="dataset", allow_patterns=["*.parquet"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UserError(
            f"the Hugging Face hub did not give {repo} ({reason(error)}): check the network, "
            f"or give a folder with its parquet files as {instead}"
        ) from None


CIFAR_MEAN, CIFAR_STD = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
CIFAR100_MEAN, CIFAR100_STD = (0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047)


def cifar10(folder: Path | None) -> Dataset:
    """Load CIFAR-10: 50,000 and 10,000 colour images of 32×32, ten classes."""
    data = Published("uoft-cs/cifar10", "img", "label", CIFAR_MEAN, CIFAR_STD, "cifar", "resnet18")
    return data.load("cifar10", folder)


def cifar100(folder: Path | None) -> Dataset:
    """Load CIFAR-100: 50,000 and 10,000 colour images of 32×32, a hundred classes."""
    data = Published(
        "uoft-cs/cifar100", "img", "fine_label", CIFAR100_MEAN, CIFAR100_STD, "cifar", "resnet18"
    )
    return data.load("cifar100", folder)


def mnist(folder: Path | None) -> Dataset:
    """Load MNIST: 60,000 and 10,000 handwritten digits of 28×28."""
    return Published("ylecun/mnist", "image", "label").load("mnist", folder)


def fashion_mnist(folder: Path | None) -> Dataset:
    """Load Fashion-MNIST: 60,000 and 10,000 images of clothing, 28×28, ten classes."""
    return Published("zalando-datasets/fashion_mnist", "image", "label").load("fashion_mnist", folder)


def femnist(folder: Path | None, *, classes: int = 10) -> Dataset:
    """Load FEMNIST: characters of 28×28 by some 3,600 writers; the ten digits, or all with data.classes=62."""
    if classes not in (10, 62):
        raise UserError(f"data.classes of femnist must be 10 (the digits) or 62 (all), not {classes}")
    data = Published("flwrlabs/femnist", "image", "character")
    return data.load("femnist", folder, client="writer_id", keep_labels=classes)
