"""Pictures: sizes and pixels as the release prepares them, every kind of file, and files that are none."""

import io
import math
import struct
import warnings
import zlib
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rille.text.chat import render
from rille.text.images import FORMATS, MAX_PIXELS, ImageConfig, decode_data_url, fit, open_image, preprocess_images
from rille.text.media import expand_media, num_media_tokens
from rille.text.tokenizer import Tokenizer

CONFIG = ImageConfig()
SMALL = ImageConfig(patch=4, merge=2, max_patches=64, max_side=12, max_frame_patches=16)
OFFICIAL = {
    "in_patch_limit": 65536,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 16384,
    "sample_fps": 8.0,
    "temporal_merge_kernel_size": 4,
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    },
    "transparent_bg_fill_stage": "after_resize",
    "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
}


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.frombytes(mode, (width, height), values.tobytes())


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def pixels_of(images, config: ImageConfig = CONFIG) -> np.ndarray:
    """The uint8 picture [H, W, 3] behind the patches of one item."""
    (t, h, w), p = images.grids[0], config.patch
    values = np.rint((images.patches.astype(np.float64) * config.std[0] + config.mean[0]) * 255).astype(np.uint8)
    return values.reshape(t, h, w, 3, p, p).transpose(0, 1, 4, 2, 5, 3).reshape(t, h * p, w * p, 3)[0]


# --- geometry ---


@pytest.mark.parametrize(
    ("size", "tokens", "grid"),
    [
        ((611, 437), 352, (1, 32, 44)),
        ((224, 224), 64, (1, 16, 16)),
        ((1920, 1080), 2691, (1, 78, 138)),
        ((1, 1), 1, (1, 2, 2)),
        ((28, 28), 1, (1, 2, 2)),
        ((29, 28), 2, (1, 2, 4)),
        ((20_000, 3), 256, (1, 2, 512)),
        ((3, 20_000), 256, (1, 512, 2)),
        ((7168, 100), 1024, (1, 8, 512)),
    ],
)
def test_grids(size: tuple[int, int], tokens: int, grid: tuple[int, int, int]):
    images = preprocess_images([Image.new("RGB", size)])
    assert images.grids.tolist() == [list(grid)]
    assert images.num_tokens == (tokens,)
    assert images.sizes == (size,)
    assert images.patches.shape == (math.prod(grid), 3, 14, 14)
    assert images.patches.dtype == np.float32


@given(st.integers(1, 40_000), st.integers(1, 40_000))
def test_sizes_stay_within_the_limits(width: int, height: int):
    new = fit(width, height, CONFIG)
    assert all(1 <= side <= min(7168, old) for side, old in zip(new, (width, height), strict=True))
    area = max(1, width // 14) * max(1, height // 14)
    scale = min(1.0, math.sqrt(65536 / area), 7168 / width, 7168 / height)
    assert new == (max(1, int(width * scale)), max(1, int(height * scale)))
    if scale == 1.0:
        assert new == (width, height)


def test_limits_come_from_the_config():
    assert preprocess_images([noise(100, 100)], SMALL).grids.tolist() == [[1, 8, 8]]
    assert preprocess_images([noise(400, 5)], SMALL).grids.tolist() == [[1, 2, 12]]
    wide = ImageConfig(max_patches=16384)
    assert fit(4000, 4000, wide)[0] < fit(4000, 4000, CONFIG)[0] == 3592


def test_official_config():
    assert ImageConfig.from_official({"media_proc_cfg": OFFICIAL}) == CONFIG
    assert ImageConfig.from_official(OFFICIAL | {"patch_size": 7}).patch == 7
    for change, message in (
        ({"fixed_output_tokens": 64}, "only fixed_output_tokens = None"),
        ({"transparent_bg_fill_stage": "before_resize"}, "only transparent_bg_fill_stage = 'after_resize'"),
        ({"transparent_bg_config": {"pattern": "white"}}, "only pattern = 'chessboard'"),
        ({"new_key": 1}, "unknown key 'new_key'"),
    ):
        with pytest.raises(ValueError, match=message):
            ImageConfig.from_official(OFFICIAL | change)


# --- pixels ---


def test_patches_are_the_picture_row_by_row():
    image = noise(56, 28)
    images = preprocess_images([image])
    x = np.asarray(image)
    assert images.grids.tolist() == [[1, 2, 4]]
    for row in range(2):
        for column in range(4):
            tile = x[14 * row : 14 * row + 14, 14 * column : 14 * column + 14].transpose(2, 0, 1)
            expected = ((tile / 255.0).astype(np.float32) - np.float32(0.5)) / np.float32(0.5)
            assert np.array_equal(images.patches[4 * row + column], expected)


def test_normalisation_by_channel():
    config = ImageConfig(mean=(0.1, 0.2, 0.3), std=(1.0, 0.5, 0.3))
    patches = preprocess_images([Image.new("RGB", (28, 28), (0, 128, 255))], config).patches
    expected = (np.array([0, 128, 255]) / 255 - config.mean) / config.std
    assert np.allclose(patches[0, :, 0, 0], expected, atol=1e-6)


def test_padding_is_black_right_and_below():
    images = preprocess_images([Image.new("RGB", (30, 29), (255, 255, 255))])
    pixels = pixels_of(images)
    assert pixels.shape == (56, 56, 3)
    assert (pixels[:29, :30] == 255).all()
    assert not pixels[29:].any()
    assert not pixels[:, 30:].any()
    assert images.patches.min() == -1.0


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_shows_the_chessboard(mode: str):
    image = noise(50, 40, mode)
    pixels = pixels_of(preprocess_images([image]))
    rgba = np.asarray(image.convert("RGBA"))
    for y in range(0, 40, 3):
        for x in range(0, 50, 3):
            board = 180 if (y // 8 + x // 8) % 2 else 255
            alpha = np.float32(rgba[y, x, 3]) / np.float32(255)
            for colour in range(3):
                value = alpha * np.float32(rgba[y, x, colour]) + (np.float32(1) - alpha) * np.float32(board)
                assert pixels[y, x, colour] == int(value)


def test_alpha_is_composited_after_the_resize():
    clear = preprocess_images([Image.new("RGBA", (200, 200), (9, 9, 9, 0))], SMALL)
    pixels = pixels_of(clear, SMALL)[:32, :32]
    assert {*pixels.ravel().tolist()} == {255, 180}
    assert pixels[0, 0, 0] == 255
    assert pixels[0, 8, 0] == 180
    resized = noise(64, 64, "RGBA").resize((32, 32), Image.Resampling.BICUBIC)
    direct, expected = preprocess_images([noise(64, 64, "RGBA")], SMALL), preprocess_images([resized], SMALL)
    assert np.array_equal(direct.patches, expected.patches)


def test_palettes_with_and_without_transparency():
    palette = noise(64, 64).quantize(16)
    nearest = palette.resize((32, 32), Image.Resampling.NEAREST)
    expected = preprocess_images([nearest.convert("RGB")], SMALL)
    assert np.array_equal(preprocess_images([encoded(palette, "PNG")], SMALL).patches, expected.patches)
    data = np.asarray(palette)
    clear = preprocess_images([encoded(palette, "PNG", transparency=int(data[0, 0]))])
    assert (pixels_of(clear)[0, 0] == 255).all()
    seen = data != data[0, 0]
    assert np.array_equal(pixels_of(clear)[:64, :64][seen], np.asarray(palette.convert("RGB"))[seen])


def test_cmyk_is_resized_before_it_is_converted():
    image = noise(64, 64, "CMYK")
    expected = image.resize((32, 32), Image.Resampling.BICUBIC).convert("RGB")
    assert np.array_equal(pixels_of(preprocess_images([image], SMALL), SMALL), np.asarray(expected))
    assert len(preprocess_images([encoded(image, "JPEG")])) == 1


def test_sixteen_bits_keep_the_high_byte():
    values = np.linspace(0, 65535, 28 * 28).astype(np.uint16).reshape(28, 28)
    stored = encoded(Image.fromarray(values), "PNG")
    assert Image.open(io.BytesIO(stored)).mode == "I;16"
    for source in (stored, Image.fromarray(values)):
        assert np.array_equal(pixels_of(preprocess_images([source]))[..., 1], values >> 8)


@pytest.mark.parametrize("mode", ["1", "L", "YCbCr", "HSV", "RGBX", "PA"])
def test_other_modes_become_colour(mode: str):
    image = noise(28, 28).convert("P").convert(mode) if mode == "PA" else noise(28, 28).convert(mode)
    assert np.array_equal(pixels_of(preprocess_images([image])), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("kind", ["EPS", "PCX", "TGA"])
def test_formats_that_run_programs_or_are_nobodys_are_no_pictures(kind, tmp_path):
    """Pillow would give EPS to Ghostscript."""
    content = encoded(Image.new("RGB", (20, 20)), kind)
    (tmp_path / "picture").write_bytes(content)
    for source in (content, tmp_path / "picture"):
        with pytest.raises(ValueError, match="no picture of a known format"):
            preprocess_images([source])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_files_bytes_and_pictures_are_one(tmp_path: Path, kind: str):
    content = encoded(noise(40, 30), kind)
    file = tmp_path / f"picture.{kind.lower()}"
    file.write_bytes(content)
    by_bytes, by_path, by_name, opened = (
        preprocess_images([s]) for s in (content, file, str(file), Image.open(io.BytesIO(content)))
    )
    for other in (by_path, by_name, opened):
        assert np.array_equal(other.patches, by_bytes.patches)
        assert other.digests == by_bytes.digests


def test_the_first_frame_of_an_animation():
    frames = [Image.new("RGB", (28, 28), (level, 0, 0)) for level in (10, 200)]
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixels_of(preprocess_images([content]))[0, 0, 0] == 10


# --- several items ---


def test_items_are_packed_behind_each_other():
    pictures = [noise(28, 56, seed=1), noise(100, 30, seed=2), noise(28, 56, seed=1), noise(28, 56, seed=3)]
    together = preprocess_images(pictures)
    alone = [preprocess_images([picture]) for picture in pictures]
    assert np.array_equal(together.patches, np.concatenate([images.patches for images in alone]))
    assert together.grids.tolist() == [images.grids[0].tolist() for images in alone]
    assert together.digests == tuple(images.digests[0] for images in alone)
    assert len({*together.digests}) == 3
    empty = preprocess_images([])
    assert (len(empty), empty.patches.shape, empty.grids.shape) == (0, (0, 3, 14, 14), (0, 3))


def test_short_videos():
    frames = [noise(56, 28, seed=seed) for seed in range(3)]
    video = preprocess_images([frames])
    assert video.grids.tolist() == [[3, 2, 4]]
    assert video.num_tokens == (2,)
    expected = np.concatenate([preprocess_images([frame]).patches for frame in frames])
    assert np.array_equal(video.patches, expected)
    assert preprocess_images([[noise(100, 100)] * 4], SMALL).grids.tolist() == [[4, 4, 4]]
    with pytest.raises(ValueError, match=r"image 1: a video needs frames of one size, not \[\(28, 28\), \(28, 29\)\]"):
        preprocess_images([noise(28, 28), [noise(28, 28), noise(28, 29)]])
    with pytest.raises(ValueError, match=r"image 0: a video needs frames of one size, not \[\]"):
        preprocess_images([[]])


# --- what is no picture ---


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_truncated_files(kind: str):
    content = encoded(noise(40, 30), kind)
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about damaged TIFF tags
        for length in range(0, len(content) - 8, max(1, len(content) // 60)):
            with pytest.raises(ValueError, match="image 0 cannot be read: ") as caught:
                preprocess_images([content[:length]])
            assert "\n" not in str(caught.value)
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_files(kind: str):
    """Bytes that are wrong anywhere: a picture, or a fault in words."""
    content, random, refused = encoded(noise(40, 30), kind), Random(0), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(400):
            damaged = bytearray(content)
            for _ in range(random.choice((1, 2, 16))):
                near = random.randrange(-250, 400) if len(content) > 400 else random.randrange(len(content))
                damaged[near] = random.choice((0, 2, 255, random.randrange(256)))
            try:
                open_image(bytes(damaged))
            except ValueError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused


def png_of_size(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "cannot be read: it is no picture"),
        (
            b"not a picture",
            r"cannot be read: it is no picture of a known format \(AVIF, .*\), or its beginning is lost$",
        ),
        (png_of_size(0, 5), "no pixels|cannot be read"),
        (png_of_size(10_000, 10_000), r"10000 x 10000 pixels, more than the 89,478,485 that are allowed"),
        (png_of_size(60_000, 60_000), r"more than the 89,478,485 pixels that are allowed"),
        (Image.new("RGB", (0, 5)), r"has no pixels \(0 x 5\)"),
        (Image.new("RGB", (5, 0)), r"has no pixels \(5 x 0\)"),
        (Image.new("F", (28, 28)), "has the mode 'F'; convert it to one of 1, L"),
        (Image.new("I", (28, 28)), "has the mode 'I'"),
        (Image.new("LAB", (28, 28)), "has the mode 'LAB'"),
        (Path("nowhere.png"), r"\(nowhere.png\) cannot be read: .*No such file"),
        (".", "cannot be read"),
    ],
)
def test_what_is_refused(source, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        preprocess_images([noise(28, 28), source])
    assert str(caught.value).startswith("image 1")
    assert "\n" not in str(caught.value)


def test_other_things_are_no_picture():
    with pytest.raises(ValueError, match="must be a path, bytes or a PIL image, not int"):
        open_image(5)  # type: ignore[arg-type]
    assert MAX_PIXELS == 89_478_485


def test_data_urls():
    assert decode_data_url("data:image/png;base64,YWJj") == b"abc"
    assert decode_data_url("DATA:Image/PNG;Base64,YW\r\nJj\n") == b"abc"
    for url in (
        "http://x/y.png",
        "data:text/plain;base64,YWJj",
        "data:image/png,abc",
        "data:image/png;base64",
        "x.png",
    ):
        with pytest.raises(ValueError, match="must be data:image/"):
            decode_data_url(url)
    with pytest.raises(ValueError, match="base64 is damaged"):
        decode_data_url("data:image/png;base64,YW J")


# --- into the text ---


def test_media_tokens_are_repeated():
    assert expand_media([1, 9, 2, 9, 9], [(1, 4, 6), (3, 2, 2), [1, 2, 4]], media_id=9) == [1, *[9] * 6, 2, 9, 9, 9]
    assert expand_media([1, 2], [], media_id=9) == [1, 2]
    assert expand_media(np.array([9, 5]), np.array([[1, 3, 3]]), media_id=9, merge=3) == [9, 5]
    assert expand_media([7, 163_605], [(1, 2, 4)]) == [7, 163_605, 163_605]
    for ids in ([1], [9, 9]):
        with pytest.raises(ValueError, match=rf"{ids.count(9)} media tokens \(id 9\) in the ids, but 1 grids"):
            expand_media(ids, [(1, 2, 2)], media_id=9)
    for grid in ((1, 3, 2), (1, 2, 5), (0, 2, 2), (1, 0, 2)):
        with pytest.raises(ValueError, match="does not merge 2 x 2"):
            num_media_tokens(grid)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), max_size=4))
def test_from_pictures_to_rows(small: Tokenizer, sizes: list[tuple[int, int]]):
    images = preprocess_images([Image.new("L", size) for size in sizes])
    message = {"role": "user", "content": [{"type": "image"} for _ in sizes] + [{"type": "text", "text": "?"}]}
    ids = render([message], images=images.sizes).ids(small)
    media_id = small.specials["<|media_pad|>"]
    expanded = expand_media(ids, images.grids, media_id=media_id)
    assert expanded.count(media_id) == sum(images.num_tokens) == images.grids.prod(axis=1).sum() // 4
    assert [i for i in expanded if i != media_id] == [i for i in ids if i != media_id]
