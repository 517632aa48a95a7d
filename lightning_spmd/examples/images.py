"""Folders of images, and shapes that are drawn where there is none: a LightningDataModule with augmentation."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm"})
"""Of the files that count as images."""
SHAPES = ("circle", "ring", "square", "frame", "triangle", "cross", "stripes", "checkers")
"""What is drawn where there is no folder."""

Item = tuple[Tensor, int]
"""An image, float ``[3, size, size]`` between -1 and 1, and its class."""


class DrawnShapes(Dataset[Item]):
    """Pictures of eight shapes, each drawn when it is asked for: anywhere, of any size, angle and colours, with noise.

    The number of a picture decides how it looks, so every process and every epoch sees the same ones.

    Args:
        count: How many there are.
        first: Number of the first one; pictures with other numbers are other pictures.
        size: Height and width in pixels.
    """

    def __init__(self, count: int, first: int, size: int) -> None:
        self.count = count
        self.first = first
        self.size = size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < self.count:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self.first + index)
        kind = int(torch.randint(len(SHAPES), (), generator=generator))
        x0, y0, radius, angle, *colours = torch.rand(10, generator=generator).tolist()
        radius = 0.25 + 0.35 * radius
        axis = torch.linspace(-1, 1, self.size)
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        x, y = x - (x0 - 0.5) * (1 - radius), y - (y0 - 0.5) * (1 - radius)
        cosine, sine = math.cos(2 * math.pi * angle), math.sin(2 * math.pi * angle)
        u, v = (cosine * x + sine * y) / radius, (cosine * y - sine * x) / radius
        inside = _inside(SHAPES[kind], u, v).float()
        front, back = torch.tensor(colours[:3]), torch.tensor(colours[3:])
        # Colours that are too near to one another are pushed apart, or nobody could see the shape.
        front = torch.where((front - back).abs().sum() < 0.6, (back + 0.5) % 1, front)
        image = back[:, None, None] + (front - back)[:, None, None] * inside
        noise = 0.08 * torch.randn(image.shape, generator=generator)
        return (image + noise).clamp(0, 1) * 2 - 1, kind


def _inside(shape: str, u: Tensor, v: Tensor) -> Tensor:
    """Which points, given relative to the shape's own centre, size and angle, it covers."""
    distance, square = u.hypot(v), torch.maximum(u.abs(), v.abs())
    within = square < 0.9
    covers: dict[str, Tensor] = {
        "circle": distance < 1,
        "ring": (distance < 1) & (distance > 0.6),
        "square": within,
        "frame": within & (square > 0.5),
        "triangle": (v > -0.6) & (v + 1.8 * u.abs() < 1.2),
        "cross": (torch.minimum(u.abs(), v.abs()) < 0.3) & (square < 1),
        "stripes": within & ((3 * u).floor() % 2 == 0),
        "checkers": within & (((2.2 * u).floor() + (2.2 * v).floor()) % 2 == 0),
    }
    return covers[shape]


class ImageFiles(Dataset[Item]):
    """Image files, read, cut to their middle square and resized when they are asked for.

    Args:
        files: Each file and its class.
        size: Height and width in pixels.
    """

    def __init__(self, files: list[tuple[Path, int]], size: int) -> None:
        self.files = files
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Item:
        from PIL import Image, ImageOps

        file, kind = self.files[index]
        try:
            with Image.open(file) as picture:
                fitted = ImageOps.fit(picture.convert("RGB"), (self.size, self.size))
        except OSError as error:
            raise ValueError(f"--data.path: {file} cannot be read as an image: {error}. Mend or remove it.") from error
        pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
        return pixels.view(self.size, self.size, 3).permute(2, 0, 1).float() / 127.5 - 1, kind


class Augmented(Dataset[Item]):
    """Images, shifted by up to an eighth and mirrored by chance, anew each time.

    Args:
        images: What to augment.
    """

    def __init__(self, images: Dataset[Item]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Item:
        image, kind = self.images[index]
        size = image.shape[-1]
        margin = size // 8
        padded = F.pad(image, (margin,) * 4, mode="reflect")
        top, left = torch.randint(2 * margin + 1, (2,)).tolist()
        image = padded[:, top : top + size, left : left + size]
        return (image.flip(-1) if torch.rand(()) < 0.5 else image), kind


class Images(LightningDataModule):
    """Images by class: a folder of your own, or shapes that are drawn.

    Batches are pairs of float ``[batch_size, 3, size, size]`` between -1 and 1 and classes, int64 ``[batch_size]``.
    Training images are shifted and mirrored by chance, validation images are not.

    Args:
        path: A folder with one subfolder of images for each class; or one with such folders as ``train`` and ``val`` in
            it. Needs ``pip install 'lightning-spmd[images]'``. None draws eight kinds of shapes and needs nothing: an
            honest task, for their place, size, angle and colours vary, but no photographs.
        size: Height and width that images get.
        batch_size: Images per batch and *per device*.
        num_workers: Processes that load batches; 0 loads in the training process.
        validation_fraction: Share of the images kept for validation where the folder does not say which.
        drawn: Number of shapes to draw, where there is no ``path``.

    Raises:
        ValueError: If an argument is out of range; at ``setup``, if there are too few images or classes.
        FileNotFoundError: At ``setup``, if ``path`` does not exist.
        ModuleNotFoundError: At ``setup``, if there is a ``path`` and Pillow is not installed.
    """

    def __init__(
        self,
        path: str | None = None,
        size: int = 32,
        batch_size: int = 64,
        num_workers: int = 0,
        validation_fraction: float = 0.1,
        drawn: int = 8192,
    ) -> None:
        super().__init__()
        if size < 8 or batch_size < 1 or drawn < 16:
            raise ValueError(
                f"Images(size={size}, batch_size={batch_size}, drawn={drawn}): size must be at least 8, batch_size at "
                "least 1, drawn at least 16."
            )
        if not 0 < validation_fraction < 1:
            raise ValueError(f"Images(validation_fraction={validation_fraction}): must lie between 0 and 1.")
        self.path = path
        self.size = size
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.validation_fraction = validation_fraction
        self.drawn = drawn
        self.classes: list[str] | None = None
        """Names of the classes; None before ``setup``."""
        self._parts: tuple[Dataset[Item], Dataset[Item]] | None = None

    @override
    def setup(self, stage: str) -> None:
        """Find the images, once per process."""
        if self._parts is not None:
            return
        if self.path is None:
            held_out = max(1, int(self.drawn * self.validation_fraction))
            self.classes = list(SHAPES)
            self._parts = (
                DrawnShapes(self.drawn - held_out, held_out, self.size),
                DrawnShapes(held_out, 0, self.size),
            )
            return
        self.classes, train, validation = find_images(self.path, self.validation_fraction)
        self._parts = ImageFiles(train, self.size), ImageFiles(validation, self.size)

    @override
    def train_dataloader(self) -> DataLoader[Item]:
        """Training images, augmented and shuffled; an incomplete last batch is left out."""
        return self._loader(0, lambda images: Augmented(images), shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Item]:
        """Validation images as they are."""
        return self._loader(1, lambda images: images, shuffle=False)

    @override
    def test_dataloader(self) -> DataLoader[Item]:
        """The validation images."""
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> DataLoader[Item]:
        """The validation images."""
        return self.val_dataloader()

    def _loader(self, part: int, change: Callable[[Dataset[Item]], Dataset[Item]], *, shuffle: bool) -> DataLoader[Any]:
        if self._parts is None:
            raise RuntimeError("Images has not found its images yet: call setup('fit') before asking for a loader.")
        images = change(self._parts[part])
        return DataLoader(
            images,
            batch_size=self.batch_size,
            shuffle=shuffle,
            # Never so strict that a small folder gives no batch at all.
            drop_last=shuffle and len(images) >= self.batch_size,  # type: ignore[arg-type]
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


Files = list[tuple[Path, int]]
"""Image files with the number of their class."""


def find_images(path: str, validation_fraction: float) -> tuple[list[str], Files, Files]:
    """Classes, training files and validation files of a folder.

    Args:
        path: See :class:`Images`.
        validation_fraction: Likewise.

    Raises:
        ModuleNotFoundError: If Pillow is not installed.
        FileNotFoundError: If ``path`` is no folder.
        ValueError: If it has fewer than two classes, or too few images for both parts.
    """
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "--data.path needs Pillow to read images. Install it with: pip install 'lightning-spmd[images]'"
        ) from error
    root = Path(path).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(
            f"--data.path={path!r} is not a folder (seen from {os.getcwd()}). Give one with a subfolder of images for "
            "each class, or leave --data.path out to train on shapes that are drawn."
        )
    parted = (root / "train").is_dir() and (root / "val").is_dir()
    top = root / "train" if parted else root
    classes = sorted(d.name for d in top.iterdir() if d.is_dir() and not d.name.startswith("."))
    if len(classes) < 2:
        raise ValueError(
            f"--data.path={path!r}: {top} has {len(classes)} subfolders. Give one subfolder of images for each of at "
            "least two classes."
        )
    unknown = sorted({d.name for d in (root / "val").iterdir() if d.is_dir()} - {*classes}) if parted else []
    if unknown:
        raise ValueError(f"--data.path={path!r}: {root / 'val'} has classes that {top} has not: {', '.join(unknown)}.")
    # Every k-th file, so that both parts have what an ordered folder begins and ends with.
    every = max(2, round(1 / validation_fraction))
    train, validation = Files(), Files()
    for number, name in enumerate(classes):
        found = [(file, number) for file in _images_in(top / name)]
        if parted:
            train += found
            validation += [(file, number) for file in _images_in(root / "val" / name)]
        else:
            train += [entry for place, entry in enumerate(found) if place % every]
            validation += found[::every]
        if not found:
            raise ValueError(
                f"--data.path={path!r}: {top / name} holds no image. Names of images end with one of "
                f"{', '.join(sorted(ENDINGS))}."
            )
    if not train or not validation:
        raise ValueError(
            f"--data.path={path!r} leaves {len(train)} images for training and {len(validation)} for validation. Give "
            "at least two of each class."
        )
    return classes, train, validation


def _images_in(folder: Path) -> list[Path]:
    """Image files below a folder, in an order that no file system decides."""
    return sorted(f for f in folder.rglob("*") if f.suffix.lower() in ENDINGS and not f.name.startswith("."))
