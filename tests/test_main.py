"""The entry: Ctrl-C while Python loads the command line is one line and 130, whatever is being imported."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parent.parent

# A module that stands for any that the command line imports: the signal comes in its middle, and it swallows it.
INTERRUPTED = """
import os, signal, sys, types

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "tyro":
            sys.meta_path.remove(self)
            for _ in range(TIMES):
                os.kill(os.getpid(), signal.SIGINT)
        return None

sys.meta_path.insert(0, Finder())
from rille.__main__ import main
sys.argv = ["rille", "--version"]
sys.exit(main())
"""


@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_while_the_command_line_loads(times):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.replace("TIMES", str(times))], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nrille: interrupted\n")


def test_both_names_run_it():
    done = subprocess.run([sys.executable, "-m", "rille", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("rille ")
    scripts = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"rille": "rille.__main__:main"}


def test_the_entry_loads_nothing_but_what_waits():
    code = "import sys; import rille.__main__; print(sorted(m for m in sys.modules if m.startswith(('rille', 'tyro'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['rille', 'rille.__main__', 'rille.interrupts']\n"
