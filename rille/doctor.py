"""`rille doctor`: what is installed, what this machine has, which backend each operation takes here and why.

Whatever is missing or broken is a line of the report, never a failure of it: this module imports without torch, and
looks at everything by trying it.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from rille import __version__
from rille.model.config import K3Config

OLDEST_TORCH = (2, 11)
GB = 1e9
BASE = ("numpy", "safetensors", "tokenizers", "tiktoken", "tyro", "rich", "pillow", "tensorboard", "matplotlib")


@dataclass(frozen=True)
class Extra:
    """An optional part of the install: `rille[name]`, its packages (as they are called when installed), their use."""

    name: str
    packages: tuple[str, ...]
    use: str


EXTRAS = (
    Extra("gpu", ("triton",), "kernels on NVIDIA cards; without it the operations run as plain PyTorch"),
    Extra("data", ("pyarrow", "rensa", "zstandard"), "`rille data`, and training on .parquet and .zst files"),
    Extra(
        "serve",
        ("llguidance", "fastapi", "uvicorn", "httptools", "pydantic", "prometheus-client"),
        "`rille serve`, and replies held to a grammar",
    ),
    Extra("events", ("pyzmq", "msgspec"), "`rille serve` tells routers what its cache holds"),
    Extra("eval", ("lm-eval",), "`rille eval harness`: question suites"),
    Extra("hf", ("datasets",), "data sets of the Hugging Face hub as sources"),
    Extra(
        "dev",
        (
            *("pytest", "pytest-xdist", "hypothesis", "ruff", "pyright", "import-linter"),
            *("transformers", "anthropic", "openai", "playwright"),
        ),
        "tests and checks of Rille itself",
    ),
)


def doctor(config: K3Config, name: str) -> Iterator[str]:
    """The lines of the report. config, name: the model whose operations are asked about."""
    torch, fault = try_torch()
    yield f"rille     {__version__}"
    yield f"python    {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"torch     {torch.__version__ if torch else fault}"
    yield f"cuda      {cuda_line(torch)}"
    yield f"triton    {installed('triton') or 'not installed'}"
    yield "packages  " + ", ".join(f"{package} {installed(package) or 'MISSING'}" for package in BASE)
    yield from ("", "devices", f"  cpu     {cpu_line(torch)}")
    yield from device_lines(torch)
    device = "cuda" if torch and cuda_fault(torch) is None else "cpu"
    yield from ("", f"operations of {name} on {device} (another model: --preset NAME|CHECKPOINT)")
    yield from operation_lines(torch, config, device)
    yield from ("", "extras")
    yield from map(extra_line, EXTRAS)
    yield from ("", verdict(torch, fault))


def try_torch() -> tuple[ModuleType | None, str]:
    """torch, or why there is none."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return None, f"cannot be imported: {' '.join(str(error).split())}"
    return torch, ""


def installed(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cuda_fault(torch: ModuleType) -> str | None:
    """Why no CUDA device can be used, or None; a small sum on the device is the proof."""
    if not torch.cuda.is_available():
        built = "built without CUDA" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        return f"torch (which is {built}) finds no CUDA device"
    try:
        torch.ones(2, device="cuda").sum().item()
    except RuntimeError as error:
        return f"the CUDA device fails: {str(error).splitlines()[0]}"
    return None


def cuda_line(torch: ModuleType | None) -> str:
    if torch is None:
        return "unknown without torch"
    fault = cuda_fault(torch)
    if fault is None:
        return f"{torch.version.cuda}, {torch.cuda.device_count()} device(s)"
    return f"none: {fault}" + (", though this machine has an NVIDIA driver" if has_driver() else "")


def has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def cpu_line(torch: ModuleType | None) -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limit = os.environ.get("OMP_NUM_THREADS")
    threads = f", torch threads: {torch.get_num_threads()}" if torch else ""
    threads += f" (OMP_NUM_THREADS is {limit})" if limit else ""
    return f"{cores} cores{threads}; memory {memory_line()}"


def memory_line() -> str:
    """Of the host, and the limit of the container if it has one."""
    fields = dict(re.findall(r"(\w+):\s+(\d+) kB", read("/proc/meminfo")))
    if "MemTotal" not in fields:
        return "unknown"
    total, free = (int(fields.get(key, 0)) * 1024 for key in ("MemTotal", "MemAvailable"))
    line = f"{total / GB:.1f} GB, {free / GB:.1f} available"
    limit = read("/sys/fs/cgroup/memory.max").strip()
    return f"{line}; the container may use {int(limit) / GB:.1f} GB" if limit.isdigit() else line


def read(path: str) -> str:
    file = Path(path)
    return file.read_text(encoding="utf-8") if file.is_file() and os.access(file, os.R_OK) else ""


def device_lines(torch: ModuleType | None) -> Iterator[str]:
    if torch is None or cuda_fault(torch) is not None:
        return
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield (
            f"  cuda:{index}  {card.name}, sm_{card.major}{card.minor}, {card.multi_processor_count} multiprocessors, "
            f"{total / GB:.1f} GB, {free / GB:.1f} free"
        )


def operation_lines(torch: ModuleType | None, config: K3Config, device: str) -> Iterator[str]:
    if torch is None:
        yield "  unknown without torch"
        return
    try:
        from rille.ops.backends import report

        choices = report(config, device)
    except (ImportError, OSError, RuntimeError) as error:  # a broken triton, a full card
        yield f"  unknown: {' '.join(str(error).split())}"
        return
    for choice in choices:
        yield f"  {choice.op:<16} {choice.backend:<10} {choice.reason}"


def extra_line(extra: Extra) -> str:
    missing = [package for package in extra.packages if installed(package) is None]
    if not missing:
        return f"  {extra.name:<6} present  {extra.use}"
    return f"  {extra.name:<6} missing  {extra.use}: {', '.join(missing)}; pip install 'rille[{extra.name}]'"


def verdict(torch: ModuleType | None, fault: str) -> str:
    """One line: ready for what, or what to do first."""
    if torch is None:
        return f"not ready: torch {fault}. Install it: pip install torch"
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < OLDEST_TORCH:
        return (
            f"not ready: torch {torch.__version__} is too old: pip install 'torch>={'.'.join(map(str, OLDEST_TORCH))}'"
        )
    if missing := [package for package in BASE if installed(package) is None]:
        return f"not ready: {', '.join(missing)} missing: pip install {' '.join(missing)}"
    if cuda_fault(torch) is None:
        if find_spec("triton") is None:
            return "ready, but slow on the GPU: there is no triton: pip install 'rille[gpu]'"
        return f"ready: {torch.cuda.get_device_name(0)} with Triton kernels"
    if has_driver():
        return f"ready on the CPU only: {cuda_fault(torch)}, though this machine has an NVIDIA driver"
    return (
        "ready: on the CPU, which is enough for `rille train tiny` and for small checkpoints; there is no CUDA device"
    )
