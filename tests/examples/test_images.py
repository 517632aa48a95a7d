"""Images: folders of them, and shapes that are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from lightning_spmd.examples.images import SHAPES, Augmented, DrawnShapes, Images, find_images


def draw(folder: Path, classes: dict[str, int]) -> Path:
    """Images of one colour for each class."""
    for number, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (20, 12 + index), (80 * number, 0, 255)).save(folder / name / f"{index}.png")
    return folder


def test_drawn_shapes_are_the_same_everywhere_and_all_kinds_occur() -> None:
    shapes = DrawnShapes(64, first=3, size=16)
    again, overlapping = DrawnShapes(64, first=3, size=16), DrawnShapes(60, first=7, size=16)
    assert {shapes[i][1] for i in range(64)} == set(range(len(SHAPES)))
    for index in (0, 30):
        assert torch.equal(shapes[index][0], again[index][0])
    assert torch.equal(shapes[4][0], overlapping[0][0])
    image = shapes[0][0]
    assert image.shape == (3, 16, 16)
    assert image.min() >= -1
    assert image.max() <= 1
    with pytest.raises(IndexError):
        shapes[64]


def test_training_and_validation_share_no_shape() -> None:
    data = Images(drawn=40, validation_fraction=0.25, batch_size=5)
    data.setup("fit")
    train, validation = data._parts
    assert (len(train), len(validation)) == (30, 10)
    assert (validation.first + len(validation), train.first) == (10, 10)


def test_augmentation_shifts_and_mirrors_and_leaves_validation_alone() -> None:
    torch.manual_seed(0)
    shapes = DrawnShapes(1, first=0, size=16)
    seen = [Augmented(shapes)[0] for _ in range(8)]
    assert {kind for _, kind in seen} == {shapes[0][1]}
    assert len({tuple(image.flatten().tolist()) for image, _ in seen}) > 4
    data = Images(drawn=16, batch_size=1)
    data.setup("fit")
    assert torch.equal(next(iter(data.val_dataloader()))[0][0], DrawnShapes(1, 0, 32)[0][0])


def test_a_folder_is_split_by_class_and_each_image_counts_once(tmp_path: Path) -> None:
    classes, train, validation = find_images(str(draw(tmp_path, {"cat": 10, "dog": 5, ".hidden": 1})), 0.2)
    assert classes == ["cat", "dog"]
    assert [sum(kind == k for _, kind in train) for k in (0, 1)] == [8, 4]
    assert [sum(kind == k for _, kind in validation) for k in (0, 1)] == [2, 1]
    assert not {file for file, _ in train} & {file for file, _ in validation}


def test_folders_train_and_val_say_which_is_which(tmp_path: Path) -> None:
    draw(tmp_path / "train", {"cat": 2, "dog": 3})
    draw(tmp_path / "val", {"cat": 1, "dog": 1})
    classes, train, validation = find_images(str(tmp_path), 0.1)
    assert (classes, len(train), len(validation)) == (["cat", "dog"], 5, 2)
    draw(tmp_path / "val", {"emu": 1})
    with pytest.raises(ValueError, match="has classes that .*train has not: emu"):
        find_images(str(tmp_path), 0.1)


def test_images_are_read_cut_and_resized(tmp_path: Path) -> None:
    data = Images(str(draw(tmp_path, {"cat": 3, "dog": 3})), size=8, batch_size=2)
    data.setup("fit")
    images, kinds = next(iter(data.val_dataloader()))
    assert images.shape == (2, 3, 8, 8)
    assert kinds.tolist() == [0, 1]
    assert images[1, :, 4, 4].tolist() == pytest.approx([80 / 127.5 - 1, -1, 1])


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"cat": 0, "dog": 2}, "cat holds no image"),
        ({"cat": 3}, "has 1 subfolders"),
        ({"cat": 1, "dog": 1}, "leaves 0 images for training"),
    ],
)
def test_too_little_is_refused(tmp_path: Path, files: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_images(str(draw(tmp_path, files)), 0.1)


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    draw(tmp_path, {"cat": 3, "dog": 3})
    (tmp_path / "cat" / "1.png").write_bytes(b"no image")
    data = Images(str(tmp_path), size=8)
    data.setup("fit")
    with pytest.raises(ValueError, match=r"cat/1.png cannot be read as an image"):
        list(data._parts[0])
