"""The command line as a user meets it: verbs, mistakes, exit codes, a run from text to generated text."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from rille import cli, load_model
from rille.model.presets import PRESETS
from rille.train.metrics import read_metrics
from tests.train.small import largest_file, write_text

SMALL = "--data.vocab-size 320 --model.vocab-size 320 --data.batch-tokens 96 --data.sequence-length 48 --eval-tokens 96"


def rille(*arguments: str) -> int:
    """Run in this process; tyro ends with SystemExit where an argument is wrong or help was asked for."""
    try:
        return cli.main(list(arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1


def train(text: Path, out: Path, *more: str) -> int:
    return rille("train", "tiny", "--data", str(text), "--out", str(out), *SMALL.split(), *more)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "small"
    assert train(text, out, "--steps", "3") == 0
    return out


# --- what teaches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_overview(arguments, capsys):
    assert rille(*arguments) == 0
    out = capsys.readouterr().out
    for verb in cli.VERBS:
        assert re.search(rf"^  {verb} +\w", out, re.MULTILINE)
        assert f"rille {verb} " in out.split("examples")[1]


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_explains_itself(verb, capsys):
    assert rille(verb, "--help") == 0
    assert f"usage: rille {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [verb for verb in cli.VERBS if verb != "doctor"])  # which needs nothing
def test_a_verb_alone_explains_itself_too(verb, capsys):
    assert rille(verb) == 2
    assert f"usage: rille {verb}" in capsys.readouterr().out


HELPS = [*((verb,) for verb in ("generate", "chat", "serve", "convert", "plan")), ("train", "tiny"), ("bench", "serve"),
         ("study", "attnres-tiny"), ("data", "build"), ("eval", "held-out")]  # fmt: skip


@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_every_option_says_what_it_is_for(words, capsys):
    rille(*words, "--help")
    text = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    silent = re.findall(r"(--[\w.-]+)(?: [^a-z ]\S*)* \((?:default|required)", text)
    assert len(re.findall(r" --[a-z]", text)) > 2 and not silent


def test_help_breaks_lines_where_sentences_end():
    """The parser keeps the line ends inside the docstring of a setting."""
    breaks = 0
    for path in (file for name in ("*config.py", "settings.py") for file in Path(cli.__file__).parent.rglob(name)):
        for kind in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
            for field, after in pairwise(kind.body):
                if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                    *broken, _ = ast.literal_eval(after.value).splitlines()
                    breaks += len(broken)
                    assert all(line.endswith((".", ":")) for line in broken), (path, ast.unparse(field))
    assert breaks


def test_plan_names_every_preset(capsys):
    rille("plan", "--help")
    words = re.sub(r"[\s│|]+", " ", capsys.readouterr().out)
    assert all(re.search(rf"[(,] ?{name}[,)]", words) for name in PRESETS)


def test_version(capsys):
    assert rille("--version") == 0
    assert re.fullmatch(r"rille \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_help_and_mistakes_need_no_torch():
    code = """
import sys
from rille.cli import main
for arguments in (["--help"], ["train", "--help"], ["train", "tiny", "--help"], ["train", "tiny", "--steps", "0"],
                  ["trian"], ["generate", "--help"], ["plan", "k3"], ["convert", "absent", "there"]):
    try:
        main(arguments)
    except SystemExit:
        pass
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", "unknown verb 'trian'; did you mean 'train'?"),
        ("sing", "unknown verb 'sing'; `rille --help` lists all"),
        ("train tyni", "unknown recipe 'tyni'; did you mean 'tiny'? the recipes are tiny, nano"),
        ("train tiny --steps 0", "steps is 0; it must be at least 1"),
        ("train tiny --steps -5", "steps is -5; it must be at least 1"),
        ("train tiny --steps many", "--steps takes INT, not 'many' (`rille train tiny --help` lists all)"),
        ("train tiny --max-minutes soon", "--max-minutes takes {None}|FLOAT, not 'soon' (`rille train tiny --help`"),
        (
            "plan tiny --context 8 far",
            "--context takes [INT [INT ...]], not '8', 'far' (`rille plan --help`",
        ),
        (
            "train tiny --optim.lrr 1",
            "Unrecognized options: --optim.lrr, 1; did you mean --optim.lr? (`rille train tiny",
        ),
        ("train tiny --optim.rule sgd", "invalid choice 'sgd' for argument '--optim.rule'. Expected one of ('adamw'"),
        ("train tiny more", "Unrecognized options: more (`rille train tiny --help` lists all)"),
        ("train tiny --mtp-weight 0.3", "the model has no MTP layer; give --model.mtp-layers 1"),
        ("train tiny --data LATIN --out OUT", "is not UTF-8 text (byte 0xe9 at offset 3)"),
        ("train tiny --data FOLDER --out OUT", "FOLDER holds no document with text; give"),
        ("train tiny --out EMPTY/run", "rille: Not a directory: 'EMPTY/run'"),
        ("train tiny --out caf\udce9", "argument b'caf\\xe9' is not UTF-8; rename the file or directory"),
        ("convert RUN caf\udce9", "argument b'caf\\xe9' is not UTF-8"),
        ("generate caf\udce9 --prompt x", "argument b'caf\\xe9' is not UTF-8"),
        ("train tiny --optim.lr -1", "rille: optim.lr is -1.0; it must be above 0"),
        ("train tiny --data absent --out OUT", "absent does not exist; give a UTF-8 text file, a folder"),
        ("train tiny --data EMPTY --out OUT", "is empty; give a UTF-8 text file"),
        ("train tiny --data BINARY --out OUT", "is not text (a zero byte at offset 2)"),
        ("train tiny --resume --out OUT", "holds no run to resume"),
        ("train tiny --out EMPTY", "EMPTY is a file; name a directory for the run"),
        ("generate absent --prompt x", "absent does not exist; give a checkpoint directory"),
        ("generate FOLDER --prompt x", "holds no checkpoint"),
        ("generate RUN", "rille: rille generate needs --prompt TEXT (`rille generate --help` lists all)"),
        ("convert --dtype bf16", "rille: rille convert needs SRC, DST (`rille convert --help` lists all)"),
        ("generate RUN --prompt x --temperature -1", "temperature is -1.0; it must be at least 0"),
        ("generate RUN --prompt x --top-p 0", "top_p is 0.0; it must be above 0"),
        ("generate RUN --prompt x --max-new-tokens -1", "max_new_tokens is -1; it must be at least 0"),
        ("convert absent OUT", "absent does not exist"),
        ("convert RUN RUN", "exists already; name a new directory"),
        ("convert RUN OUT --experts int8", "--experts"),
        ("plan k33", "'k33' is neither a preset nor a directory; did you mean 'k3'?"),
        ("plan k3 --gpus 0", "gpus is 0"),
    ],
)
def test_mistakes_end_with_2_and_say_what_to_do(arguments, message, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").touch()
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "LATIN").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "BINARY").write_bytes(b"\1\2\0\3" * 50)
    assert rille(*(str(trained) if word == "RUN" else word for word in arguments.split())) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.startswith("rille: ") and printed.count("\n") == 1
    assert not (tmp_path / "OUT").exists()


def test_a_run_is_not_overwritten_and_not_mixed(text, trained, capsys):
    rows = (trained / "metrics.jsonl").read_text()
    assert train(text, trained, "--steps", "3") == 2
    assert "holds a run already: add --resume" in capsys.readouterr().err
    assert train(text, trained, "--steps", "3", "--resume", "--model.kda-heads", "4") == 2
    assert "other settings: model.kda_heads 3, now 4" in capsys.readouterr().err
    assert rille("train", "nano", "--out", str(trained), "--resume") == 2
    assert "is of a run with other settings" in capsys.readouterr().err
    assert (trained / "metrics.jsonl").read_text() == rows


def test_a_read_only_folder_is_a_fault_of_the_machine(text, tmp_path, monkeypatch, capsys):
    def refuse(self, *rest, **more):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)  # permissions would not stop an administrator
    assert train(text, tmp_path / "run", "--steps", "1") == 1
    assert re.fullmatch(
        r"rille: .*Permission denied: .*run'. Name a directory that you may write to\n", capsys.readouterr().err
    )


def test_memory_that_is_not_there_is_a_fault_of_the_machine(monkeypatch, capsys):
    monkeypatch.setattr(cli, "run", lambda _: torch.empty(2**60, dtype=torch.uint8))
    assert cli.main([]) == 1
    told = capsys.readouterr().err
    assert told == "rille: this machine has no 1,152,921,504,606,846,976 bytes of memory left. Ask for less\n"

    def full(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(cli, "run", full)
    assert cli.main([]) == 1
    assert capsys.readouterr().err == "rille: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    monkeypatch.setattr(cli, "run", lambda _: torch.ones(2) @ torch.ones(3))  # a fault of ours is not hidden
    with pytest.raises(RuntimeError, match="size"):
        cli.main([])


FULL_DISK = """
import resource, sys
from rille.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


def test_a_full_disk_keeps_old_checkpoints(text, trained, tmp_path):
    out = tmp_path / "run"
    assert train(text, out, "--steps", "2") == 0
    old = load_model(out / "checkpoints" / "step-000002")
    command = ["train", "tiny", "--data", str(text), "--out", str(out), *SMALL.split(), "--steps", "4", "--resume"]
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, "1000000", *command], capture_output=True, text=True, env=environment()
    )
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    last = run.stderr.splitlines()[-1]
    assert last.startswith("rille: File too large: ")
    assert last.endswith(". Make room on that disk. The run goes on from its last checkpoint with --resume")
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000002"]
    again = load_model(out / "checkpoints" / "step-000002")
    assert all(torch.equal(a, b) for a, b in zip(old.parameters(), again.parameters(), strict=True))
    assert train(text, out, "--steps", "4", "--resume") == 0


def test_a_full_disk_is_no_resume_where_there_is_no_run(text, trained, tmp_path, capsys):
    """What to do depends on the verb, and on whether the run has begun."""
    for command in (
        ["convert", str(trained), str(tmp_path / "out")],
        ["train", "tiny", "--data", str(text), "--out", str(tmp_path / "out"), *SMALL.split(), "--steps", "2"],
    ):
        with largest_file(2000):
            assert rille(*command) == 1
        printed = capsys.readouterr().err
        assert re.fullmatch(r"rille: File too large.*\. Make room on that disk\n", printed), printed
        assert not (tmp_path / "out" / "model").exists() and not (tmp_path / "out" / "config.json").exists()


def test_ctrl_c_waits_while_libraries_load(monkeypatch, capsys):
    """It is obeyed as soon as they are there, not in the middle of one."""
    done = []

    def interrupted(*_):
        with cli.loading():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("loaded")
        done.append("worked")
        return 0

    monkeypatch.setitem(cli.VERBS, "plan", cli.Verb(interrupted, ""))
    assert rille("plan") == 130
    assert done == ["loaded"] and capsys.readouterr().err == "\nrille: interrupted\n"


# --- what works -------------------------------------------------------------------------------------------------------


def test_generate_from_run_and_checkpoint(trained, capsys):
    capsys.readouterr()
    texts = []
    for place in (trained, trained / "model", trained / "checkpoints" / "step-000003"):
        assert rille("generate", str(place), "--prompt", "def f", "--max-new-tokens", "8") == 0
        out, err = capsys.readouterr()
        texts.append(out)
        assert re.fullmatch(r".*: \d tokens, \d+ tokens/s\n", err)
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].startswith("def f")


@pytest.mark.parametrize("prompt", ["", "x"])
def test_short_prompts_work(trained, prompt, capsys):
    assert rille("generate", str(trained), "--prompt", prompt, "--max-new-tokens", "1", "--temperature", "0") == 0
    assert capsys.readouterr().out.startswith(prompt)


def test_convert_and_back(trained, tmp_path, capsys):
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    assert rille("convert", str(trained), str(packed), "--experts", "mxfp4") == 0
    assert rille("convert", str(packed), str(plain), "--dtype", "fp32", "--experts", "bf16") == 0
    assert (packed / "tokenizer.json").read_bytes() == (trained / "model" / "tokenizer.json").read_bytes()
    assert "mxfp4-pack-quantized" in (packed / "config.json").read_text()
    assert json.loads((plain / "config.json").read_text())["dtype"] == "float32"
    one, other = load_model(packed), load_model(plain)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    again = tmp_path / "again"
    assert rille("convert", str(packed), str(again)) == 0
    shard = "model-00001-of-000001.safetensors"
    assert (again / shard).read_bytes() == (packed / shard).read_bytes()
    assert rille("generate", str(packed), "--prompt", "def", "--max-new-tokens", "2") == 0


def test_plan_of_a_preset_and_of_a_checkpoint(trained, capsys):
    assert rille("plan", "k3", "--gpus", "2048", "--context", "4096", "8192") == 0
    out = capsys.readouterr().out
    assert "2,779,484,476,000" in out and "104,189,612,640" in out and "8,192" in out
    assert rille("plan", str(trained)) == 0
    assert "vocabulary 320" in capsys.readouterr().out


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_ctrl_c_saves_and_resume_goes_on(text, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "rille.cli", "train", "tiny", "--data", str(text), "--out", str(out)]
    command += [*SMALL.split(), "--steps", "4000", "--checkpoint-every", "1000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    deadline = time.monotonic() + 120
    while not read_metrics(out / "metrics.jsonl") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=120)
    assert process.returncode == 130
    message = re.search(r"rille: stopped by SIGINT after step (\d+); a checkpoint is saved\. To go on: (.*)", printed)
    assert message, printed
    assert "Traceback" not in printed
    step = int(message[1])
    assert message[2].startswith("rille train tiny --data ") and message[2].endswith("--resume")
    arguments = message[2].split()[1:]
    arguments[arguments.index("4000")] = str(step + 1)
    assert rille(*arguments) == 0
    assert [row["step"] for row in read_metrics(out / "metrics.jsonl")] == list(range(1, step + 2))
