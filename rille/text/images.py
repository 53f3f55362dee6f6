"""Pictures as patches, exactly as the release prepares them.

    scale = min(1, sqrt(max_patches / (max(1, W // p) max(1, H // p))), max_side p / W, max_side p / H)
    size  = max(1, int(side scale)), at most max_side p            bicubic, in the picture's own mode
    pixel = alpha colour + (1 - alpha) chessboard, cut to 8 bits   only where there is alpha
    pad right and below with 0 to multiples of merge p;  value = (pixel / 255 - mean) / std

Patches stand row by row, frame by frame. A picture's own mode means: palettes are resized by nearest neighbour, CMYK
before it becomes RGB. Of an animation the first frame counts, and orientation tags are not applied. Decided here, not
by the release: 16-bit grey keeps its high byte, as Pillow does with 16-bit colour (the release clips it to white), and
short videos, for which the release has no code. `preprocess_images` is the definition.
Source: `kimi_k3_vision_processing.py`, `media_utils.py`, `preprocessor_config.json` of the release.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from rille.misspelt import named
from rille.text.media import num_media_tokens
from rille.text.vocabulary import kind

MAX_PIXELS = 89_478_485  # of one picture before it is resized: what Pillow takes for harmless
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")
# Pillow knows others, some of which it hands to programs that it finds (EPS to Ghostscript).
FORMATS = ("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_BREAKS = {10: None, 13: None}  # of lines, left out
_IGNORED = ("config_type", "sample_fps", "temporal_merge_kernel_size")  # of videos that the release does not read

Source = str | Path | bytes | Image.Image


@dataclass(frozen=True)
class ImageConfig:
    """patch and merge sizes, limits in patches, normalisation, and the chessboard behind transparent pixels."""

    patch: int = 14
    merge: int = 2
    max_patches: int = 65_536
    max_side: int = 512
    max_frame_patches: int = 16_384
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    square: int = 8
    white: int = 255
    gray: int = 180

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that are no positive whole numbers, and deviations that are not positive."""
        for name in ("patch", "merge", "max_patches", "max_side", "max_frame_patches", "square"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"image config: {name} is {kind(value)}; it must be a whole number of at least 1")
        for name in ("mean", "std"):
            value = getattr(self, name)
            if (
                not isinstance(value, tuple)
                or len(value) != 3
                or not all(isinstance(number, int | float) for number in value)
            ):
                raise ValueError(f"image config: {name} is {kind(value)}; it must be three numbers")
        if not all(0 < number < math.inf for number in self.std):
            raise ValueError(f"image config: std is {self.std}; it must be positive")

    @classmethod
    def from_official(cls, config: Mapping[str, Any]) -> ImageConfig:
        """Read `preprocessor_config.json` (its `media_proc_cfg`). Raises ValueError for what is not known here."""
        given = config.get("media_proc_cfg", config) if isinstance(config, Mapping) else config
        board = (given.get("transparent_bg_config") or {}) if isinstance(given, Mapping) else {}
        if not isinstance(given, Mapping) or not isinstance(board, Mapping):
            raise ValueError("preprocessor_config.json: it and its transparent_bg_config must be objects")
        given, board = {key: given[key] for key in given if key != "transparent_bg_config"}, dict(board)
        demands = {"fixed_output_tokens": None, "transparent_bg_fill_stage": "after_resize"}
        board_demands = {"pattern": "chessboard", "chessboard_square_on_top_left": True}
        for source, wanted in ((given, demands), (board, board_demands)):
            for key, value in wanted.items():
                if source.pop(key, value) != value:
                    raise ValueError(f"preprocessor_config.json: only {key} = {value!r} is supported")
        names = {
            "patch_size": "patch",
            "merge_kernel_size": "merge",
            "in_patch_limit": "max_patches",
            "patch_limit_on_one_side": "max_side",
            "in_patch_limit_each_frame": "max_frame_patches",
            "image_mean": "mean",
            "image_std": "std",
            "chessboard_square_size": "square",
            "chessboard_white_value": "white",
            "chessboard_gray_value": "gray",
        }
        read = {key: value for key, value in {**given, **board}.items() if key not in _IGNORED}
        unknown = [key for key in read if key not in names]
        if unknown:
            raise ValueError(f"preprocessor_config.json: unknown key {unknown[0]!r}")
        fields: dict[str, Any] = {names[key]: value for key, value in read.items()}
        for key in ("mean", "std"):
            fields |= {key: tuple(fields[key])} if isinstance(fields.get(key), list) else {}
        return cls(**fields)


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures and short videos, packed.

    patches: float32 [P, 3, p, p], the patches of all items behind each other. grids: int64 [items, 3], (frames, rows,
    columns) in patches. sizes: original (width, height) in pixels, which `render` takes. digests: SHA-256 of what the
    model sees of each item, for caches.
    """

    patches: np.ndarray
    grids: np.ndarray
    sizes: tuple[tuple[int, int], ...]
    digests: tuple[str, ...]
    merge: int = 2

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Feature rows of each item."""
        return tuple(num_media_tokens(grid, self.merge) for grid in self.grids.tolist())


@named
def preprocess_images(items: Iterable[Source | Sequence[Source]], config: ImageConfig | None = None) -> Images:
    """Prepare pictures (a path, the bytes of a file, or a PIL image) and short videos (lists of such frames).

    The frames of a video have one size and share the patches of one picture, each at most `max_frame_patches`. Raises
    a one-line ValueError for a file that is missing, truncated, no picture, of no or too many pixels, or of a mode
    without a known way to 8-bit colour.
    """
    config = config if config is not None else ImageConfig()
    if not isinstance(config, ImageConfig):
        raise ValueError(f"config must be an ImageConfig, not {kind(config)}")
    if isinstance(items, Source) or not isinstance(items, Iterable):
        raise ValueError(f"images must be a list of pictures, not {kind(items)}; one picture: [picture]")
    patches, grids, sizes, digests = [], [], [], []
    for number, item in enumerate(items):
        sources = [item] if isinstance(item, Source) or not isinstance(item, Sequence) else item
        frames = [open_image(source, f"image {number}") for source in sources]
        if len({frame.size for frame in frames}) != 1:
            raise ValueError(f"image {number}: a video needs frames of one size, not {[f.size for f in frames]}")
        pixels = _pixels(frames, config)
        t, height, width, _ = pixels.shape
        grids.append((t, height // config.patch, width // config.patch))
        sizes.append(frames[0].size)
        digests.append(hashlib.sha256(f"{grids[-1]}".encode() + pixels.tobytes()).hexdigest())
        patches.append(_patches(pixels, config))
    side = config.patch
    return Images(
        patches=np.concatenate(patches) if patches else np.zeros((0, 3, side, side), np.float32),
        grids=np.array(grids, dtype=np.int64).reshape(-1, 3),
        sizes=tuple(sizes),
        digests=tuple(digests),
        merge=config.merge,
    )


def open_image(source: Source, name: str = "image") -> Image.Image:
    """A decoded picture of a mode that can become 8-bit colour. Raises ValueError as `preprocess_images` does."""
    image = source
    try:
        if isinstance(source, bytes):
            image = Image.open(io.BytesIO(source), formats=FORMATS)
        elif isinstance(source, str | Path):
            name = f"{name} ({source})"
            image = Image.open(source, formats=FORMATS)
        if not isinstance(image, Image.Image):
            raise ValueError(f"{name} must be a path, bytes or a PIL image, not {kind(source)}")
        _check_size(image, name)
        image.load()
    except Image.DecompressionBombError:
        raise ValueError(f"{name} has more than the {MAX_PIXELS:,} pixels that are allowed") from None
    except UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise ValueError(
            f"{name} cannot be read: it is no picture of a known format ({known}), or its beginning is lost"
        ) from None
    except (OSError, SyntaxError, EOFError, RuntimeError, TypeError) as error:  # readers differ
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ValueError(f"{name} cannot be read: {why}") from None
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if image.mode not in _MODES:
        raise ValueError(f"{name} has the mode {image.mode!r}; convert it to one of {', '.join(_MODES)}")
    return image


def decode_data_url(url: str) -> bytes:
    """The bytes of a `data:image/...;base64,...` URL, whose body may be broken into lines, as by many encoders. Raises
    ValueError for anything else."""
    head, comma, body = url.partition(",")
    kind, body = head.lower(), body.translate(_BREAKS)
    if not (comma and kind.startswith("data:image/") and kind.endswith(";base64")):
        raise ValueError(f"an image URL must be data:image/...;base64,..., not {url[:40]!r}")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the image URL's base64 is damaged ({error})") from None


def fit(width: int, height: int, config: ImageConfig, num_frames: int = 1) -> tuple[int, int]:
    """The (width, height) in pixels that a picture is resized to, before padding."""
    patch, side = config.patch, config.max_side * config.patch
    limit = config.max_patches if num_frames == 1 else min(config.max_frame_patches, config.max_patches // num_frames)
    area = max(1.0, width // patch) * max(1.0, height // patch)
    scale = min(1.0, math.sqrt(limit / area), side / width, side / height)
    return min(max(1, int(width * scale)), side), min(max(1, int(height * scale)), side)


def _check_size(image: Image.Image, name: str) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise ValueError(f"{name} has no pixels ({width} x {height})")
    if width * height > MAX_PIXELS:
        raise ValueError(f"{name} has {width} x {height} pixels, more than the {MAX_PIXELS:,} that are allowed")


def _pixels(frames: Sequence[Image.Image], config: ImageConfig) -> np.ndarray:
    """uint8 [t, H, W, 3]: resized, on their background, padded."""
    size = fit(*frames[0].size, config, len(frames))
    unit = config.merge * config.patch
    width, height = (math.ceil(side / unit) * unit for side in size)
    pixels = np.zeros((len(frames), height, width, 3), np.uint8)
    for i, frame in enumerate(frames):
        pixels[i, : size[1], : size[0]] = _opaque(frame.resize(size, Image.Resampling.BICUBIC), config)
    return pixels


def _opaque(image: Image.Image, config: ImageConfig) -> np.ndarray:
    """uint8 [H, W, 3]: transparent parts show the chessboard, white in its top left corner."""
    if image.mode == "RGB" or ("A" not in image.getbands() and "transparency" not in image.info):
        return np.asarray(image.convert("RGB"))
    rgba = np.asarray(image.convert("RGBA"))
    rows, columns = (np.arange(side) // config.square for side in rgba.shape[:2])
    is_gray = (rows[:, None] + columns[None, :]) % 2 == 1
    board = np.where(is_gray, np.uint8(config.gray), np.uint8(config.white))[..., None]
    alpha = rgba[..., 3:].astype(np.float32) / np.float32(255)
    return (alpha * rgba[..., :3] + (1 - alpha) * board).astype(np.uint8)


def _patches(pixels: np.ndarray, config: ImageConfig) -> np.ndarray:
    """float32 [P, 3, p, p]. A table holds the normalised value of each of the 256 pixel values and three colours."""
    values = (np.arange(256) / 255.0).astype(np.float32)
    mean, std = np.array(config.mean), np.array(config.std)
    table = ((values[:, None] - mean).astype(np.float32) * (1.0 / std)).astype(np.float32)
    t, height, width, _ = pixels.shape
    patch = config.patch
    cut = pixels.reshape(t, height // patch, patch, width // patch, patch, 3).transpose(0, 1, 3, 5, 2, 4)
    cut = cut.reshape(-1, 3, patch, patch)
    return np.stack([table[cut[:, colour], colour] for colour in range(3)], axis=1)
