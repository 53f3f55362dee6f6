"""Compile the Triton kernels for Hopper on a machine without a GPU, and hold each to its resources.

Each op with kernels has a `specimens.py`, and `..._specimens.py` where it has many, with `SPECIMENS`, a list of
`Specimen` (or a function `specimens()` that returns one): a kernel together with the argument types and constants of
one real launch. Compiling them shows what the interpreter cannot: that the machine code exists, that nothing spills,
that shared memory fits, that products use wgmma, and that the assembler has not made one mistake it is known for.

    python -m rille.ops.ahead [--op kda] [--only WORD] [--sass FOLDER] [--jobs 2]

prints one line a specimen and exits with 1 where a limit is broken. Needs triton and no GPU; TRITON_INTERPRET must be
unset. `make kernels` does it for all of them, and finds kernels without a specimen.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pkgutil import walk_packages
from types import CodeType, ModuleType
from typing import Any, NamedTuple

SHARED_LIMIT = 227 * 1024  # bytes of shared memory one program may have on sm_90


@dataclass(frozen=True, eq=False)
class Specimen:
    """One launch of one kernel.

    signature: type of each runtime argument, such as "*bf16", "i32", "fp32", or a tuple of them. constexprs: value of
    each constant, None for a pointer that is left out. divisible: arguments whose value (address for a pointer) is a
    multiple of 16; a launch sees that by itself, a compilation without arguments does not, and without it loads are not
    vectorised. max_spill_bytes: what a thread may keep outside registers; above 64 give the reason. want_wgmma: the
    products must compile to warp-group instructions.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str | tuple[str, ...]]
    constexprs: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = ()
    max_spill_bytes: int = 64
    reason: str = ""
    want_wgmma: bool = False
    maxnreg: int | None = None
    fp_fusion: bool = True  # whether the compiler may contract a product and a sum

    def __post_init__(self) -> None:
        if self.max_spill_bytes > 64 and not self.reason:
            raise ValueError(f"specimen {self.name}: a limit of {self.max_spill_bytes} spilled bytes needs a reason")


class Build(NamedTuple):
    """What one compilation gave. spills: bytes of stack and local memory a thread. wgmma, register_a: warp-group
    products, and those whose left operand comes from registers. instructions: in the machine code, of which `looped`
    lie inside loops; times the warps this is what one program issues, each turn of a loop counted once. lost: see
    `lost_addresses`. kept: barriers that are never given up (`barriers_gluon.py`)."""

    name: str
    warps: int
    registers: int
    spills: int
    shared: int
    wgmma: int
    register_a: int
    instructions: int
    looped: int
    lost: int
    kept: int


def compile_specimen(specimen: Specimen, sass_folder: Path | None = None) -> Build:
    """Compile for sm_90 down to machine code and read its resources."""
    import triton
    from triton.backends.compiler import GPUTarget

    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise ValueError("ahead: TRITON_INTERPRET=1 replaces the compiler; unset it")
    options: dict[str, Any] = {"num_warps": specimen.num_warps, "num_stages": specimen.num_stages}
    options["enable_fp_fusion"] = specimen.fp_fusion
    if specimen.maxnreg is not None:
        options["maxnreg"] = specimen.maxnreg
    out: Any = triton.compile(_source(specimen), target=GPUTarget("cuda", 90, 32), options=options)
    usage, sass = _disassemble(out.asm["cubin"])
    if sass_folder is not None:
        sass_folder.mkdir(parents=True, exist_ok=True)
        (sass_folder / f"{specimen.name}.sass").write_text(sass)
        for kind in ("ptx", "ttgir"):
            (sass_folder / f"{specimen.name}.{kind}").write_text(out.asm[kind])
    instructions, looped = _count(sass)
    return Build(
        name=specimen.name,
        warps=specimen.num_warps,
        registers=_used("REG", usage),
        spills=_used("STACK", usage) + _used("LOCAL", usage),
        shared=out.metadata.shared,
        wgmma=out.asm["ptx"].count("wgmma.mma_async"),
        register_a=len(re.findall(r"wgmma.mma_async[^;]*\}, *\{", out.asm["ptx"])),
        instructions=instructions,
        looped=looped,
        lost=lost_addresses(sass),
        kept=kept_barriers(out.asm["ptx"]),
    )


def _source(specimen: Specimen) -> Any:
    kernel = specimen.kernel
    while hasattr(kernel, "fn") and not hasattr(kernel, "arg_names"):
        kernel = kernel.fn
    unknown = set(kernel.arg_names) ^ (set(specimen.signature) | set(specimen.constexprs))
    if unknown:
        raise ValueError(f"specimen {specimen.name}: arguments {sorted(unknown)} are not both in the kernel and here")
    signature = {name: specimen.signature.get(name, "constexpr") for name in kernel.arg_names}
    attrs: dict[tuple[int, ...], Any] = {}
    for name in specimen.divisible:
        if name in specimen.signature:
            place, kind = kernel.arg_names.index(name), specimen.signature[name]
            places = [(place,)] if isinstance(kind, str) else [(place, part) for part in range(len(kind))]
            attrs |= {place: [["tt.divisibility", 16]] for place in places}
    if type(kernel).__name__ == "GluonJITFunction":
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(kernel, signature, specimen.constexprs, attrs)
    from triton.compiler import ASTSource

    return ASTSource(kernel, signature, specimen.constexprs, attrs)


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Resource usage and machine code, by the tools inside Triton's wheel."""
    import triton

    tools = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        commands = ([tools / "cuobjdump", "--dump-resource-usage", path], [tools / "nvdisasm", "-c", path])
        texts = [subprocess.run(c, check=True, capture_output=True, text=True).stdout for c in commands]
    return texts[0], texts[1]


def _used(kind: str, usage: str) -> int:
    return max((int(n) for n in re.findall(rf"\b{kind}:(\d+)", usage)), default=0)


def _count(sass: str) -> tuple[int, int]:
    """Instructions, and how many of them lie between a label and a later branch back to it."""
    labels: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    count = 0
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = count
        elif instruction := re.match(r"/\*[0-9a-f]{4,}\*/\s+(.*)", line.strip()):
            target = re.search(r"\bBRA\b.*?`\((\.L_x_\d+)\)", instruction[1])
            if target and target[1] in labels and labels[target[1]] < count:
                spans.append((labels[target[1]], count))
            count += "NOP" not in instruction[1]
    looped = {i for start, end in spans for i in range(start, end + 1)}
    return count, len(looped)


def lost_addresses(sass: str) -> int:
    """Instructions that compute with the stack pointer, R1, though no kernel here takes an address on its stack. Where
    registers run out ptxas 12.8 loses the address of a tile in shared memory and puts R1 in its place: the descriptor
    of a product then points anywhere, and the kernel ends with an illegal access, on a card only."""
    uses = [line for line in sass.splitlines() if re.search(r"\bR1\b", line)]
    kept = re.compile(r"\b(STL|LDL)\b|\bLDC R1,|\b(IADD3|VIADD) R1, R1,")
    return sum(kept.search(line) is None for line in uses)


def kept_barriers(ptx: str) -> int:
    """Barriers that are begun and not given up: a tile laid in their place is not safe there."""
    begun, given_up = (re.findall(rf"\bmbarrier\.{word}[.\w:]* *\[", ptx) for word in ("init", "inval"))
    return len(begun) - len(given_up)


def violations(specimen: Specimen, build: Build) -> list[str]:
    """What a build breaks of its specimen's limits, in words."""
    found = []
    if build.spills > specimen.max_spill_bytes:
        found.append(f"{build.name}: {build.spills} bytes spilled a thread, at most {specimen.max_spill_bytes}")
    if build.shared > SHARED_LIMIT:
        found.append(f"{build.name}: {build.shared} bytes of shared memory, at most {SHARED_LIMIT}")
    if build.lost:
        found.append(f"{build.name}: the stack pointer stands for a lost address in {build.lost} instructions")
    if build.kept:
        found.append(f"{build.name}: {build.kept} barriers are never given up")
    if specimen.want_wgmma and build.wgmma == 0:
        found.append(f"{build.name}: no wgmma instruction")
    return found


def ops_with_specimens() -> list[str]:
    return sorted({path.parent.name for path in Path(__file__).parent.glob("*/*specimens.py")})


def specimens_of(op: str) -> list[Specimen]:
    found: list[Specimen] = []
    for path in sorted((Path(__file__).parent / op).glob("*specimens.py")):
        module = importlib.import_module(f"rille.ops.{op}.{path.stem}")
        found += module.SPECIMENS if hasattr(module, "SPECIMENS") else module.specimens()
    return found


def without_specimen() -> list[str]:
    """Kernels that no specimen compiles: what is decorated for Triton and called by nothing that is."""
    import rille.ops

    kernels, called = dict[str, Any](), set[str]()
    for module in walk_packages(rille.ops.__path__, "rille.ops."):
        for value in vars(importlib.import_module(module.name)).values():
            if (kernel := _jit_function(value)) and kernel.__module__.startswith("rille"):
                kernels[_name_of(kernel)] = kernel
    for kernel in kernels.values():
        names, seen = _names_in(kernel.fn.__code__), kernel.fn.__globals__
        modules = [vars(value) for value in seen.values() if isinstance(value, ModuleType)]
        found = [_jit_function(place[name]) for place in (seen, *modules) for name in names if name in place]
        called |= {_name_of(function) for function in found if function}
    compiled = {_name_of(_jit_function(x.kernel)) for op in ops_with_specimens() for x in specimens_of(op)}
    return sorted(set(kernels) - called - compiled)


def _jit_function(value: Any) -> Any:
    """What a decorator has around it, or None for what Triton does not compile."""
    from triton.runtime.jit import JITFunction

    while hasattr(value, "fn") and not isinstance(value, JITFunction):
        value = value.fn
    return value if isinstance(value, JITFunction) else None


def _name_of(kernel: Any) -> str:
    return f"{kernel.__module__}.{kernel.__name__}"


def _names_in(code: CodeType) -> set[str]:
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


COLUMNS = "warps regs spill shared wgmma A-reg instr loops lost kept"
HEADER = f"{'kernel':<44} " + " ".join(f"{name:>6}" for name in COLUMNS.split())


def line_of(build: Build) -> str:
    return f"{build.name:<44} " + " ".join(f"{value:>6}" for value in build[1:])


def compile_at(place: tuple[str, int], sass_folder: Path | None = None) -> tuple[Build, list[str]]:
    """The specimen of an op at a place of its list, for a process to which kernels cannot be sent."""
    specimen = specimens_of(place[0])[place[1]]
    build = compile_specimen(specimen, sass_folder)
    return build, violations(specimen, build)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rille.ops.ahead", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--op", action="append", help="folder of rille/ops; all that have specimens by default")
    parser.add_argument("--only", default="", help="only specimens with this word in their name")
    parser.add_argument("--sass", type=Path, help="write machine code, PTX and TTGIR of each specimen here")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes; as many as there are processors")
    options = parser.parse_args(arguments)
    places = [
        (op, place)
        for op in options.op or ops_with_specimens()
        for place, specimen in enumerate(specimens_of(op))
        if options.only in specimen.name
    ]
    print(HEADER, flush=True)
    broken = []
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for build, found in pool.map(partial(compile_at, sass_folder=options.sass), places):
            print(line_of(build), flush=True)
            broken += found
    if not (options.op or options.only):
        broken += [f"{name}: a kernel without a specimen" for name in without_specimen()]
    print(f"{len(places)} launches of kernels compiled, {len(broken)} limits broken", *broken, sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
