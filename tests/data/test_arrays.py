"""Arrays on disk are numpy's; a full disk is an error with its number."""

import errno
from pathlib import Path

import numpy as np
import pytest

from rille.data.arrays import save_array
from tests.train.small import largest_file


@pytest.mark.parametrize("array", [np.arange(1000), np.zeros((0, 128), np.uint32), np.ones((3, 4), ">u8"), np.array(5)])
def test_as_numpy_saves_it(tmp_path: Path, array: np.ndarray):
    save_array(tmp_path / "a.npy", array)
    np.save(tmp_path / "b.npy", array)
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


def test_a_full_disk_has_its_number(tmp_path: Path):
    for size in (50, 5_000, 70_000):
        with largest_file(size), pytest.raises(OSError) as error:
            save_array(tmp_path / "a.npy", np.arange(10_000))
        assert error.value.errno == errno.EFBIG
