"""Compare augmentation with small images worked out by hand, plain NumPy and Pillow."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from fedcsd.data.augment import AUGMENTATIONS, Augmentation
from fedcsd.errors import UserError

NO_FLIP, FLIP, STRAIGHT = 0.75, 0.25, 0.5
THREE = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def numbers(
    row: float = 0.5, column: float = 0.5, flip: float = NO_FLIP, turn: float = STRAIGHT, batch: int = 1
) -> Tensor:
    return torch.tensor([[row, column, flip, turn]], dtype=torch.float32).repeat(batch, 1)


def one(augmentation: Augmentation, image: object, drawn: Tensor) -> list[list[int]]:
    images = torch.as_tensor(image, dtype=torch.uint8)[None, None]
    result: list[list[int]] = augmentation(images, drawn)[0, 0].tolist()
    return result


def random_images(*shape: int, seed: int = 0) -> Tensor:
    """Without zeros, so that what comes from outside is told apart."""
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("row", "column", "expected"),
    [
        (0.0, 0.0, [[0, 0, 0], [0, 1, 2], [0, 4, 5]]),
        (0.5, 0.5, THREE),
        (0.99, 0.5, [[4, 5, 6], [7, 8, 9], [0, 0, 0]]),
        (0.5, 0.99, [[2, 3, 0], [5, 6, 0], [8, 9, 0]]),
        (0.0, 0.99, [[0, 0, 0], [2, 3, 0], [5, 6, 0]]),
    ],
)
def test_crop_by_hand(row: float, column: float, expected: list[list[int]]) -> None:
    assert one(Augmentation(crop=1), THREE, numbers(row, column)) == expected


def test_a_crop_as_large_as_the_image_may_leave_nothing_of_it() -> None:
    assert one(Augmentation(crop=3), THREE, numbers(row=0)) == [[0] * 3] * 3
    assert one(Augmentation(crop=5), THREE, numbers()) == THREE


def test_flip_by_hand() -> None:
    image = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert one(Augmentation(flip=True), image, numbers(flip=FLIP)) == [[4, 3, 2, 1], [8, 7, 6, 5]]
    assert one(Augmentation(flip=True), image, numbers(flip=0.5)) == image
    assert one(Augmentation(crop=1), image, numbers(flip=FLIP)) == image


def test_a_quarter_turn_by_hand() -> None:
    quarter = Augmentation(rotate=90)
    assert one(quarter, THREE, numbers(turn=1)) == [[3, 6, 9], [2, 5, 8], [1, 4, 7]]
    assert one(quarter, THREE, numbers(turn=0)) == [[7, 4, 1], [8, 5, 2], [9, 6, 3]]
    assert one(quarter, THREE, numbers(turn=STRAIGHT)) == THREE
    assert one(Augmentation(rotate=180), THREE, numbers(turn=0)) == [[9, 8, 7], [6, 5, 4], [3, 2, 1]]


def test_an_eighth_of_a_turn_by_hand() -> None:
    # the ring of eight moves on by one place: √2 away from the centre is still nearest to a neighbour
    assert one(Augmentation(rotate=45), THREE, numbers(turn=1)) == [[2, 3, 6], [1, 5, 9], [4, 7, 8]]


@pytest.mark.parametrize("size", [1, 4, 5, 31, 32])
@pytest.mark.parametrize("quarters", [-2, -1, 0, 1])
def test_quarter_turns_are_exact(size: int, quarters: int) -> None:
    images = random_images(2, 3, size, size)
    turned = Augmentation(rotate=180)(images, numbers(turn=0.5 + quarters / 4, batch=2))
    assert torch.equal(turned, images.rot90(quarters, (2, 3)))


def test_a_quarter_turn_of_a_rectangle_leaves_its_sides_empty() -> None:
    wide = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert one(Augmentation(rotate=90), wide, numbers(turn=1)) == [[0, 3, 7, 0], [0, 2, 6, 0]]


@pytest.mark.parametrize("flip", [FLIP, NO_FLIP])
@pytest.mark.parametrize("turn", [0, STRAIGHT, 1])
def test_crop_then_flip_then_rotate(flip: float, turn: float) -> None:
    image = np.arange(1, 17).reshape(4, 4)
    for down in range(5):
        for right in range(5):
            expected = np.pad(image, 2)[down : down + 4, right : right + 4]
            expected = expected[:, ::-1] if flip < 0.5 else expected
            expected = np.rot90(expected, {0: -1, STRAIGHT: 0, 1: 1}[turn])
            drawn = numbers((down + 0.5) / 5, (right + 0.5) / 5, flip, turn)
            assert one(Augmentation(2, True, 90), image, drawn) == expected.tolist()


def slowly(augmentation: Augmentation, image: np.ndarray, drawn: np.ndarray) -> list[list[list[set[float]]]]:
    """Follow the definition step by step and pixel by pixel, in float64: return for each pixel the
    value it has, or the two or four it may have when its source lies on the edge between pixels."""
    channels, height, width = image.shape
    crop, (row, column, mirror, turn) = augmentation.crop, drawn.tolist()
    top, left = math.floor(row * (2 * crop + 1)), math.floor(column * (2 * crop + 1))
    image = np.pad(image, [(0, 0), (crop, crop), (crop, crop)])[:, top : top + height, left : left + width]
    if augmentation.flip and mirror < 0.5:
        image = image[:, :, ::-1]
    # anticlockwise with rows counted downwards; back from the result, hence the negative angle
    back = -math.radians(augmentation.rotate * (2 * turn - 1))
    centre = complex((width - 1) / 2, -(height - 1) / 2)

    def nearest(value: float) -> set[int]:
        return {math.floor(value + 0.5 + e) for e in (-1e-4, 1e-4)} if augmentation.rotate else {round(value)}

    def value(channel: int, i: int, j: int) -> float:
        return float(image[channel, i, j]) if 0 <= i < height and 0 <= j < width else 0.0

    result = []
    for channel in range(channels):
        result.append([[set[float]() for _ in range(width)] for _ in range(height)])
        for i in range(height):
            for j in range(width):
                turning = complex(math.cos(back), math.sin(back))
                source = centre + (complex(j, -i) - centre) * turning
                result[-1][i][j] = {
                    value(channel, a, b) for a in nearest(-source.imag) for b in nearest(source.real)
                }
    return result


UNIT = st.floats(0, 1, width=32, exclude_max=True)


@settings(max_examples=150)
@given(
    augmentation=st.builds(Augmentation, st.integers(0, 4), st.booleans(), st.just(0.0) | st.floats(0, 180)),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 7), st.integers(1, 7)),
    kind=st.sampled_from([torch.uint8, torch.float32, torch.float64, torch.bfloat16]),
    data=st.data(),
)
def test_equals_the_definition_pixel_by_pixel(
    augmentation: Augmentation, shape: tuple[int, int, int, int], kind: torch.dtype, data: st.DataObject
) -> None:
    drawn = torch.tensor([data.draw(st.tuples(*[UNIT] * 4)) for _ in range(shape[0])], dtype=torch.float32)
    images = random_images(*shape).to(kind)
    results = augmentation(images, drawn)
    assert (results.dtype, results.shape) == (images.dtype, images.shape)
    for image, given_numbers, result in zip(images, drawn, results, strict=True):
        expected = slowly(augmentation, image.double().numpy(), given_numbers.double().numpy())
        for c, i, j in np.ndindex(*shape[1:]):
            assert float(result[c, i, j]) in expected[c][i][j]


@pytest.mark.parametrize(("height", "width"), [(32, 32), (31, 31), (20, 33)])
def test_turns_as_pillow_does(height: int, width: int) -> None:
    """torchvision turns images with Pillow; its fixed-point coordinates differ on edges between pixels."""
    generator = torch.Generator().manual_seed(0)
    images = random_images(50, 1, height, width)
    drawn = torch.rand(50, 4, generator=generator)
    turned = Augmentation(rotate=30)(images, drawn)
    angles = ((2 * drawn[:, 3].double() - 1) * 30).tolist()
    pillow = [
        np.asarray(Image.fromarray(image[0].numpy()).rotate(a))
        for image, a in zip(images, angles, strict=True)
    ]
    assert (turned[:, 0].numpy() == np.stack(pillow)).mean() > 0.999


@pytest.mark.parametrize(
    ("name", "crop", "flip", "degrees"),
    [("cifar", 4, True, 15), ("office", 0, True, 30)],
    ids=["cifar", "office"],
)
def test_the_paper_s_augmentations(name: str, crop: int, flip: bool, degrees: float) -> None:
    """The constants are the paper's; NumPy crops and flips, Pillow turns (as above, with other edges between pixels)."""
    images, augmentation = random_images(200, 1, 32, 32), AUGMENTATIONS[name]
    drawn = augmentation.draw(200, torch.Generator().manual_seed(0))
    expected = []
    for image, (down, right, mirror, turn) in zip(images[:, 0].numpy(), drawn.double().tolist(), strict=True):
        top, left = int(down * (2 * crop + 1)), int(right * (2 * crop + 1))
        image = np.pad(image, crop)[top : top + 32, left : left + 32]
        image = image[:, ::-1] if flip and mirror < 0.5 else image
        expected.append(np.asarray(Image.fromarray(image).rotate((2 * turn - 1) * degrees)))
    assert (augmentation(images, drawn)[:, 0].numpy() == np.stack(expected)).mean() > 0.999


def test_none_returns_the_images_unchanged() -> None:
    images = random_images(3, 3, 5, 5)
    none = AUGMENTATIONS["none"]
    assert none(images, none.draw(3, torch.Generator())) is images
    assert [name for name, a in AUGMENTATIONS.items() if not a.active] == ["none"]
    assert all(a.active for a in (Augmentation(crop=1), Augmentation(flip=True), Augmentation(rotate=0.1)))


def test_without_rotation_nothing_is_rounded() -> None:
    images = random_images(2, 1, 3, 3000)
    assert torch.equal(Augmentation(flip=True)(images, numbers(flip=FLIP, turn=0.9, batch=2)), images.flip(3))
    assert torch.equal(Augmentation(rotate=15)(images, numbers(batch=2)), images)


def test_the_images_given_are_not_changed() -> None:
    images = random_images(8, 3, 6, 6)
    before = images.clone()
    AUGMENTATIONS["cifar"](images, torch.rand(8, 4))
    assert torch.equal(images, before)


def test_any_layout_in_memory_and_any_batch() -> None:
    cifar = AUGMENTATIONS["cifar"]
    images, drawn = random_images(4, 3, 8, 6), cifar.draw(4, torch.Generator().manual_seed(0))
    expected = cifar(images, drawn)
    assert torch.equal(cifar(images.to(memory_format=torch.channels_last), drawn), expected)
    assert torch.equal(cifar(images.transpose(2, 3).contiguous().transpose(2, 3), drawn), expected)
    assert cifar(images[:0], drawn[:0]).shape == (0, 3, 8, 6)


def test_the_outside_is_zero_even_beside_pixels_that_are_not_finite() -> None:
    images = torch.full((1, 1, 4, 4), math.inf)
    result = Augmentation(crop=1)(images, numbers(row=0))
    assert result[0, 0, 0].tolist() == [0.0] * 4
    assert bool(result[0, 0, 1:].isinf().all())


def test_the_same_seed_gives_the_same_images() -> None:
    cifar, images = AUGMENTATIONS["cifar"], random_images(16, 3, 32, 32)
    a, b, c = (cifar(images, cifar.draw(16, torch.Generator().manual_seed(seed))) for seed in (5, 5, 6))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize("name", ["cifar", "office"])
def test_a_sample_depends_on_itself_and_its_numbers_only(name: str) -> None:
    augmentation, images = AUGMENTATIONS[name], random_images(32, 3, 32, 24)
    drawn = augmentation.draw(32, torch.Generator().manual_seed(1))
    together = augmentation(images, drawn)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(2))
    assert torch.equal(augmentation(images[order], drawn[order]), together[order])
    for i in range(32):
        assert torch.equal(augmentation(images[i : i + 1], drawn[i : i + 1]), together[i : i + 1])


def test_what_is_drawn() -> None:
    drawn = Augmentation().draw(10_000, torch.Generator().manual_seed(0))
    assert (drawn.shape, drawn.dtype, drawn.device.type) == ((10_000, 4), torch.float32, "cpu")
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) < 1


def test_flips_and_crops_are_as_often_as_they_should_be() -> None:
    """Read off the images: each pixel says where it is, so the middle one says where it came from."""
    places = torch.arange(16 * 16).view(1, 1, 16, 16).float().repeat(20_000, 1, 1, 1)
    augmentation = Augmentation(crop=4, flip=True)
    result = augmentation(places, augmentation.draw(20_000, torch.Generator().manual_seed(0)))
    middle, beside = result[:, 0, 8, 8], result[:, 0, 8, 7]
    flipped = middle < beside
    assert float(flipped.float().mean()) == pytest.approx(0.5, abs=0.02)
    down = (middle // 16 - 8 + 4).long()
    right = (middle % 16 - torch.where(flipped, 7, 8) + 4).long()
    for offsets in (down, right):
        shares = offsets.bincount(minlength=9) / 20_000
        assert len(shares) == 9
        torch.testing.assert_close(shares, torch.full((9,), 1 / 9), atol=0.012, rtol=0)
    assert abs(float(torch.corrcoef(torch.stack([down, right]).float())[0, 1])) < 0.03


@pytest.mark.slow
def test_angles_span_the_whole_range() -> None:
    """Read off the images: columns of the pixels above and below the centre tell the angle."""
    columns = torch.arange(129.0).expand(2000, 1, 129, 129)
    augmentation = Augmentation(rotate=15)
    result = augmentation(columns, augmentation.draw(2000, torch.Generator().manual_seed(0)))
    angles = torch.rad2deg(torch.asin((result[:, 0, 24, 64] - result[:, 0, 104, 64]) / 80))
    assert float(angles.min()) == pytest.approx(-15, abs=1)
    assert float(angles.max()) == pytest.approx(15, abs=1)
    shares = torch.histc(angles, 3, -15.75, 15.75) / 2000
    torch.testing.assert_close(shares, torch.full((3,), 1 / 3), atol=0.04, rtol=0)


@pytest.mark.parametrize("values", [{"crop": -1}, {"rotate": -1.0}, {"rotate": math.nan}])
def test_values_without_a_meaning(values: dict[str, float]) -> None:
    with pytest.raises(UserError, match="must be 0 or more"):
        Augmentation(**values)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cifar", "office"])
def test_a_gpu_chooses_the_same_pixels_also_in_a_graph(name: str) -> None:
    augmentation, images = AUGMENTATIONS[name], random_images(512, 3, 32, 32)
    drawn = augmentation.draw(512, torch.Generator().manual_seed(0))
    expected = augmentation(images, drawn)
    there, seen = images.cuda(), torch.full_like(drawn, 0.5).cuda()
    assert torch.equal(augmentation(there, drawn.cuda()).cpu(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = augmentation(there, seen)
    seen.copy_(drawn)
    graph.replay()
    assert torch.equal(result.cpu(), expected)
