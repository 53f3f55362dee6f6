"""Loggers: rows that survive a kill, scalars that TensorBoard reads, lines where there is no terminal."""

from contextlib import ExitStack
from io import StringIO

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rille.train.metrics import Bar, JsonLines, Lines, TensorBoard, read_metrics
from tests.train.small import largest_file

VALUES = {"loss": 2.5, "tokens_per_second": 4321.0}


def test_rows_after_the_checkpoint_are_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    logger = JsonLines(path, 0)
    for step in (1, 2, 3):
        logger.log(step, VALUES)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed in the middle of a line
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    again = JsonLines(path, 2)
    again.log(3, {"loss": 1.0})
    assert read_metrics(path) == [{"step": 1, **VALUES}, {"step": 2, **VALUES}, {"step": 3, "loss": 1.0}]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("row", ["noise", "[]", "3", "{}", '{"step": "1"}', ""])
def test_damage_is_named(tmp_path, row):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{row}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged .*; move it away"):
        JsonLines(tmp_path / "metrics.jsonl", 1)


def test_tensorboard_reads_the_scalars(tmp_path):
    with ExitStack() as stack:
        board = TensorBoard(tmp_path, 0, stack)
        board.log(1, VALUES)
        board.log(2, {"loss": 1.5})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5), (2, 1.5)]
    assert [event.value for event in events.Scalars("tokens_per_second")] == [4321.0]


def test_tensorboard_forgets_the_steps_of_a_run_that_died(tmp_path):
    for start, steps, value in ((0, (1, 2, 3, 4), 9.0), (2, (3,), 1.0)):
        with ExitStack() as stack:
            board = TensorBoard(tmp_path, start, stack)
            for step in steps:
                board.log(step, {"loss": value})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 9.0), (2, 9.0), (3, 1.0)]


@pytest.mark.parametrize("kind", [JsonLines, TensorBoard])
def test_a_full_disk_is_an_error_of_the_step(tmp_path, kind, capsys):
    """Not of a thread whose traceback passes by."""
    with pytest.raises(OSError, match="File too large"), ExitStack() as stack:
        logger = kind(tmp_path / "place", 0, stack) if kind is TensorBoard else kind(tmp_path / "place", 0)
        with largest_file(1000):
            for step in range(1, 100):
                logger.log(step, VALUES)
    assert capsys.readouterr().err == ""


def test_a_line_now_and_then():
    text = StringIO()
    logger = Lines(Console(file=text), 100)
    for step in range(1, 101):
        logger.log(step, {**VALUES, "held_out_loss": 3.25} if step == 52 else VALUES)
    lines = text.getvalue().splitlines()
    assert len(lines) == 22
    assert lines[0] == "step 1/100 · loss 2.500 · 4,321 tokens/s"
    assert "step 52/100 · loss 2.500 · 4,321 tokens/s · held-out 3.250" in lines


def test_the_bar_shows_step_loss_and_speed():
    text = StringIO()
    with ExitStack() as stack:
        bar = Bar(Console(file=text, force_terminal=True, width=100), 10, 100, stack)
        bar.log(11, {**VALUES, "held_out_loss": 3.25})
    assert " 11/100" in text.getvalue()
    assert "loss 2.500 · 4,321 tokens/s · held-out 3.250" in text.getvalue()
