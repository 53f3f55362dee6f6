"""Odd arguments of the text side: one-line ValueErrors that say what was given."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rille.text.chat import render
from rille.text.images import ImageConfig, preprocess_images
from rille.text.media import expand_media
from rille.text.parser import Parser, parse
from rille.text.tokenizer import load_tokenizer, train_tokenizer

TOKENIZER: Any = train_tokenizer(["a few words to learn from\n"] * 9, 300, note=lambda _: None)
HELLO: Any = [{"role": "user", "content": "hello"}]
DOT = Image.new("RGB", (4, 4))
LOAD: Any = load_tokenizer
TRAIN: Any = train_tokenizer
PREPARE: Any = preprocess_images
EXPAND: Any = expand_media
RENDER: Any = render
PARSE: Any = parse
PARSER: Any = Parser
CASES: list[tuple[Callable[[], object], str]] = [
    (lambda: TOKENIZER.encode(None), "text must be a str, not None"),
    (lambda: TOKENIZER.encode(b"a"), "text must be a str, not bytes b'a'; decode bytes first"),
    (lambda: TOKENIZER.encode(["a"]), "text must be a str, not list"),
    (lambda: TOKENIZER.encode("a\ud800"), "lone surrogate U+D800 at character 1"),
    (lambda: TOKENIZER.encode_batch("abc"), "texts must be a list of texts, not str 'abc'"),
    (lambda: TOKENIZER.encode_with_specials(None), "text must be a str"),
    (lambda: TOKENIZER.decode(3), "ids must be a list or a tensor of token ids, not int 3"),
    (lambda: TOKENIZER.decode("ab"), "not str 'ab'"),
    (lambda: TOKENIZER.decode([1.5]), "a token id must be a whole number, not float 1.5"),
    (lambda: TOKENIZER.decode([[1]]), "a token id must be a whole number, not list [1]"),
    (lambda: TOKENIZER.decode(np.array([[1, 2]])), "a token id must be a whole number, not ndarray"),
    (lambda: TOKENIZER.decode([-1]), "token id -1 is outside the tokenizer's vocabulary of 300 tokens"),
    (lambda: TOKENIZER.decode([300]), "token id 300 is outside"),
    (lambda: TOKENIZER.save(None), "directory is None; give a path"),
    (lambda: LOAD(None), "path is None; give a checkpoint directory"),
    (lambda: LOAD(3), "path is int 3"),
    (lambda: TRAIN("abc", 400), "texts must be several, not str 'abc'"),
    (lambda: TRAIN(None, 400), "texts must be several, not None"),
    (lambda: TRAIN(["a"], 400.5), "vocab_size a whole number, not 400.5"),
    (lambda: TRAIN([1], 400), "text must be a str, not int 1"),
    (lambda: PREPARE(None), "images must be a list of pictures, not None; one picture: [picture]"),
    (lambda: PREPARE(DOT), "images must be a list of pictures, not Image"),
    (lambda: PREPARE("a.png"), "images must be a list of pictures, not str 'a.png'"),
    (lambda: PREPARE(b"abc"), "images must be a list of pictures, not bytes"),
    (lambda: PREPARE(3), "images must be a list of pictures, not int 3"),
    (lambda: PREPARE([3]), "image 0 must be a path, bytes or a PIL image, not int 3"),
    (lambda: PREPARE([DOT, None]), "image 1 must be a path, bytes or a PIL image, not None"),
    (lambda: PREPARE([[3]]), "image 0 must be a path, bytes or a PIL image, not int 3"),
    (lambda: PREPARE([[]]), "image 0: a video needs frames of one size, not []"),
    (lambda: PREPARE([np.zeros((4, 4, 3))]), "image 0 must be a path, bytes or a PIL image, not ndarray"),
    (lambda: PREPARE([b""]), "image 0 cannot be read"),
    (lambda: PREPARE(["absent.png"]), "image 0 (absent.png) cannot be read"),
    (lambda: PREPARE([DOT], 3), "config must be an ImageConfig, not int 3"),
    (lambda: ImageConfig(patch=0), "image config: patch is int 0; it must be a whole number of at least 1"),
    (lambda: ImageConfig(std=(0, 0, 0)), "image config: std is (0, 0, 0); it must be positive"),
    (lambda: ImageConfig.from_official({"image_mean": 3}), "image config: mean is int 3; it must be three numbers"),
    (lambda: ImageConfig.from_official({"patch_size": "a"}), "image config: patch is str 'a'"),
    (lambda: ImageConfig.from_official({"transparent_bg_config": 3}), "must be objects"),
    (lambda: EXPAND(None, []), "ids must be a list, not None"),
    (lambda: EXPAND([1], None), "grids must be a list, not None"),
    (lambda: EXPAND([1.5], []), "a token id must be a whole number, not float 1.5"),
    (lambda: EXPAND([7], [(1, 2.0, 2)], media_id=7), "a grid must be three whole numbers"),
    (lambda: EXPAND([7], [(1, 2)], media_id=7), "a grid must be three whole numbers"),
    (lambda: EXPAND([7], [3], media_id=7), "a grid must be three whole numbers (frames, rows, columns), not int 3"),
    (lambda: EXPAND([7], [(1, 2, 2)], media_id=7, merge=0), "merge is 0; it must be at least 1"),
    (lambda: RENDER(HELLO, images=3), "images must be a list of (width, height), one for each picture, not int 3"),
    (lambda: RENDER(HELLO, images=[3]), "images must be a list of (width, height)"),
    (lambda: RENDER(HELLO, images=[(1, 2, 3)]), "images must be a list of (width, height)"),
    (lambda: RENDER(HELLO, thinking="no"), "thinking is str 'no'; it must be True or False"),
    (lambda: RENDER(HELLO).ids(None), "tokenizer must be one of rille.load_tokenizer, not None"),
    (lambda: PARSE(None), "ids must be several token ids, not None"),
    (lambda: PARSE(b"abc", TOKENIZER), "ids must be several token ids, not bytes b'abc'"),
    (lambda: PARSE([1.5], TOKENIZER), "a token id must be a whole number, not float 1.5"),
    (lambda: PARSE("a", start="foo"), "start is 'foo'; it must be think, response or None"),
    (lambda: PARSER("x"), "tokenizer must be one of rille.load_tokenizer, not str 'x'"),
    (lambda: PARSER().feed_text(None), "a piece of output must be a str, not None"),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_it_says_what_is_wrong(number):
    call, message = CASES[number]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)
