"""Odd arguments of the model's face: one-line ValueErrors that say what was given and what to do."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

import rille
from rille.model.arguments import as_rows, check_ids
from rille.model.config import K3Config
from rille.model.model import new_model
from rille.model.vision_config import VisionConfig
from rille.packing import Packing

SMALL = rille.preset("tiny").replace(vocab_size=64, num_layers=2, mla_layers=(1,))
TOWER = VisionConfig(text_width=SMALL.hidden_size, width=32, num_layers=1, num_heads=2, qkv_width=48, mlp_width=64)
T = torch.tensor([3, 1, 4, 1, 5])


@pytest.fixture(scope="module")
def model():
    return new_model(SMALL)


def refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["logits", "hidden", "trace"])
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([3, 1], "tokens must be an int64 tensor of shape [N], not list [3, 1]; use torch.tensor(ids)"),
        (None, "not None"),
        ("hello", "not str 'hello'"),
        (T.numpy(), "not ndarray"),
        (T[None], "int64 tensor of shape [1, 5]"),
        (T[0], "int64 tensor of shape []"),
        (T.int(), "int32 tensor"),
        (T.float(), "float32 tensor"),
        (T > 1, "bool tensor"),
        (T + 60, "token ids run from 61 to 65, the vocabulary has 0..63"),
        (-T, "token ids run from -5 to -1"),
        (T.to("meta"), "tokens are on meta, the model on cpu"),
    ],
)
def test_tokens(model, method, tokens, message):
    refused(lambda: getattr(model, method)(tokens), message)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.tensor([5]), "rows run from 5 to 5, the batch has the rows -5..4"),
        ([-6, 0], "rows run from -6 to 0"),
        (torch.tensor([1.0]), "float32 tensor"),
        ([0.5], "not list [0.5]"),
        (
            slice(1, 3),
            "rows must be whole numbers, int64 [R] (for a part of them: torch.arange(start, stop)), not slice",
        ),
        (torch.tensor([[1]]), "int64 tensor of shape [1, 1]"),
        (T > 1, "bool tensor"),
        (2, "not int 2"),
        ("last", "not str 'last'"),
    ],
)
def test_rows(model, rows, message):
    memory = model.new_memory()
    refused(lambda: model.logits(T, rows=rows, memory=memory), message)
    assert memory.lengths == [0]


def test_rows_that_are_fine(model):
    whole = model.logits(T)
    for rows in ([-1, 0], range(2), [], torch.tensor([4], dtype=torch.int32)):
        wanted = torch.tensor(list(rows), dtype=torch.int64)
        torch.testing.assert_close(model.logits(T, rows=rows), whole[wanted])


@pytest.mark.parametrize(
    ("packing", "message"),
    [
        ([3, 2], "packing must be a Packing, not list [3, 2]; make one: Packing.of(lengths)"),
        (Packing.of([3]), "the packing describes 3 tokens, the batch has 5"),
        (Packing.of([5], [3]), "continues after [3] tokens, but no memory was given"),
        (Packing.of([5], device="meta"), "the packing is on meta, the model on cpu"),
    ],
)
def test_packings(model, packing, message):
    refused(lambda: model.logits(T, packing=packing), message)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (5, "lengths must be a list of whole numbers"),
        ([2.5], "lengths must be a list of whole numbers, one for each sequence, not [2.5]"),
        ("32", "whole numbers"),
        ([[1, 2]], "whole numbers"),
        ([-1], "must not be negative"),
        ([2**30, 2**30], "2,147,483,648 tokens are more than the 2,147,483,647"),
    ],
)
def test_what_no_packing_describes(lengths, message):
    refused(lambda: Packing.of(lengths), message)


def test_consumed_counts_and_chunks():
    refused(lambda: Packing.of([3], 2), "consumed must be a list")  # type: ignore[arg-type]
    refused(lambda: Packing.of([3], [2**31]), "2,147,483,648 tokens")
    refused(lambda: Packing.of([3]).chunks(0), "chunks of 0 rows")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_layers": 3}, "its layers are 0..2, this model's 0..1"),
        ({"mla_layers": (0,)}, "MLA layers are [0], this model's [1]"),
        ({"kda_heads": 7}, "cached widths"),
        ({"kv_rank": 24}, "cached widths"),
        ({"conv_width": 3}, "cached widths"),
    ],
)
def test_memories_of_other_models(model, changes, named):
    other = new_model(SMALL.replace(**changes)).new_memory()
    for method in ("logits", "hidden", "trace"):
        refused(lambda method=method: getattr(model, method)(T, memory=other), named)


def test_memories_that_do_not_fit(model):
    refused(
        lambda: model.logits(T, memory=new_model(SMALL, dtype=torch.bfloat16).new_memory()), "its dtype is bfloat16"
    )
    refused(lambda: model.logits(T, memory=new_model(SMALL, device="meta").new_memory()), "its device is meta")
    refused(lambda: model.logits(T, memory=model.new_memory(2)), "holds 2 sequences, the batch has 1")
    refused(lambda: model.logits(T, memory={}), "memory must come from model.new_memory(), not be dict {}")
    drafting = new_model(SMALL.replace(mtp_layers=1))
    refused(lambda: drafting.logits(T, memory=drafting.new_draft_memory()), "its layers are 2..2, this model's 0..1")
    for number in (0, -1, 1.5, "2", True):
        refused(lambda number=number: model.new_memory(number), "memory: the number of sequences is")
    refused(lambda: model.new_memory().packing(3), "lengths must be a list")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed is -1; it must be at least 0 and below 2^63"),
        ({"seed": 2**63}, "seed is 9223372036854775808; it must be at least 0 and below 2^63"),
        ({"seed": 1.5}, "seed is float 1.5; it must be a whole number"),
        ({"seed": None}, "seed is None"),
        ({"seed": True}, "seed is bool True"),
        (
            {"dtype": "bf16"},
            "dtype is 'bf16'; give a torch dtype or the name of one: float32, bfloat16, float16, float64",
        ),
        ({"dtype": 16}, "dtype is 16"),
        ({"dtype": None}, "dtype is None"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"dtype": torch.float8_e4m3fn}, "dtype is torch.float8_e4m3fn"),
        ({"dtype": torch.complex64}, "dtype is torch.complex64"),
        ({"device": "gpu"}, 'device is \'gpu\'; name one such as "cpu", "cuda", "cuda:0" or "meta"'),
        ({"device": 0}, "device is 0"),
        ({"device": None}, "device is None"),
        ({"device": "xla"}, "this machine has no xla device that torch can use"),
    ],
)
def test_what_makes_no_model(arguments, message):
    refused(lambda: new_model(SMALL, **arguments), message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA says")
def test_cuda_where_there_is_none(tmp_path, model):
    rille.save_model(model, tmp_path / "m")
    for make in (new_model, lambda _, **rest: rille.load_model(tmp_path / "m", **rest)):
        for device in ("cuda", "cuda:7", torch.device("cuda")):
            refused(lambda make=make, device=device: make(SMALL, device=device), "no cuda device that torch can use")


def test_names_of_dtypes_and_largest_seed():
    assert new_model(SMALL, dtype="bfloat16", seed=2**63 - 1).dtype == torch.bfloat16
    wrong: list[Any] = [None, "tiny", {}]
    for config in wrong:
        refused(lambda config=config: new_model(config), "config must be a K3Config")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": (0, 1)}, "layers is tuple (0, 1); give a range such as range(0, 2), or None for all"),
        ({"layers": [0, 1]}, "layers is list"),
        ({"layers": 1}, "layers is int 1"),
        ({"layers": slice(0, 1)}, "layers is slice"),
        ({"layers": range(1, 9)}, "layers range(1, 9) are not a range inside the 2 layers"),
        ({"layers": range(-1, 1)}, "not a range inside"),
        ({"layers": range(0)}, "not a range inside"),
        ({"layers": range(0, 2, 2)}, "not a range inside"),
        ({"dtype": "bf17"}, "dtype is 'bf17'"),
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"device": "meta"}, 'device "meta" holds no weights'),
    ],
)
def test_what_cannot_be_loaded(tmp_path, model, arguments, message):
    rille.save_model(model, tmp_path / "m")
    refused(lambda: rille.load_model(tmp_path / "m", **arguments), message)


def test_paths_and_what_is_saved(tmp_path, model):
    paths: list[Any] = [None, 3]
    for path in paths:
        refused(lambda path=path: rille.load_model(path), "give the path of a directory")
        refused(lambda path=path: rille.save_model(model, path), "give the path of a directory")
        refused(lambda path=path: K3Config.load(path), "give a checkpoint directory")
    refused(lambda: rille.save_model(None, tmp_path / "m"), "model must be a K3 model, not None")  # type: ignore[arg-type]
    refused(lambda: rille.save_model(model, tmp_path / "m", tokenizer="x"), "tokenizer must be able to save itself")  # type: ignore[arg-type]
    refused(lambda: rille.save_model(model, tmp_path / "m", dtype=torch.int8), "dtype is torch.int8")
    assert not (tmp_path / "m").exists()


def test_shapes_without_weights(tmp_path):
    meta = new_model(SMALL.replace(media_pad_id=7, mtp_layers=1, vision=TOWER), device="meta")
    images = rille.preprocess_images([Image.new("RGB", (30, 30))])
    calls = [
        lambda: meta.logits(T),
        lambda: meta.hidden(T),
        lambda: meta.trace(T),
        lambda: meta.encode_images(images),
        lambda: meta.draft(torch.zeros(5, SMALL.hidden_size), T),
        lambda: rille.generate(meta, T, 1),
        lambda: rille.save_model(meta, tmp_path / "m"),
    ]
    for call in calls:
        refused(call, 'the model is on the "meta" device, where it has shapes only')


def test_pictures(model):
    seeing = new_model(SMALL.replace(media_pad_id=7, vision=TOWER))
    wrong: list[Any] = [[1], Image.new("RGB", (4, 4)), "a.png"]
    for images in wrong:
        refused(lambda images=images: seeing.logits(T, images=images), "images must come from rille.preprocess_images")
        refused(lambda images=images: seeing.encode_images(images), "images must come from rille.preprocess_images")
    refused(lambda: model.encode_images(rille.preprocess_images([])), "no vision tower")


def test_names_and_fields():
    refused(lambda: rille.preset("huge"), "unknown preset 'huge'; choose one of tiny")
    refused(lambda: rille.preset(["tiny"]), "unknown preset ['tiny']")  # type: ignore[arg-type]
    refused(lambda: SMALL.replace(depth=3), "K3Config takes no 'depth'")
    refused(lambda: SMALL.replace(vision="x"), "vision 'x' must be a VisionConfig or None")


class OnCard:
    """Ids on a device, as far as the check looks at them."""

    device = SimpleNamespace(type="cuda")

    def __len__(self) -> int:
        return 1


def test_decoding_reads_nothing_from_the_device(monkeypatch):
    """Ids of a step in which each sequence brings one token are read on the CPU alone."""
    ids: Any = OnCard()
    monkeypatch.setattr(torch, "aminmax", lambda values: pytest.fail("the host would wait"))
    check_ids(ids, Packing.of([1], [7]), 64)
    with pytest.raises(pytest.fail.Exception, match="would wait"):
        check_ids(ids, Packing.of([2]), 64)


def test_one_row_on_the_cpu_is_read():
    with pytest.raises(ValueError, match="rows run from 3"):
        as_rows(torch.tensor([3]), 1, Packing.of([1], [7]), torch.device("cpu"))
