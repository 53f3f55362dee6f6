"""Vision: the oracle, other sizes against the mathematics by hand, pictures among text in all ways, bad input."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rille.model.checkpoint import load_model, save_model
from rille.model.config import K3Config
from rille.model.model import new_model
from rille.model.presets import preset
from rille.model.vision_config import VisionConfig
from rille.packing import Packing
from tests.model import oracle, vision_literal

BOUND, LOGITS_BOUND = 1e-4, 2e-4
MEDIA = 90
SMALL = preset("tiny").replace(
    vocab_size=97, hidden_size=32, num_layers=3, mla_layers=(1,), num_experts=4, active_experts=2, media_pad_id=MEDIA
)
TOWERS = {
    "small patches, wide heads": VisionConfig(
        text_width=32, patch_size=4, width=12, num_layers=2, num_heads=3, qkv_width=48, mlp_width=20, table_height=5,
        table_width=7, max_frames=4,
    ),
    "one head, no merge of rows": VisionConfig(
        text_width=32, patch_size=3, width=10, num_layers=3, num_heads=1, qkv_width=8, mlp_width=14, table_height=9,
        table_width=3, max_frames=6, merge=(1, 3), projector_eps=1e-3,
    ),
    "factorised": VisionConfig(
        text_width=32, patch_size=5, width=16, num_layers=2, num_heads=2, qkv_width=24, mlp_width=24, table_height=4,
        table_width=4, max_frames=5, attention="factorised",
    ),
}  # fmt: skip
GRIDS = {
    "small patches, wide heads": [(1, 2, 2), (1, 10, 6), (1, 4, 2), (3, 6, 4), (1, 4, 2), (4, 2, 2)],
    "one head, no merge of rows": [(1, 1, 3), (6, 3, 3), (1, 9, 3), (1, 11, 6)],
    "factorised": [(1, 4, 4), (5, 4, 2), (2, 2, 6), (1, 6, 2)],
}


@dataclass
class Images:
    patches: Any
    grids: Any

    @classmethod
    def random(cls, c, grids, seed=0):
        count = sum(t * h * w for t, h, w in grids)
        generator = torch.Generator().manual_seed(seed)
        patches = torch.randn(count, 3, c.patch_size, c.patch_size, generator=generator)
        return cls(patches, torch.tensor(grids, dtype=torch.int64).view(-1, 3))

    def items(self):
        counts = self.grids.prod(1).tolist()
        return [Images(p, g[None]) for p, g in zip(self.patches.split(counts), self.grids, strict=True)]


def make(name="small patches, wide heads", dtype=torch.float64):
    """A model whose activations are of the order of 1 and whose gains are not 1."""
    model = new_model(SMALL.replace(vision=TOWERS[name]), dtype=dtype, seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.vision.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(1 + 0.2 * noise if parameter.ndim == 1 else noise * 1.5 * parameter.shape[-1] ** -0.5)
    return model


def distance(a, b):
    assert a.shape == b.shape
    return float((a - b).abs().max())


def tokens_with(*pictures, length=30, seed=0):
    """Random text with media tokens at the given places."""
    tokens = torch.randint(0, MEDIA, (length,), generator=torch.Generator().manual_seed(seed))
    tokens[list(pictures)] = MEDIA
    return tokens


# --- the oracle -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden():
    return load_file(oracle.ORACLE / "vision_io.safetensors")


@torch.no_grad()
def test_features_of_the_official_tower(golden):
    model = oracle.model()
    images = Images(golden["pixel_values"], golden["grid_thws"])
    features = model.vision.tower(images.patches, [(1, 4, 6), (1, 8, 8)])
    assert distance(features, torch.cat([golden["feat_0"], golden["feat_1"]])) <= BOUND
    assert distance(model.encode_images(images), torch.cat([golden["proj_0"], golden["proj_1"]])) <= BOUND


@torch.no_grad()
def test_a_video_of_the_official_tower(golden):
    model = oracle.model()
    video = Images(golden["video_pixel_values"].numpy(), golden["video_grid_thws"].numpy())
    assert distance(model.vision.tower(golden["video_pixel_values"], [(3, 4, 4)]), golden["video_feat"]) <= BOUND
    assert distance(model.encode_images(video), golden["video_proj"]) <= BOUND


@torch.no_grad()
def test_logits_of_the_official_model_with_pictures(golden):
    images = Images(golden["pixel_values"], golden["grid_thws"])
    tokens = golden["mm_input_ids"][0].long()
    logits = oracle.model().logits(tokens, images=images)
    assert distance(logits, golden["mm_logits"]) <= LOGITS_BOUND
    trace = oracle.model().trace(tokens, images=images)
    assert torch.equal(trace["logits"], logits)
    assert distance(trace["embed"][3:9], golden["proj_0"]) <= BOUND


def test_every_tensor_is_saved_as_it_was(tmp_path):
    save_model(oracle.model(), tmp_path / "again")
    before, after = (
        {name: t for file in sorted(place.glob("model-*.safetensors")) for name, t in load_file(file).items()}
        for place in (oracle.ORACLE, tmp_path / "again")
    )
    assert before.keys() == after.keys()
    assert sum(name.startswith(("vision_tower.", "mm_projector.")) for name in after) == 18
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and tensor.shape == after[name].shape, name
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    official = json.loads((oracle.ORACLE / "config.json").read_text())
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == official


# --- other sizes, by hand ---------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", TOWERS)
def test_any_tower_is_what_the_equations_say(name, tmp_path):
    made = make(name, torch.float32)
    save_model(made, tmp_path)
    model, c = load_model(tmp_path, dtype=torch.float64), TOWERS[name]
    assert model.config.vision == c
    official = {n: t for file in tmp_path.glob("*.safetensors") for n, t in load_file(file).items()}
    weights = {n.removesuffix(".weight"): t.double().numpy() for n, t in official.items()}
    ours = {n: p.numpy() for n, p in model.vision.named_parameters()}
    tower = {n.removeprefix("tower."): p for n, p in ours.items() if n.startswith("tower.")}
    projector = {n.removeprefix("projector."): p for n, p in ours.items() if n.startswith("projector.")}
    assert np.array_equal(tower["blocks.1.up_proj"], weights["vision_tower.encoder.blocks.1.mlp.fc0"])
    assert np.array_equal(projector["down_proj"], weights["mm_projector.proj.2"])
    images = Images.random(c, GRIDS[name])
    merged = [
        vision_literal.tower(tower, c, item.patches.double().numpy(), item.grids[0].tolist()) for item in images.items()
    ]
    expected = torch.from_numpy(np.concatenate(merged))
    assert expected.std() > 0.5
    assert distance(model.vision.tower(images.patches.double(), GRIDS[name]), expected) <= 1e-9
    features = torch.from_numpy(vision_literal.projector(projector, c, expected.numpy()))
    assert distance(model.encode_images(images), features) <= 1e-9
    assert distance(load_model(tmp_path).encode_images(images).double(), features) <= BOUND


@torch.no_grad()
def test_one_frame_is_the_same_factorised_and_joint():
    model = make("factorised")
    pictures, video = (
        Images.random(TOWERS["factorised"], [(1, 4, 2), (1, 2, 6)]),
        Images.random(TOWERS["factorised"], [(2, 4, 4)]),
    )
    in_space_and_time = [model.encode_images(images) for images in (pictures, video)]
    for block in model.vision.tower.blocks:
        block.factorised = False
    jointly = [model.encode_images(images) for images in (pictures, video)]
    assert distance(jointly[0], in_space_and_time[0]) <= 1e-12
    assert distance(jointly[1], in_space_and_time[1]) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("name", TOWERS)
def test_a_batch_is_its_items(name):
    model, images = make(name), Images.random(TOWERS[name], GRIDS[name])
    apart = torch.cat([model.encode_images(item) for item in images.items()])
    assert distance(model.encode_images(images), apart) <= 1e-12
    assert model.encode_images(Images.random(TOWERS[name], [])).shape == (0, 32)


def test_gradients_reach_every_weight_and_the_patches():
    model, images = make(), Images.random(TOWERS["small patches, wide heads"], [(1, 4, 2), (2, 2, 4)])
    images.patches.requires_grad_()
    model.logits(tokens_with(3, 9), images=images).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.vision.parameters())
    assert images.patches.grad.abs().sum((1, 2, 3)).min() > 0


@torch.no_grad()
def test_bf16_stays_near():
    images = Images.random(TOWERS["small patches, wide heads"], [(1, 4, 6), (3, 4, 4)])
    exact, rounded = (make(dtype=dtype).encode_images(images) for dtype in (torch.float64, torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    assert (rounded.double() - exact).square().mean().sqrt() < 0.05 * exact.std()


# --- pictures among text ----------------------------------------------------------------------------------------------

PICTURES = [(1, 4, 2), (1, 2, 2), (2, 6, 4)]  # 2, 1 and 6 rows


def pictures():
    return Images.random(TOWERS["small patches, wide heads"], PICTURES)


@torch.no_grad()
def test_rows_take_the_place_of_media_tokens():
    model, images, tokens = make(), pictures(), tokens_with(0, 7, 8, length=12)
    trace = model.trace(tokens, images=images)
    features = model.encode_images(images)
    assert trace["embed"].shape == (12 - 3 + 9, 32)
    assert torch.equal(trace["embed"][:2], features[:2])
    assert torch.equal(trace["embed"][2:8], model.embed[tokens[1:7]])
    assert torch.equal(trace["embed"][8:15], features[2:])
    assert torch.equal(trace["embed"][15:], model.embed[tokens[9:]])


@torch.no_grad()
def test_expanded_tokens_give_the_same():
    model, images, tokens = make(), pictures(), tokens_with(2, 5, 6, length=10)
    repeats = torch.ones(10, dtype=torch.int64)
    repeats[[2, 5, 6]] = torch.tensor([2, 1, 6])
    expanded = tokens.repeat_interleave(repeats)
    logits = model.logits(tokens, images=images)
    assert torch.equal(model.logits(expanded, images=images), logits)
    last = model.logits(tokens, images=images, rows=torch.tensor([-1]))
    assert distance(last, logits[-1:]) <= 1e-12


@torch.no_grad()
def test_sequences_with_and_without_pictures():
    """The packing counts media tokens once; pictures belong to the sequences in order."""
    model, items = make(), pictures().items()
    parts = [tokens_with(1, length=5), tokens_with(length=4, seed=1), tokens_with(0, 6, length=7, seed=2)]
    packed = model.logits(torch.cat(parts), packing=Packing.of([5, 4, 0, 7]), images=pictures())
    both = Images(torch.cat([i.patches for i in items[1:]]), torch.cat([i.grids for i in items[1:]]))
    alone = [
        model.logits(parts[0], images=items[0]),
        model.logits(parts[1]),
        model.logits(parts[2], images=both),
    ]
    assert distance(packed, torch.cat(alone)) <= 1e-9


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[1, 29], [3, 1, 26], [10, 4, 1, 1, 14], [30]])
def test_memory_grows_by_expanded_rows(cuts):
    model, images, tokens = make(), pictures(), tokens_with(2, 3, 12)
    whole = model.logits(tokens, images=images)
    memory, items, pieces = model.new_memory(), images.items(), []
    for piece in tokens.split(cuts):
        mine = [items.pop(0) for _ in range(int((piece == MEDIA).sum()))]
        given = Images(torch.cat([i.patches for i in mine]), torch.cat([i.grids for i in mine])) if mine else None
        pieces.append(model.logits(piece, memory=memory, images=given))
    assert distance(torch.cat(pieces), whole) <= 1e-9
    assert memory.lengths == [30 - 3 + 9]


@torch.no_grad()
def test_two_sequences_in_one_memory():
    model, memory = make(), make().new_memory(2)
    a, b = tokens_with(1, length=4), tokens_with(0, 2, length=5, seed=1)
    model.logits(torch.cat([a, b]), packing=memory.packing([4, 5]), memory=memory, images=pictures())
    assert memory.lengths == [4 - 1 + 2, 5 - 2 + 7]
    more = tokens_with(length=3, seed=3)
    logits = model.logits(more, packing=memory.packing([1, 2]), memory=memory)
    items = pictures().items()
    alone = model.logits(torch.cat([a, more[:1]]), images=items[0])
    assert distance(logits[:1], alone[-1:]) <= 1e-9


@torch.no_grad()
def test_without_images_a_media_token_is_a_token():
    model, tokens = make(), tokens_with(3)
    trace = model.trace(tokens)
    assert torch.equal(trace["embed"], model.embed[tokens])


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.grids.__setitem__((0, 1), 3), "item 0 has a grid of 1 x 3 x 2 patches; .*multiples of 2 and 2"),
        (lambda i: i.grids.__setitem__((1, 2), 0), "item 1 .* 1 x 2 x 0"),
        (lambda i: i.grids.__setitem__((2, 0), 5), "item 2 has 5 frames, this model takes at most 4"),
        (lambda i: i.grids.__setitem__((2, 0), 1), "describe 36 patches, there are 60"),
        (lambda i: setattr(i, "patches", i.patches[:, :1]), r"\[60, 1, 4, 4\].*wants \[P, 3, 4, 4\]"),
        (lambda i: setattr(i, "grids", i.grids.float()), "whole numbers"),
        (lambda i: setattr(i, "grids", i.grids[:, 1:]), r"\[items, 3\]"),
    ],
)
def test_images_that_do_not_fit(change, message):
    images = pictures()
    change(images)
    with pytest.raises(ValueError, match=message):
        make().encode_images(images)
    with pytest.raises(ValueError, match=message):
        make().logits(tokens_with(1, 2, 3), images=images)


@pytest.mark.parametrize("places", [(), (1,), (1, 2, 3, 4), tuple(range(8)), tuple(range(10))])
def test_counts_that_differ(places):
    message = rf"images: {len(places)} media tokens \(id 90\) for 3 images of 9 rows"
    with pytest.raises(ValueError, match=message):
        make().logits(tokens_with(*places), images=pictures())


def test_a_failed_call_leaves_the_memory():
    model = make()
    memory = model.new_memory()
    with pytest.raises(ValueError, match="media tokens"):
        model.logits(tokens_with(1), memory=memory, images=pictures())
    assert memory.lengths == [0]


def test_models_without_vision_or_media_token():
    blind, nameless = new_model(SMALL), make()
    nameless.config = nameless.config.replace(media_pad_id=None)
    assert blind.vision is None
    for model, message in ((blind, "no vision tower"), (nameless, "no media token")):
        with pytest.raises(ValueError, match=message):
            model.logits(tokens_with(1, 2, 3), images=pictures())
    with pytest.raises(ValueError, match="no vision tower"):
        blind.encode_images(pictures())


OFFICIAL = json.loads((oracle.ORACLE / "config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_sise": 14}, "unknown keys.*patch_sise"),
        ({"merge_type": "sd2"}, "only computes.*sd2_tpool"),
        ({"mm_hidden_size": 48}, "only computes.*'mm_hidden_size': 32"),
        ({"attn_bias": True}, "attn_bias"),
        ({"qkv_hidden_size": 44}, "qkv width 44 over 2 heads"),
        ({"vt_hidden_size": 31, "mm_hidden_size": 31}, "must be even"),
        ({"vt_num_hidden_layers": 0}, "at least 1.*num_layers"),
        ({"merge_kernel_size": [2]}, "merge"),
        ({"text_hidden_size": 65}, "projector writes 65 channels, the hidden size is 64"),
        ({"rille": {"attention": "both"}}, "joint or factorised"),
        ({"rille": {"atention": "joint"}}, "unknown keys.*rille.atention"),
    ],
)
def test_vision_configs_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        K3Config.from_official(OFFICIAL | {"vision_config": OFFICIAL["vision_config"] | changes})


def test_vision_config_there_and_back():
    for c in TOWERS.values():
        assert VisionConfig.from_official(json.loads(json.dumps(c.to_official()))) == c
    less = {key: value for key, value in OFFICIAL["vision_config"].items() if key != "patch_size"}
    with pytest.raises(ValueError, match="missing keys.*patch_size"):
        VisionConfig.from_official(less)
    released = preset("k3").vision.to_official()
    assert (released["vt_hidden_size"], released["merge_kernel_size"], "rille" in released) == (1024, [2, 2], False)


@torch.no_grad()
def test_a_range_of_layers_sees_too(tmp_path):
    made = make(dtype=torch.float32)
    save_model(made, tmp_path, dtype=torch.float32)
    part = load_model(tmp_path, layers=range(1, 2))
    assert len(part.layers) == 1
    assert torch.equal(part.encode_images(pictures()), made.encode_images(pictures()))
