"""Official checkpoint directories, read and written one tensor at a time.

    config.json    model-00001-of-0000NN.safetensors ...    model.safetensors.index.json    (tokenizer files)

`parameter_table` says which official tensor fills which rows of which parameter. Routed experts are MXFP4 (where there
is an `X.weight_packed`) or plain; group exponents of packed ones are kept, so loading and saving gives the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from rille.misspelt import named
from rille.model.arguments import as_dtype, as_layers, as_path, check_weights, kind
from rille.model.config import K3Config
from rille.model.experts import ExpertWeights
from rille.model.kda import KDA
from rille.model.model import K3
from rille.model.names import Entry, mtp_copies, parameter_table
from rille.model.official import with_quantization
from rille.model.packed import NOT_PACKED, PackedExpertWeights, fill_codes, packed_model, pending_codes
from rille.model.publish import publishing
from rille.model.shards import (
    INDEX,
    CheckpointError,
    Pending,
    ShardReader,
    Stored,
    read_headers,
    reading,
    save_shard,
    shorten,
)
from rille.ops.mx import dequantise_mxfp4, quantise_mxfp4
from rille.packing import as_device

Experts = Literal["keep", "bf16", "mxfp4"]
GROUP = 32  # input columns that share a scale
PLAIN = 255  # scale byte (NaN in E8M0) that marks an expert tensor which was not packed
SHARD_BYTES = 5 * 10**9
_FLOATS = ("BF16", "F16", "F32", "F64")


class SavesTokenizer(Protocol):
    """Anything that can write its files into a checkpoint directory."""

    def save(self, directory: Path) -> object: ...


# --- loading ----------------------------------------------------------------------------------------------------------


@named
def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    layers: range | None = None,
    experts: Literal["values", "mxfp4"] = "values",
) -> K3:
    """Load an official checkpoint directory.

    dtype: of the parameters in memory, a torch dtype or its name (those that the format stores in fp32 stay fp32).
    layers: hold and read only this range. experts: "mxfp4" keeps routed experts packed, for a model that only serves
    (all of them must be packed in the files). Uses the model's own bytes and one shard.

    Raises FileNotFoundError or ValueError (CheckpointError) with all that is wrong: unknown config keys, tensors that
    are missing, surplus, misshaped or truncated, NaN or infinite values.
    """
    dtype, device, directory = as_dtype(dtype), as_device(device), as_path(path)
    if device.type == "meta":
        raise ValueError('device "meta" holds no weights; for shapes: rille.new_model(config, device="meta")')
    if experts not in ("values", "mxfp4"):
        raise ValueError(f"experts={experts!r}: choose values or mxfp4")
    config = K3Config.load(directory)
    layers = as_layers(layers, config.num_layers)
    stored = read_headers(directory)
    table = as_spelled(parameter_table(config, layers), stored)
    copies = [entry for entry in mtp_copies(config) if entry.official in stored]
    check_names(directory, table, copies, stored, whole=layers is None)
    make = packed_model if experts == "mxfp4" else K3
    model = make(config, dtype=dtype, device=device, layers=layers)
    parameters = dict(model.named_parameters())
    bad: list[str] = []
    with torch.no_grad(), reading(directory, stored) as read:
        for piece in sorted(_pieces(table, stored), key=lambda p: (stored[p.names[0]].file, p.names[0])):
            bad += _fill(model, parameters, piece, read)
        bad += [text for entry in copies for text in _other_than(parameters[entry.parameter], entry, read)]
    if bad:
        raise CheckpointError(f"{directory}: {len(bad)} bad tensors: {shorten(bad)}")
    model.prepare()
    return model


@dataclass(frozen=True)
class Piece:
    """One official tensor: its names in the shards (packed and scale, or the tensor itself) and its entry."""

    entry: Entry
    expert: int | None
    names: tuple[str, ...]


def _pieces(table: list[Entry], stored: dict[str, Stored]) -> Iterator[Piece]:
    for entry in table:
        for expert, name in entry.official_names():
            if expert is None:
                yield Piece(entry, None, (name,))
            elif f"{name}.weight_packed" in stored:
                yield Piece(entry, expert, (f"{name}.weight_packed", f"{name}.weight_scale"))
            else:
                yield Piece(entry, expert, (f"{name}.weight",))


def as_spelled(table: list[Entry], stored: dict[str, Stored]) -> list[Entry]:
    """The table with the names of the files: transformers writes a dense layer's `mlp` as `block_sparse_moe`."""
    others = [entry.official.replace(".mlp.", ".block_sparse_moe.") for entry in table]
    return [
        replace(entry, official=other) if entry.official not in stored and other in stored else entry
        for entry, other in zip(table, others, strict=True)
    ]


def check_names(
    directory: Path, table: list[Entry], copies: list[Entry], stored: dict[str, Stored], *, whole: bool
) -> None:
    """Hold the table, and those copies that there are, against the headers.

    Raises CheckpointError with every difference.
    """
    pieces = list(_pieces([*table, *copies], stored))
    expected = {name for piece in pieces for name in piece.names}
    missing = [name for piece in pieces for name in piece.names if name not in stored]
    wrong = [text for piece in pieces for text in _misfits(piece, stored)]
    surplus = [name for name in stored if name not in expected] if whole else []
    problems = [
        f"{len(names)} {what}: {shorten(names)}"
        for what, names in (("missing", missing), ("surplus", surplus), ("misshaped", wrong))
        if names
    ]
    if problems:
        raise CheckpointError(f"{directory}: the tensors do not fit config.json: " + "; ".join(problems))


def _misfits(piece: Piece, stored: dict[str, Stored]) -> Iterator[str]:
    shape = piece.entry.shape
    wanted = {piece.names[0]: shape}
    packed = len(piece.names) == 2
    if packed:
        wanted = {piece.names[0]: (shape[0], shape[1] // 2), piece.names[1]: (shape[0], shape[1] // GROUP)}
    for name, want in wanted.items():
        have = stored.get(name)
        if have is None:
            continue
        padded = name.endswith(".A_log") and _heads_stored(have.shape) >= shape[0]
        if have.shape != want and not padded:
            yield f"{name} is {list(have.shape)}, not {list(want)}"
        elif packed != (have.dtype == "U8") or (not packed and have.dtype not in _FLOATS):
            yield f"{name} has dtype {have.dtype}"


def _heads_stored(shape: tuple[int, ...]) -> int:
    """Numbers in a stored A_log: [n] in the release, [1, 1, n, 1] in older Kimi-Linear files."""
    sizes = [n for n in shape if n != 1] or [1]
    return sizes[0] if len(sizes) == 1 else 0


def _fill(model: K3, parameters: dict[str, nn.Parameter], piece: Piece, read: ShardReader) -> list[str]:
    """Copy one official tensor into its parameter; returns complaints about its values."""
    entry, parameter = piece.entry, parameters[piece.entry.parameter]
    if entry.official.endswith(".A_log"):
        return _fill_a_log(model, piece, read)
    if len(piece.names) == 2:
        try:
            return _fill_packed(model, parameter, piece, read)
        except ValueError as error:
            return [f"{piece.names[0]} ({error})"]
    if piece.expert is not None and parameter.dtype == torch.uint8:
        raise CheckpointError(f"{piece.names[0]} {NOT_PACKED}")  # and so are all others
    value = read(piece.names[0])
    target = _target(parameter, piece)
    target.copy_(value.view(target.shape))
    return [] if _finite(value) else [f"{piece.names[0]} (NaN or infinite values)"]


def _finite(value: Tensor) -> bool:
    """Whether there is no NaN or infinity, a block at a time: the test of a whole tensor takes twice its bytes."""
    return all(bool(torch.isfinite(block).all()) for block in value.flatten().split(1 << 18))


def _target(parameter: Tensor, piece: Piece) -> Tensor:
    target = parameter if piece.expert is None else parameter[piece.expert]
    rows = piece.entry.rows
    return target if rows is None else target[rows[0] : rows[1]]


def _fill_packed(model: K3, parameter: Tensor, piece: Piece, read: ShardReader) -> list[str]:
    packed, scale = (read(name).to(parameter.device) for name in piece.names)
    module_name, leaf = piece.entry.parameter.rsplit(".", 1)
    experts = model.get_submodule(module_name)
    assert isinstance(experts, ExpertWeights)
    if isinstance(experts, PackedExpertWeights):
        fill_codes(_target(parameter, piece), _target(getattr(experts, f"{leaf}_scale"), piece), packed, scale)
        return []
    _target(parameter, piece).copy_(dequantise_mxfp4(packed, scale, parameter.dtype))
    if getattr(experts, f"{leaf}_scale") is None:
        shape = (*parameter.shape[:-1], parameter.shape[-1] // GROUP)
        setattr(experts, f"{leaf}_scale", torch.full(shape, PLAIN, dtype=torch.uint8, device=parameter.device))
    _target(getattr(experts, f"{leaf}_scale"), piece).copy_(scale)
    return []


def _other_than(parameter: Tensor, copy: Entry, read: ShardReader) -> Iterator[str]:
    """A complaint where a copy of embedding or head is another tensor than the one that the model has."""
    if not torch.equal(read(copy.official).to(parameter.device, parameter.dtype), parameter):
        yield f"{copy.official} (differs from the model's own, which the MTP layer shares)"


def _fill_a_log(model: K3, piece: Piece, read: ShardReader) -> list[str]:
    """A_log keeps the length that was stored: heads, then zeros; and its axes, for saving."""
    stored = read(piece.names[0])
    value = stored.flatten().float()
    layer = model.get_submodule(piece.entry.parameter.rsplit(".", 1)[0])
    assert isinstance(layer, KDA)
    layer.A_log_stored = stored.shape
    layer.A_log = nn.Parameter(value.clone().to(model.device), requires_grad=layer.A_log.requires_grad)
    if bool(value[piece.entry.shape[0] :].any()):
        return [f"{piece.names[0]} (entries beyond the {piece.entry.shape[0]} heads are not zero)"]
    return [] if _finite(value) else [f"{piece.names[0]} (NaN or infinite values)"]


# --- saving -----------------------------------------------------------------------------------------------------------


@named
def save_model(
    model: K3,
    path: str | Path,
    *,
    experts: Experts = "keep",
    tokenizer: SavesTokenizer | None = None,
    dtype: torch.dtype | str = torch.bfloat16,
) -> None:
    """Write an official checkpoint directory; what stood at `path` is replaced only when everything is written.

    experts: "keep" stores an expert tensor as it was loaded (MXFP4 where it was packed), "bf16" plain, "mxfp4" packed.
    dtype: of the plain tensors, bf16 in the official format; the official fp32 tensors stay fp32. tokenizer: saves its
    files beside the shards.

    Raises CheckpointError for a range of layers, NaN or infinite values, widths that MXFP4 groups do not divide.
    """
    if experts not in ("keep", "bf16", "mxfp4"):
        raise ValueError(f"experts={experts!r}: choose keep, bf16 or mxfp4")
    if not isinstance(model, K3):
        raise ValueError(f"model must be a K3 model, not {kind(model)}")
    check_weights(model.device)
    if tokenizer is not None and not callable(getattr(tokenizer, "save", None)):
        raise ValueError(f"tokenizer must be able to save itself (rille.load_tokenizer), not {kind(tokenizer)}")
    dtype, path = as_dtype(dtype), as_path(path)
    if len(model.held) != model.config.num_layers:
        raise CheckpointError(f"the model holds layers {model.held} of {model.config.num_layers}; save a whole one")
    with publishing(path) as directory, torch.no_grad():
        _keep_other_files(path, directory)
        written = _write_shards(model, directory, experts, dtype)
        packed = any(name.endswith(".weight_packed") for name in written.names)
        config = with_quantization(model.config, packed).replace(dtype=str(dtype).removeprefix("torch."))
        text = json.dumps(config.to_official(), indent=2, ensure_ascii=False)
        (directory / "config.json").write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(directory)


def _keep_other_files(old: Path, new: Path) -> None:
    """Files that are not ours (a README, tokenizer files) move along when a checkpoint is replaced."""
    for file in old.iterdir() if old.is_dir() else ():
        ours = file.suffix == ".safetensors" or file.name in (INDEX, "config.json")
        if file.is_dir():
            shutil.copytree(file, new / file.name)
        elif not ours:
            shutil.copy2(file, new / file.name)


@dataclass(frozen=True)
class Written:
    names: list[str]
    total_bytes: int


def _write_shards(model: K3, directory: Path, experts: Experts, dtype: torch.dtype) -> Written:
    """Write shard by shard under provisional names, then rename once their number is known."""
    places: list[tuple[list[str], Path]] = []
    total = 0
    for entries in _shards(model, experts, dtype):
        file = directory / f"shard-{len(places)}"
        pending = [p for entry in entries for p in _pending(model, entry, experts, dtype)]
        save_shard(pending, file)
        places.append(([p.name for p in pending], file))
        total += sum(p.nbytes for p in pending)
    weight_map: dict[str, str] = {}
    for number, (names, file) in enumerate(places, 1):
        final = f"model-{number:05d}-of-{len(places):06d}.safetensors"
        file.rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return Written(list(weight_map), total)


def _shards(model: K3, experts: Experts, dtype: torch.dtype) -> Iterator[list[Entry]]:
    """The entries of each shard: whole groups, as many as fit SHARD_BYTES."""
    shard: list[Entry] = []
    size = 0
    for group in _groups(model):
        more = sum(_stored_bytes(model, entry, experts, dtype) for entry in group)
        if shard and size + more > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard, size = shard + group, size + more
    if shard:
        yield shard


def _stored_bytes(model: K3, entry: Entry, experts: Experts, dtype: torch.dtype) -> int:
    """Bytes of an entry in the file (of one whose experts differ: as if all were packed)."""
    if entry.experts is not None:
        module_name, leaf = entry.parameter.rsplit(".", 1)
        loaded_packed = getattr(model.get_submodule(module_name), f"{leaf}_scale") is not None
        if experts == "mxfp4" or (experts == "keep" and loaded_packed):
            return entry.count // 2 + entry.count // GROUP
    return entry.count * (torch.float32 if entry.storage == "f32" else dtype).itemsize


def _groups(model: K3) -> list[list[Entry]]:
    """What goes into a shard together: one layer after the other, the trunk's other tensors, tower, projector."""
    groups: dict[str, list[Entry]] = {}
    for entry in (*parameter_table(model.config), *mtp_copies(model.config)):
        layer = entry.official.partition("model.layers.")[2].partition(".")[0]
        groups.setdefault(layer or entry.official.partition(".")[0], []).append(entry)
    return [groups[key] for key in sorted(groups, key=lambda key: not key.isdigit())]


def _pending(model: K3, entry: Entry, experts: Experts, dtype: torch.dtype) -> Iterator[Pending]:
    """The official tensors of an entry, each made when it is written: no copy of the model is ever held."""
    parameter = model.get_parameter(entry.parameter).detach()
    if not _finite(parameter):
        raise CheckpointError(f"{entry.parameter}: NaN or infinite values; such a checkpoint could not be loaded again")
    if entry.experts is not None:
        for expert, name in entry.official_names():
            assert expert is not None
            yield from _pending_expert(model, entry, parameter, experts, dtype, expert, name)
    elif entry.official.endswith(".A_log"):
        layer = model.get_submodule(entry.parameter.rsplit(".", 1)[0])
        assert isinstance(layer, KDA)
        yield Pending.of(entry.official, parameter.view(layer.A_log_stored))
    else:
        rows = parameter if entry.rows is None else parameter[entry.rows[0] : entry.rows[1]]
        stored = torch.float32 if entry.storage == "f32" else dtype
        yield Pending(entry.official, stored, entry.shape, lambda: rows.reshape(entry.shape).to(stored))


def _pending_expert(
    model: K3, entry: Entry, parameter: Tensor, experts: Experts, dtype: torch.dtype, expert: int, name: str
) -> Iterator[Pending]:
    """One expert's tensor: plain, or packed and its scales."""
    module_name, leaf = entry.parameter.rsplit(".", 1)
    scales = getattr(model.get_submodule(module_name), f"{leaf}_scale")
    rows = slice(None) if entry.rows is None else slice(*entry.rows)
    weight = parameter[expert, rows]
    if weight.dtype == torch.uint8:
        yield from pending_codes(name, weight, scales[expert, rows], dtype if experts == "bf16" else None)
        return
    scale = None if scales is None or bool((scales[expert, rows] == PLAIN).all()) else scales[expert, rows]
    if experts == "bf16" or (experts == "keep" and scale is None):
        yield Pending(f"{name}.weight", dtype, tuple(weight.shape), lambda: weight.to(dtype))
        return
    height, width = _divisible(weight, name).shape
    made: list[Tensor] = []  # the scales, between the two: by name they follow directly

    def pack() -> Tensor:
        packed, scale_bytes = quantise_mxfp4(weight.cpu(), None if scale is None else scale.cpu())
        made.append(scale_bytes)
        return packed

    yield Pending(f"{name}.weight_packed", torch.uint8, (height, width // 2), pack)
    yield Pending(f"{name}.weight_scale", torch.uint8, (height, width // GROUP), made.pop)


def _divisible(weight: Tensor, name: str) -> Tensor:
    if weight.shape[-1] % GROUP:
        raise CheckpointError(f"{name}: {weight.shape[-1]} input columns are no multiple of MXFP4's groups of {GROUP}")
    return weight
