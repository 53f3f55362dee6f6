"""Official checkpoint directories: the same bytes back, every fault named, nothing lost."""

import json
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rille.model.checkpoint import load_model, save_model
from rille.model.config import K3Config
from rille.model.model import new_model
from rille.model.presets import preset
from rille.model.shards import DTYPES, CheckpointError, Pending, read_headers, save_shard
from tests.model.oracle import ORACLE

SHARDS = ("model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors")
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.0.w1"


@pytest.fixture
def copy(tmp_path):
    """A checkpoint directory to damage."""
    target = tmp_path / "checkpoint"
    target.mkdir()
    for name in ("config.json", "model.safetensors.index.json", *SHARDS):
        shutil.copy(ORACLE / name, target / name)
    return target


def tensors(directory):
    return {
        n: t
        for f in sorted(Path(directory).glob("*.safetensors"))
        for n, t in load_file(f).items()
        if "model" in f.name
    }


def rewrite(directory, change):
    """Apply `change` to the tensors of each shard, and write index and shards anew."""
    weight_map = {}
    for shard in SHARDS:
        held = load_file(directory / shard)
        change(held)
        save_file(held, directory / shard)
        weight_map |= dict.fromkeys(held, shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def text_tensors(directory):
    return {n: t for n, t in tensors(directory).items() if n.startswith("language_model.")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_and_save_gives_identical_bytes(tmp_path, dtype):
    save_model(load_model(ORACLE, dtype=dtype), tmp_path / "again")
    before, after = text_tensors(ORACLE), text_tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and after[name].shape == tensor.shape, name
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert K3Config.load(tmp_path / "again") == K3Config.load(ORACLE)


def test_config_round_trips_key_for_key():
    official = json.loads((ORACLE / "config.json").read_text())
    assert K3Config.from_official(official).to_official() == official


@pytest.mark.parametrize("experts", ["bf16", "mxfp4", "keep"])
def test_expert_formats_convert_into_each_other(tmp_path, experts):
    model = load_model(ORACLE)
    save_model(model, tmp_path / "a", experts=experts)
    again = load_model(tmp_path / "a")
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    stored = read_headers(tmp_path / "a")
    assert (f"{EXPERT}.weight_packed" in stored) == (experts != "bf16")
    quantised = "quantization_config" in json.loads((tmp_path / "a" / "config.json").read_text())["text_config"]
    assert quantised == (experts != "bf16")


def test_a_new_model_saves_bf16_experts_and_padded_decay(tmp_path):
    model = new_model(preset("tiny"), dtype=torch.bfloat16, seed=3)
    save_model(model, tmp_path / "m")
    stored = read_headers(tmp_path / "m")
    assert stored["language_model.model.layers.0.self_attn.A_log"].shape == (128,)
    assert stored[f"{EXPERT}.weight"].dtype == "BF16"
    again = load_model(tmp_path / "m", dtype=torch.bfloat16)
    tokens = torch.arange(50)
    with torch.no_grad():
        assert torch.equal(model.logits(tokens), again.logits(tokens))


def test_mixed_expert_formats_are_kept_tensor_by_tensor(copy, tmp_path):
    dense = load_model(copy).layers["1"].ffn.experts.w13[0, :64].bfloat16()

    def plain_first_expert(held):
        if held.pop(f"{EXPERT}.weight_packed", None) is not None:
            held.pop(f"{EXPERT}.weight_scale")
            held[f"{EXPERT}.weight"] = dense.clone()

    rewrite(copy, plain_first_expert)
    save_model(load_model(copy), tmp_path / "again")
    before, after = text_tensors(copy), text_tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[n].view(torch.uint8), t.view(torch.uint8)) for n, t in before.items())


def test_only_the_wanted_layers_are_read(copy):
    whole, part = load_model(copy), load_model(copy, layers=range(2, 5))
    assert [block.layer for block in part.blocks()] == [2, 3, 4]
    assert torch.equal(part.layers["3"].attn.kv_up, whole.layers["3"].attn.kv_up)
    with pytest.raises(CheckpointError, match="whole"):
        save_model(part, copy / "part")


def faults():
    norm = "language_model.model.norm.weight"
    decay = "language_model.model.layers.0.self_attn.A_log"

    def missing(held):
        held.pop(norm, None)

    def surplus(held):
        if norm in held:
            held["language_model.model.surprise.weight"] = torch.zeros(2)

    def misshaped(held):
        if norm in held:
            held[norm] = torch.zeros(63, dtype=torch.bfloat16)

    def wrong_kind(held):
        if norm in held:
            held[norm] = torch.zeros(64, dtype=torch.int32)

    def nan(held):
        if norm in held:
            held[norm][5] = float("nan")

    def bad_scale(held):
        if f"{EXPERT}.weight_scale" in held:
            held[f"{EXPERT}.weight_scale"][3] = 255

    def bad_padding(held):
        if decay in held:
            held[decay][-1] = 1.0

    return {
        missing: ("1 missing", norm),
        surplus: ("1 surplus", "surprise"),
        misshaped: ("1 misshaped", norm),
        wrong_kind: ("I32", norm),
        nan: ("NaN", norm),
        bad_scale: ("255", EXPERT),
        bad_padding: ("not zero", decay),
    }


@pytest.mark.parametrize(("change", "words"), faults().items(), ids=lambda x: getattr(x, "__name__", ""))
def test_faulty_tensors_are_named(copy, change, words):
    rewrite(copy, change)
    with pytest.raises(CheckpointError) as error:
        load_model(copy)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("keep", [4, 100, 1_000_000])
def test_a_truncated_shard_is_refused(copy, keep):
    data = (copy / SHARDS[1]).read_bytes()
    (copy / SHARDS[1]).write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match="truncated"):
        load_model(copy)


def test_a_shard_with_more_bytes_than_it_describes_is_not_called_truncated(copy):
    with (copy / SHARDS[1]).open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="damaged: the header describes"):
        load_model(copy)


@pytest.mark.parametrize("key", ["eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype"])
def test_what_only_the_top_of_the_config_says_counts(key):
    official = json.loads((ORACLE / "config.json").read_text())
    said = {"eos_token_id": 7, "pad_token_id": 9, "tie_word_embeddings": True, "dtype": "float32"}[key]
    official["text_config"].pop(key)
    official[key] = said
    assert K3Config.from_official(official).to_official()["text_config"][key] == said


def test_absent_shards_indices_and_directories(copy):
    (copy / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match="shards that are not there"):
        load_model(copy)
    (copy / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="index"):
        load_model(copy)
    (copy / "model.safetensors.index.json").unlink()
    with pytest.raises(FileNotFoundError, match="checkpoint"):
        load_model(copy)
    (copy / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model(copy)


def test_unknown_config_keys_are_listed(copy):
    official = json.loads((copy / "config.json").read_text())
    official["text_config"]["num_expert"] = 3
    official["text_config"]["linear_attn_config"]["heads"] = 3
    (copy / "config.json").write_text(json.dumps(official))
    with pytest.raises(ValueError, match=r"num_expert.*heads"):
        load_model(copy)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_size", "64", "hidden_size '64' must be a whole number"),
        ("vocab_size", 64.5, r"vocab_size 64\.5 must be a whole number"),
        ("num_hidden_layers", None, "num_hidden_layers must be a whole number"),
        ("num_shared_experts", -1, "must not be negative: .*shared_experts"),
        ("q_lora_rank", 0, "must be at least 1: .*q_rank"),
        ("rms_norm_eps", "x", "norm_eps 'x' must be a finite number"),
        ("rms_norm_eps", -1e-5, "must be positive: .*norm_eps"),
        ("routed_scaling_factor", float("nan"), "routed_scale nan must be a finite number"),
        ("moe_renormalize", "no", "renormalise 'no' must be true or false"),
        ("eos_token_id", "x", "eos_id 'x' must be a whole number or None"),
        ("linear_attn_config", [1], "linear_attn_config must be a JSON object"),
        ("linear_attn_config", {"full_attn_layers": "2"}, "full_attn_layers must be a list of whole numbers"),
        ("rille", {"balance": "median"}, "balance 'median' must be one of quantile, sign, none"),
    ],
)
def test_config_values_of_the_wrong_kind_are_named(copy, key, value, words):
    official = json.loads((copy / "config.json").read_text())
    official["text_config"][key] = value
    (copy / "config.json").write_text(json.dumps(official))
    with pytest.raises(ValueError, match=words):
        load_model(copy)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, b"\xff\xfe"], ids=["empty", "open", "deep", "no text"])
def test_a_config_that_is_no_json_is_named(copy, text):
    (copy / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load_model(copy)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {"a": 3}}])
def test_an_index_of_another_form_is_refused(copy, index):
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a valid shard index"):
        load_model(copy)


@pytest.mark.parametrize("header", [b"[]", b'{"a":1}', b'{"a":{"dtype":"F32","shape":[1]}}'])
def test_a_header_of_another_form_is_refused(copy, header):
    (copy / SHARDS[1]).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="damaged"):
        load_model(copy)


def test_a_save_that_dies_leaves_the_old_checkpoint(copy, monkeypatch):
    model = load_model(copy)
    model.norm.data.fill_(2)
    before = {n: t.clone() for n, t in tensors(copy).items()}

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rille.model.shards._header_bytes", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_model(model, copy)
    assert all(torch.equal(t, before[n]) for n, t in tensors(copy).items())
    assert [p.name for p in copy.parent.iterdir()] == [copy.name]


def test_what_killed_saves_left_is_removed_and_what_others_write_is_not(copy):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left, running = (copy.with_name(f".{copy.name}.partial-{pid}") for pid in (dead.pid, 1))
    for directory in (left, running):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"half")
    save_model(load_model(copy), copy)
    assert not left.exists() and running.exists()


def test_replacing_a_checkpoint_keeps_files_that_are_not_ours(copy):
    (copy / "README.md").write_text("notes")
    model = load_model(copy)
    model.norm.data.fill_(2)
    save_model(model, copy)
    assert (copy / "README.md").read_text() == "notes"
    assert torch.equal(load_model(copy).norm, torch.full((64,), 2.0))


def test_nan_weights_are_not_saved(tmp_path):
    model = new_model(preset("tiny"))
    model.layers["3"].attn.q_up.data[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"layers\.3\.attn\.q_up"):
        save_model(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_shards_are_cut_between_layers(tmp_path, monkeypatch):
    monkeypatch.setattr("rille.model.checkpoint.SHARD_BYTES", 300_000)
    model = new_model(preset("tiny"))
    save_model(model, tmp_path / "m", dtype=torch.float32)
    files = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 4 and files[0] == f"model-00001-of-{len(files):06d}.safetensors"
    again = load_model(tmp_path / "m")
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(tmp_path / "m").values())


def test_one_tensor_at_a_time_is_in_memory(tmp_path, monkeypatch):
    """Saving makes a tensor only when the one before it is written and gone."""
    alive: list[weakref.ref] = []

    def watched(pending, path):
        def watch(make):
            assert all(reference() is None for reference in alive), "an earlier tensor is still held"
            tensor = make()
            if tensor.untyped_storage().data_ptr() not in own:
                alive.append(weakref.ref(tensor))
            return tensor

        save_shard([replace(p, make=partial(watch, p.make)) for p in pending], path)

    monkeypatch.setattr("rille.model.checkpoint.save_shard", watched)
    loaded = load_model(ORACLE)
    own = {parameter.untyped_storage().data_ptr() for parameter in loaded.parameters()}
    for experts in ("bf16", "mxfp4", "keep"):
        save_model(loaded, tmp_path / experts, experts=experts)
    assert len(alive) > 3 * 60


MEMORY = """
import sys, torch
from pathlib import Path
from rille import new_model, preset, save_model

sizes = dict(hidden_size=256, vocab_size=16384, num_experts=32, expert_width=256, latent_width=128)
model = new_model(preset("tiny").replace(**sizes))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
status = lambda key: int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) * 1024
before = status("VmRSS:")
save_model(model, sys.argv[1], experts=sys.argv[2])
parameters = list(model.parameters())
print(status("VmHWM:") - before, sum(p.nbytes for p in parameters), max(p.nbytes for p in parameters))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
@pytest.mark.parametrize("experts", ["keep", "mxfp4"])
def test_what_saving_takes_in_memory(tmp_path, experts):
    """At most a twentieth of the model and one tensor, although the whole model is one shard."""
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "m"), experts]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    peak, model, largest = map(int, printed.split())
    shard = (tmp_path / "m" / "model-00001-of-000001.safetensors").stat().st_size
    assert model > 1e8 and shard > 0.05 * model + largest, "too small to tell"
    assert peak <= 0.05 * model + largest


@pytest.mark.parametrize("dtype", [*DTYPES, None])
def test_shards_are_the_library_s_byte_for_byte(tmp_path, dtype):
    """Scalars, empty tensors, names that JSON escapes, transposed ones; all dtypes in one file where dtype is None."""
    held = {}
    for number, one in enumerate([dtype] if dtype else DTYPES):
        values = (torch.arange(24).view(4, 6) + number).to(one)
        held |= {f"{one}.m": values, f"{one}.t": values.T, f"{one}.scalar": values[1, 2], f"a{one}": values[:0]}
    held['quoted "\u00e9" \\ name'] = torch.ones(3)
    save_shard([Pending.of(name, tensor) for name, tensor in held.items()], tmp_path / "ours")
    save_file(
        {name: t.clone(memory_format=torch.contiguous_format) for name, t in held.items()},
        tmp_path / "theirs",
        metadata={"format": "pt"},
    )
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert all(torch.equal(t, held[name]) for name, t in load_file(tmp_path / "ours").items())
