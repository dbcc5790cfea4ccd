import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from fedcsd.config import Settings
from fedcsd.data import Dataset, load
from fedcsd.data import split as split_by
from fedcsd.errors import Note, UserError
from fedcsd.seeds import rng
from helpers.program import Fedcsd


def split(labels, settings, name="dirichlet", groups=None, **options):
    return split_by(labels, settings, {"name": name, **options}, groups)


def arrays(n: int = 20, shape: tuple[int, ...] = (4, 4), kind: str = "uint8") -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (2 * n, *shape)).astype(kind)
    y = np.arange(2 * n) % 3
    return {"x_train": x[:n], "y_train": y[:n], "x_test": x[n:], "y_test": y[n:]}


def test_digits_are_the_real_ones() -> None:
    data = load("digits")
    assert (len(data.y_train), len(data.y_test), data.classes, data.shape) == (1437, 360, 10, (1, 8, 8))
    assert data.x_train.dtype == torch.uint8
    assert int(data.x_train.max()) == 16
    images = data.images(data.x_train)
    assert images.mean().item() == pytest.approx(0, abs=1e-5)
    assert images.std(correction=0).item() == pytest.approx(1, abs=1e-5)


def test_uint8_images_are_standardised_per_channel_and_floats_left_alone() -> None:
    data = load(arrays(shape=(3, 4, 4)))
    images = data.images(data.x_train)
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(images.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)
    with pytest.warns(Note):
        floats = load(arrays(shape=(3, 4, 4), kind="float64"))
    assert floats.x_train.dtype == torch.float32
    assert floats.images(floats.x_train) is floats.x_train


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4, 4), (1, 4, 4)),
        ((3, 4, 4), (3, 4, 4)),
        ((4, 5, 3), (3, 4, 5)),
        ((4, 5, 1), (1, 4, 5)),
        ((7,), (7,)),
    ],
)
def test_shapes_people_have(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert load(arrays(shape=shape)).shape == expected


def test_whole_numbers_up_to_255_are_images() -> None:
    assert load(arrays(kind="int64")).x_train.dtype == torch.uint8


def test_torch_tensors_and_tuples_are_accepted() -> None:
    a = arrays()
    data = load(
        (torch.from_numpy(a["x_train"]), a["y_train"][:, None], a["x_test"], a["y_test"].astype(float))
    )
    assert data.y_train.shape == (20,)


def test_torch_datasets_from_python() -> None:
    x, y = torch.rand(40, 1, 20, 20), torch.arange(40) % 4
    data = load((TensorDataset(x, y), TensorDataset(x[:10], y[:10])))
    assert torch.equal(data.x_train, x)
    assert (data.classes, len(data.y_test)) == (4, 10)


def broken(**changes: object) -> dict[str, object]:
    return {**arrays(), **changes}


nan = np.zeros((20, 4, 4))
nan[7, 0, 0] = np.nan


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (broken(y_train=np.full(20, -1)), r"labels must lie in 0\.\.2; found -1"),
        (
            broken(y_train=np.array(["cat"] * 20)),
            r"whole numbers from 0, .*it holds text: .*numpy\.unique\(y, return_inverse=True\)\[1\]",
        ),
        (broken(y_train=np.array(["cat"] * 20, dtype=object)), "it holds text"),
        (
            broken(y_test=np.arange(20) % 3 + 0.5 * (np.arange(20) > 6)),
            r"y_test must .* 13 of its numbers are not whole \(the first is 1\.5, of sample 7\): 2\.0 is accepted",
        ),
        (broken(y_train=np.full(20, np.inf)), "20 of its numbers are not whole"),
        (broken(y_train=np.zeros((20, 3))), r"it is float64 of shape \[20, 3\]"),
        (broken(y_train=np.arange(19) % 3), "x_train has 20 samples and y_train 19"),
        (broken(x_train=nan), r"NaN or infinite values in 1 samples \(the first is sample 7\)"),
        (broken(x_train=np.zeros((20, 5, 5), np.uint8)), "same shape and type"),
        (broken(x_test=np.zeros((20, 4, 4))), "same shape and type"),
        (broken(x_train=np.zeros((20, 2, 2, 2, 2))), r"must be \[N, H, W\]"),
        (broken(x_train=np.array(["a"] * 20).reshape(20, 1, 1)), "must hold whole numbers"),
        (broken(y_train=np.zeros(20, int), y_test=np.zeros(20, int)), "at least two classes"),
        ({"x_train": np.zeros((3, 4, 4))}, "the data lacks y_train: it has x_train; it needs"),
        ({n: arrays()[n] for n in ("x_train", "y_train", "x_test")}, "lacks y_test: it has x_train, y_train"),
        ((np.zeros((20, 4)), np.arange(19) % 3), "x_train has 20 samples and y_train 19"),
        (
            broken(y_train=np.arange(20) % 3 + 1, y_test=np.arange(20) % 3 + 1),
            "labels must count from 0; they go from 1 to 3",
        ),
        (broken(y_train=np.arange(20) * 400_000), "number the classes from 0"),
        (17, "data must be a name, a path, .*not a int"),
        (((np.zeros((20, 4)), np.arange(20)),) * 2, r"four arrays .*not a tuple of tuple, tuple"),
        ([np.zeros((20, 4))] * 3, r"four arrays .*not a list of ndarray, ndarray, ndarray"),
    ],
)
def test_bad_data_is_refused_with_what_is_wrong(data: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(data)


def test_labels_that_skip_numbers_are_told(tmp_path) -> None:
    labels = np.arange(20) % 3
    np.savez(tmp_path / "gaps.npz", **broken(y_train=10 * labels, y_test=10 * labels))
    with pytest.warns(Note, match="gaps: 18 of the 21 classes have no samples: labels should count from 0"):
        assert load(str(tmp_path / "gaps.npz")).classes == 21
    with pytest.warns(Note, match="arrays: 1 of the 4 classes has no samples"):
        load(broken(y_train=np.array([0, 1, 3, 3] * 5), y_test=np.array([0, 1] * 10)))


@pytest.mark.filterwarnings("error::fedcsd.errors.Note")
def test_nothing_is_told_of_labels_without_gaps(tmp_path) -> None:
    load("digits")
    load(broken(y_test=np.zeros(20, int)))
    np.savez(tmp_path / "said.npz", **broken(y_train=np.arange(20) % 2 * 4), classes=5)
    assert load(str(tmp_path / "said.npz")).classes == 5


@pytest.mark.parametrize(
    ("factor", "reach", "cure"),
    [
        (1, "255", r"give bytes \(uint8\), which are scaled and standardised, or divide by 255"),
        (10, "2550", "standardise them to mean 0 and deviation 1"),
        (-1, "-255", "standardise them to mean 0 and deviation 1"),
    ],
)
def test_floating_point_numbers_far_from_standardised_are_told(
    tmp_path, fedcsd: Fedcsd, factor: int, reach: str, cure: str
) -> None:
    given = {n: factor * a.astype("float32") if n[0] == "x" else a for n, a in arrays(50).items()}
    message = f"the floating-point numbers of x_train reach {reach} and are used as they are, .*: {cure}$"
    for data in (tuple(given.values()), (given["x_train"].reshape(50, 16), given["y_train"])):
        with pytest.warns(Note, match=f"arrays: {message}"):
            assert load(data).scale is None
    if factor == 1:
        np.savez(tmp_path / "far.npz", **given)
        few = ("--clients", "2", "--beta", "100", "--rounds", "1", "--epochs", "1", "--min-samples", "1")
        shown = fedcsd("compare", "--data", "far.npz", "--methods", "fedavg", "--seeds", "0,1", *few)
        assert shown.returncode == 0, shown.stderr
        assert shown.stderr.count("far: the floating-point numbers of x_train reach 255") == 1


@pytest.mark.filterwarnings("error::fedcsd.errors.Note")
def test_nothing_is_told_of_numbers_that_train(tmp_path) -> None:
    random = np.random.default_rng(0)
    load((random.standard_normal((500, 3, 8, 8)), np.arange(500) % 3))
    load((random.random((500, 12)) * 16, np.arange(500) % 3))  # scikit-learn's digits as they come


def test_without_test_data_a_seeded_fifth_is_set_aside(tmp_path) -> None:
    x, y = np.arange(40 * 16, dtype="float32").reshape(40, 4, 4) / 640, np.arange(40) % 2
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, client=y, client_test=y[:3])
    data = load(str(tmp_path / "a.npz"))
    assert (data.x_train.shape, data.x_test.shape) == ((32, 1, 4, 4), (8, 1, 4, 4))
    both = torch.cat([data.x_train, data.x_test])[:, 0]
    torch.testing.assert_close(both.sort(0).values, torch.from_numpy(x))
    assert torch.equal(data.groups.train, data.y_train)
    assert torch.equal(data.groups.test, data.y_test)
    assert data.groups.array == "client"
    order = rng(0, "test split").permutation(40)  # as of parquet files
    assert torch.equal(data.x_test[:, 0], torch.from_numpy(x[np.sort(order[:8])]))
    for same in ((x, y), (torch.from_numpy(x), torch.from_numpy(y)), {"x_train": x, "y_train": y}):
        assert load(same).fingerprint() == data.fingerprint()
    assert len(load(str(tmp_path / "a.npz"), {"test": 0.5}).y_test) == 20
    with pytest.raises(UserError, match=r"data\.test must be between 0 and 1, not 2"):
        load(str(tmp_path / "a.npz"), {"test": 2})


def test_a_rare_class_is_trained_on_and_the_rest_is_set_aside_as_ever() -> None:
    x, y = np.arange(40, dtype="float32")[:, None] / 40, np.arange(40) % 2
    order = rng(0, "test split").permutation(40)
    data = load((x, np.where(np.isin(np.arange(40), order[[0, 3, 20]]), 2, y)))
    assert torch.equal(data.x_test, torch.from_numpy(x[np.sort(order[:8])]))  # class 2 is in both
    data = load((x, np.where(np.isin(np.arange(40), order[[0, 3]]), 2, y)))
    assert torch.equal(data.x_test, torch.from_numpy(x[np.sort(order[1:8])]))
    assert torch.equal(data.x_train, torch.from_numpy(x[np.sort([order[0], *order[8:]])]))
    rare = np.where(np.arange(40) == order[0], 2, y)
    data = Dataset.of_arrays(x, rare, classes=3)  # nothing need be trained on: these were never refused
    assert torch.equal(data.x_test, torch.from_numpy(x[np.sort(order[:8])]))


def test_too_few_samples_to_set_some_aside(tmp_path) -> None:
    x, y = np.zeros((50, 4), dtype="float32"), np.arange(50) % 2
    none_left = (
        r"arrays: of {} samples none is left to {} on with data\.test {}: give more of them, test data "
    )
    with pytest.raises(UserError, match=none_left.format(1, "test", "0.2")):
        load((x[:1], y[:1]))
    with pytest.raises(UserError, match=none_left.format(50, "train", "0.999")):
        Dataset.of_arrays(x, y, test=0.999, classes=2)
    for samples, share in ((5, 0.9), (50, 0.999)):
        np.savez(tmp_path / "a.npz", x_train=x[:samples], y_train=y[:samples])
        data = load(str(tmp_path / "a.npz"), {"test": share})
        assert (len(data.y_train), len(data.y_test)) == (2, samples - 2)


def test_arrays_of_other_names(tmp_path) -> None:
    np.savez(tmp_path / "a.npz", images=np.zeros(3), labels=np.zeros(3))
    with pytest.raises(
        UserError, match=r"a\.npz lacks x_train, y_train: it has images, labels; it needs x_train and y_train"
    ):
        load(str(tmp_path / "a.npz"))
    np.savez(tmp_path / "b.npz", **{f"a{i}": np.zeros(3) for i in range(10)})
    with pytest.raises(UserError, match=r"it has a0, .*, a7 and 2 more; it needs"):
        load(str(tmp_path / "b.npz"))


def test_npz_with_more_classes_than_it_shows(tmp_path) -> None:
    np.savez(tmp_path / "a.npz", **arrays(), classes=5)
    assert load(str(tmp_path / "a.npz")).classes == 5
    np.savez(tmp_path / "b.npz", **arrays(), classes=2)
    with pytest.raises(UserError, match=r"labels must lie in 0\.\.1; found 0\.\.2"):
        load(str(tmp_path / "b.npz"))
    np.savez(tmp_path / "c.npz", **arrays(), classes=["cat", "dog", "ox"])
    with pytest.raises(UserError, match="classes must be one whole number"):
        load(str(tmp_path / "c.npz"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"client": np.append(np.arange(19.0), np.nan)},
            "client does not name the client of 1 samples .* 19",
        ),
        ({"client": np.array(["", *"abababababababababa"])}, "client does not name the client of 1 samples"),
        ({"client": np.zeros((20, 2), int)}, r"client must be \[N\].* it is \[20, 2\]"),
        ({"client": np.array(3)}, r"client must be \[N\].* it is \[\]"),
        ({"client": np.zeros(19, int)}, "client has 19 entries for 20 samples"),
        (
            {"client": np.zeros(20, int), "client_test": np.full(20, np.nan)},
            "client_test does not name the client of 20 samples",
        ),
    ],
)
def test_a_faulty_client_array_is_refused(tmp_path, changes: dict, message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays(), **changes)
    with pytest.raises(UserError, match=message):
        load(str(tmp_path / "a.npz"))


def test_an_array_of_clients_that_is_not_there(tmp_path) -> None:
    np.savez(tmp_path / "a.npz", **arrays(), hospital=np.arange(20) % 3)
    assert load(str(tmp_path / "a.npz")).groups is None
    assert load(str(tmp_path / "a.npz"), {"client": "hospital"}).groups.names == ["0", "1", "2"]
    with pytest.raises(UserError, match=r"no array 'ward'.*: it has x_train, .*, hospital"):
        load(str(tmp_path / "a.npz"), {"client": "ward"})


@pytest.mark.parametrize("kind", ["U", "S"])
def test_clients_may_have_names_and_are_shown_by_them(tmp_path, fedcsd: Fedcsd, kind: str) -> None:
    names = np.array(["Zürich", "Bern", "Genf"])
    names = names if kind == "U" else np.char.encode(names, "utf-8")
    np.savez(tmp_path / "names.npz", **arrays(), client=names[np.arange(20) % 3])
    shown = fedcsd("partition", "--data", "names.npz", "--partition", "column", "--plot", "p.png")
    assert shown.returncode == 0, shown.stderr
    assert [name in shown.stdout for name in ("0: Bern", "1: Genf", "2: Zürich")] == [True] * 3
    other = fedcsd(
        "partition", "--data", "names.npz", "--partition", "iid", "--clients", "3", "--min-samples", "1"
    )
    assert "Bern" not in other.stdout
    said = "note: the file names 3 clients in its array client: --partition column uses them, --partition iid does not\n"
    assert (shown.stderr, other.stderr) == ("", said)


def test_files_that_are_not_npz(tmp_path) -> None:
    (tmp_path / "a.npz").write_bytes(b"not a zip")
    with pytest.raises(UserError, match="cannot read"):
        load(str(tmp_path / "a.npz"))
    np.savez_compressed(tmp_path / "a.npz", **broken())
    torn = bytearray((tmp_path / "a.npz").read_bytes())
    torn[60:120] = bytes(60)
    (tmp_path / "a.npz").write_bytes(torn)
    with pytest.raises(UserError, match="cannot read"):
        load(str(tmp_path / "a.npz"))
    (tmp_path / "a.csv").write_text("1,2")
    with pytest.raises(UserError, match=r"is not an \.npz file, a \.parquet file or a folder"):
        load(str(tmp_path / "a.csv"))
    np.savez(tmp_path / "pickled.npz", **broken(y_train=np.array([{}] * 20, dtype=object)))
    with pytest.raises(
        UserError, match=r"cannot read .*: its array y_train is not one of plain numbers or text"
    ):
        load(str(tmp_path / "pickled.npz"))


def test_other_kinds_of_archives(tmp_path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    with pytest.raises(UserError, match=r"not an \.npz archive"):
        load(str(tmp_path / "a.npz"))
    np.savez(tmp_path / "B.NPZ", **broken(y_train=np.arange(20) % 2 == 0, y_test=np.arange(20) % 2 == 0))
    (tmp_path / "B.NPZ.npz").rename(tmp_path / "B.NPZ") if (tmp_path / "B.NPZ.npz").exists() else None
    assert load(str(tmp_path / "B.NPZ")).classes == 2


def test_fingerprint_tells_data_apart() -> None:
    a, b = arrays(), arrays()
    assert load(a).fingerprint() == load(b).fingerprint()
    b["x_test"][0, 0, 0] ^= 1
    assert load(a).fingerprint() != load(b).fingerprint()


@pytest.mark.slow
@given(
    samples=st.integers(20, 400),
    classes=st.integers(1, 12),
    clients=st.integers(1, 12),
    beta=st.sampled_from([0.01, 0.1, 0.5, 5.0, 100.0]),
    seed=st.integers(0, 50),
    kind=st.sampled_from(["dirichlet", "iid"]),
)
def test_every_sample_has_exactly_one_client(
    samples: int, classes: int, clients: int, beta: float, seed: int, kind: str
) -> None:
    labels = np.random.default_rng(seed).integers(0, classes, samples)
    settings = Settings(clients=clients, beta=beta, partition_seed=seed, min_samples=2)
    try:
        parts = split(labels, settings, kind)
    except UserError:
        assume(kind == "iid" and clients * 2 <= samples)  # then there is no reason to refuse
        raise
    assert sorted(np.concatenate(parts).tolist()) == list(range(samples))
    assert min(map(len, parts)) >= 2
    again = split(labels, settings, kind)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def shares(parts: list[np.ndarray], labels: np.ndarray) -> float:
    """Mean share of a client's largest class."""
    return float(np.mean([np.bincount(labels[p]).max() / len(p) for p in parts]))


def test_smaller_beta_is_more_skewed_and_the_seed_is_its_own() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 5000)
    skews = [shares(split(labels, Settings(beta=beta)), labels) for beta in (0.1, 0.5, 100.0)]
    assert skews[0] > skews[1] > skews[2]
    assert skews[2] < 0.16
    a, b, c = (split(labels, Settings(seed=s, partition_seed=p)) for s, p in ((0, 0), (1, 0), (0, 1)))
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(a, c, strict=True))


def test_no_client_is_filled_far_beyond_its_share() -> None:
    """A client that has its fair share gets no more of the classes that follow."""
    labels = np.random.default_rng(0).integers(0, 10, 5000)
    for seed in range(20):
        sizes = [len(p) for p in split(labels, Settings(beta=0.1, partition_seed=seed))]
        assert max(sizes) <= 500 + np.bincount(labels).max()


def test_a_partition_that_cannot_be_met_ends_with_advice() -> None:
    labels = np.zeros(1000, dtype=int)
    with pytest.raises(UserError, match=r"1000 tries.*raise --beta, lower --clients or --min-samples"):
        split(labels, Settings(clients=10, beta=0.001, min_samples=50))


def test_dataset_is_what_python_users_get() -> None:
    assert isinstance(load(load("digits")), Dataset)
