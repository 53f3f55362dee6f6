"""Figures of rows of logits: the kernels against the definition."""

import pytest
import torch

from rille.ops.figures import choose_backend, token_figures

pytest.importorskip("triton")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU the interpreter runs")


def draw(N, W, dtype=torch.float32, device="cpu"):
    """Rows that lie apart, NaN beside them."""
    wide = torch.full((N, W + 7), torch.nan)
    wide[:, :W] = 4 * torch.randn(N, W, generator=torch.Generator().manual_seed(N + W))
    return wide.to(device, dtype)[:, :W]


def compare(logits, tokens=None, least=-torch.inf, drawn=None):
    got, want = (token_figures(logits, tokens, least, drawn=drawn, backend=name) for name in ("triton", "reference"))
    assert torch.equal(got[0], want[0]) and got[1].dtype == torch.float64 and got[1].shape == (3, len(logits))
    assert torch.equal(got[1][2], want[1][2])
    numbers = want[1][2] > 0
    torch.testing.assert_close(got[1][:, numbers], want[1][:, numbers], atol=1e-5, rtol=1e-6)
    return got


SIZES = [(1, 1), (0, 9), (3, 64), (5, 65), (2, 1000)]


@on_cpu
@pytest.mark.parametrize("N, W", SIZES)
def test_figures_are_those_of_the_definition(N, W):
    logits = draw(N, W)
    compare(logits)
    compare(logits, torch.arange(N) * 13 % W)
    compare(logits, torch.zeros(N, dtype=torch.int64), least=-1.0)
    compare(logits.bfloat16())


def lots(N, device="cpu"):
    heats = torch.tensor([0.0, 1.0, 0.3, 2.0, 1e-100, 50.0], dtype=torch.float64).repeat(N)[:N]
    numbers = torch.rand(N, generator=torch.Generator().manual_seed(N), dtype=torch.float64)
    return heats.to(device), numbers.to(device)


@on_cpu
@pytest.mark.parametrize("N, W", [(6, 1), (40, 64), (30, 65), (24, 1000)])
def test_drawn_tokens_are_those_of_the_definition(N, W):
    compare(draw(N, W), drawn=lots(N))
    compare(draw(N, W).round(), drawn=lots(N))
    heats, numbers = lots(N)
    for number in (0.0, 0.5, 1 - 1e-9):
        compare(draw(N, W), drawn=(heats, torch.full_like(numbers, number)))
    highest = token_figures(30 * draw(N, W), drawn=(heats, torch.full_like(numbers, 1 - 2**-53)), backend="triton")
    assert (highest[1][1] > -1e4).all(), "rounding reaches nothing without mass"
    far = torch.full((N, W), -1e4)
    far[:, W // 2] = 0.0
    assert (compare(far, drawn=(heats + 1, numbers))[0] == W // 2).all(), "nothing without mass is drawn"


@on_cpu
def test_what_is_drawn_is_distributed_as_it_should_be():
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0]).log_softmax(0).repeat(4000, 1)
    numbers = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    tokens, _ = token_figures(logits, drawn=(torch.full_like(numbers, 0.7), numbers), backend="triton")
    shares = torch.softmax(logits[0].double() / 0.7, 0)
    assert (torch.bincount(tokens, minlength=4) / 4000 - shares).abs().max() < 1e-3


@on_cpu
def test_of_equal_logits_the_lowest_id_is_taken():
    logits = torch.zeros(3, 200)
    logits[1, 70:], logits[2, [150, 199]] = 2.0, 5.0
    assert compare(logits)[0].tolist() == [0, 70, 150]


@on_cpu
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 129])
def test_a_row_that_is_no_number_says_so(value, place):
    logits = draw(4, 130)
    clean = token_figures(logits, backend="triton")
    logits[2, place] = value
    tokens, figures = token_figures(logits, backend="triton")
    others = torch.tensor([0, 1, 3])
    assert figures[2].tolist() == [1, 1, 0, 1] and 0 <= tokens[2] < 130
    assert torch.equal(tokens[others], clean[0][others]) and torch.equal(figures[:, others], clean[1][:, others])


@on_cpu
def test_a_row_without_any_number():
    logits = torch.full((2, 130), torch.nan)
    logits[1] = -torch.inf
    tokens, figures = token_figures(logits, backend="triton")
    assert figures[2].tolist() == [0, 0] and bool(((tokens >= 0) & (tokens < 130)).all())


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="want \\[N, W\\]"):
        token_figures(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="want \\[N, W\\]"):
        token_figures(torch.zeros(3, 0))
    with pytest.raises(ValueError, match="not both"):
        token_figures(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), drawn=lots(3))
    with pytest.raises(ValueError, match="unknown backend"):
        token_figures(torch.zeros(3, 4), backend="fast")
    with pytest.raises(ValueError, match="cannot run"):
        token_figures(torch.zeros(3, 4, dtype=torch.float64), backend="triton")
    assert choose_backend(torch.zeros(3, 4))[0] == "reference"


@pytest.mark.gpu
@pytest.mark.parametrize("N, W", [(1, 32768), (64, 32768), (5, 163840), (3, 1000)])
def test_on_a_gpu(N, W):
    logits = draw(N, W, torch.bfloat16, "cuda")
    compare(logits)
    compare(logits.float(), torch.arange(N, device="cuda") * 977 % W)
    alone = token_figures(logits[N - 1 :])
    tokens, figures = token_figures(logits)
    assert torch.equal(alone[0], tokens[N - 1 :]) and torch.equal(alone[1], figures[:, N - 1 :])
    logits[0, W // 2] = torch.nan
    assert token_figures(logits)[1][2, 0] == 0
    logits, (heats, numbers) = draw(N, W, torch.bfloat16, "cuda"), lots(N, "cuda")
    for number in (0.0, 0.3, 0.999):
        compare(logits, drawn=(heats, (numbers + number) % 1))
    tokens, figures = token_figures(logits, drawn=(heats, numbers))
    alone = token_figures(logits[N - 1 :], drawn=(heats[N - 1 :], numbers[N - 1 :]))
    assert torch.equal(alone[0], tokens[N - 1 :]) and torch.equal(alone[1], figures[:, N - 1 :])
