"""Newton-Schulz against the singular value decomposition in float64; the plain and the Gram form against each other."""

import numpy as np
import pytest
import torch

from rille.ops.newton_schulz import COEFFICIENTS, choose_backend, newton_schulz, normalised
from rille.ops.newton_schulz.blocks import RUN

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
SHAPES = [(1, 1), (1, 15), (17, 17), (15, 63), (65, 16), (32, 96), (128, 1000), (1000, 15)]
FORMS = ["reference", "plain", "gram"]


def mapped(singular: np.ndarray, steps: int = 5) -> np.ndarray:
    """What the iteration makes of singular values."""
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        singular = a * singular + b * singular**3 + c * singular**5
    return singular


def draw(P: int, Q: int, spectrum: str = "normal", B: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    m = torch.randn(B, P, Q, dtype=F64, generator=generator)
    if spectrum == "normal":
        return m
    u, s, vh = torch.linalg.svd(m, full_matrices=False)
    rank = s.shape[-1]
    shapes = {
        "falling": torch.logspace(0, -8, rank, dtype=F64),
        "low rank": torch.where(torch.arange(rank) < 3, 1.0, 0.0).to(F64),
        "flat": torch.ones(rank, dtype=F64),
    }
    return u * shapes[spectrum] @ vh


def exact(m: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """U p(S / ||M||_F) V^T."""
    u, s, vh = np.linalg.svd(m.double().numpy(), full_matrices=False)
    norm = np.sqrt((s**2).sum(-1, keepdims=True)) + 1e-7
    return torch.from_numpy(u * mapped(s / norm, steps)[:, None, :] @ vh)


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("spectrum", ["normal", "falling", "low rank", "flat"])
@pytest.mark.parametrize(("P", "Q"), SHAPES)
def test_float64_is_the_polynomial_of_the_singular_values(P: int, Q: int, spectrum: str, backend: str):
    """Each of 5 steps may magnify a rounding of 2^-53 by a^2 = 12: 12^5 * 2^-53 = 2.8e-11."""
    m = draw(P, Q, spectrum)
    assert distance(newton_schulz(m, backend=backend), exact(m)) < 2.8e-11


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("backend", FORMS)
def test_any_number_of_steps(steps: int, backend: str):
    m = draw(15, 63)
    assert distance(newton_schulz(m, steps, backend=backend), exact(m, steps)) < 1e-10


# Largest relative distance of X in the Frobenius norm. A rounding of X_0 and A (2^-24, 2^-11, 2^-8 of their largest
# entries) moves small singular values, whose slope after five steps is a^5 = 485, and the sum over P of them counts in
# the mean of squares only: full-rank random matrices stay two hundred times below the worst case of 485 u.
LIMITS = {F32: 1e-4, F16: 1e-2, BF16: 8e-2}


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("P", "Q"), SHAPES)
def test_narrow_dtypes(P: int, Q: int, dtype: torch.dtype, backend: str):
    m = draw(P, Q)
    got = newton_schulz(m.float(), dtype=dtype, backend=backend)
    assert got.dtype == dtype
    assert distance(got, exact(m)) < LIMITS[dtype]


@pytest.mark.parametrize("spectrum", ["normal", "falling", "low rank"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(("P", "Q"), [(64, 256), (33, 1500), (17, 1000)])
def test_forms_agree_where_they_are_chosen(P: int, Q: int, dtype: torch.dtype, spectrum: str):
    """Wide blocks. Directions of zero singular value hold nothing but rounding noise of X_0, magnified by up to 485 in
    either form: against the polynomial both may be off by 485 u, relative to singular values of 0.68 and more. The Gram
    form adds what its last A is off by, 12^(RUN - 1) u, times |b| / a."""
    m = draw(P, Q, spectrum, B=2)
    assert choose_backend(m)[0] == "gram"
    expected, u = exact(m), torch.finfo(dtype).eps / 2
    plain, gram = (newton_schulz(m.float(), dtype=dtype, backend=form).double() for form in ("plain", "gram"))
    limit = 485 * u / 0.68
    assert distance(plain, expected) < limit
    assert distance(gram, expected) < limit + 4.775 / 3.4445 * 3.4445 ** (2 * RUN[dtype] - 2) * u
    # The noise is never blown up: the largest singular value stays below the polynomial's largest, 1.2024.
    assert max(float(torch.linalg.matrix_norm(x, 2).max()) for x in (plain, gram)) < 1.2024 * (1 + 8 * u) + 2e-3


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize(("P", "Q"), [(17, 17), (32, 96), (96, 32)])
def test_close_to_the_polar_factor(P: int, Q: int, backend: str):
    """p maps [0.002, 1] into [0.6818, 1.2024]: every singular value of the difference to U V^T is below 0.3182."""
    grid = mapped(np.linspace(0.002, 1, 1_000_001))
    assert grid.min() > 0.6818 and grid.max() < 1.2024
    m = draw(P, Q, seed=3)
    u, s, vh = torch.linalg.svd(m, full_matrices=False)
    assert float((s / torch.linalg.matrix_norm(m)[:, None]).min()) > 0.002
    off = newton_schulz(m.float(), backend=backend).double() - u @ vh
    assert float(torch.linalg.matrix_norm(off, 2).max()) < 0.3183


@pytest.mark.parametrize("backend", FORMS)
def test_scale_transpose_and_batch(backend: str):
    m = draw(15, 63)
    whole = newton_schulz(m, backend=backend)
    assert torch.allclose(newton_schulz(m * 1e6, backend=backend), whole, rtol=0, atol=1e-6)  # but for eps
    assert torch.allclose(newton_schulz(m.mT, backend=backend), whole.mT, rtol=0, atol=1e-12)
    alone = torch.cat([newton_schulz(one[None], backend=backend) for one in m])
    assert torch.allclose(alone, whole, rtol=0, atol=1e-12)
    assert newton_schulz(m[:0], backend=backend).shape == (0, 15, 63)


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
@pytest.mark.parametrize("backend", FORMS)
def test_zeros_and_tiny_matrices(backend: str, dtype: torch.dtype):
    """An expert that never got a token has no direction; one whose gradient fades below eps fades too."""
    m = torch.zeros(2, 8, 32)
    m[1] = draw(8, 32, B=1)[0].float() * 1e-14
    got = newton_schulz(m, dtype=dtype, backend=backend)
    assert not got[0].any()
    assert torch.isfinite(got).all() and float(got[1].double().norm()) < 1e-3


def test_gradients_of_a_mean_are_not_lost_in_16_bits():
    """Entries of 1e-9 are zero in fp16: the norm is taken before rounding."""
    m = draw(15, 63).float() * 1e-9
    got = newton_schulz(m, eps=1e-20, dtype=F16)
    assert distance(got, exact(m.double() * 1e9)) < LIMITS[F16]


@pytest.mark.parametrize(("P", "Q"), [(17, 17), (15, 63), (63, 15)])
def test_what_is_scaled_already(P: int, Q: int):
    m = draw(P, Q)
    scaled = m / (torch.linalg.matrix_norm(m, keepdim=True) + 1e-7)
    assert distance(normalised(scaled), exact(m)) < 2.8e-11


def test_nothing_is_differentiated_or_changed():
    m = draw(4, 9).requires_grad_()
    before = m.detach().clone()
    assert not newton_schulz(m).requires_grad
    assert torch.equal(m, before)


@pytest.mark.parametrize(
    ("m", "change", "message"),
    [
        (torch.zeros(3, 4), {}, r"m \(3, 4\)"),
        (torch.zeros(1, 3, 4, dtype=torch.int64), {}, "int64"),
        (torch.zeros(1, 3, 4), {"dtype": torch.int8}, "int8"),
        (torch.zeros(1, 3, 4), {"steps": 0}, "steps 0"),
        (torch.zeros(1, 3, 4), {"backend": "svd"}, "'svd'; there are reference, plain, gram"),
        (torch.zeros(1, 3, 4, dtype=F64), {"backend": "gram symmetric"}, "'gram symmetric' cannot run"),
    ],
)
def test_refused(m: torch.Tensor, change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        newton_schulz(m, **change)


def test_choice():
    assert choose_backend(torch.empty(1, 3072, 3584))[0] == "plain"
    assert choose_backend(torch.empty(1, 448, 256))[0] == "gram"
    assert choose_backend(torch.empty(1, 512, 128))[0] == "gram"
    assert "128 and 512" in choose_backend(torch.empty(1, 512, 128))[1]
