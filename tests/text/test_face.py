"""`rille.text` is lazy and whole."""

import subprocess
import sys

import pytest

import rille.text


def test_every_name_is_there():
    for name in dir(rille.text):
        assert getattr(rille.text, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'; it has load_tokenizer"):
        _ = rille.text.nothing


def test_nothing_is_loaded_before_it_is_used():
    code = "import sys, rille.text; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'PIL', 'tokenizers')))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_of_it_works_without_torch():
    code = "import sys, rille.text; [getattr(rille.text, n) for n in dir(rille.text)]; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
