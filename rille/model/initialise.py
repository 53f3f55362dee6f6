"""Initial values, all in one table (report §1.3 and §2; Attention Residuals paper §5; released config for the width).

| parameter | value |
|---|---|
| matrices, embedding, head, router, experts | normal, std `init_std`, cut at 3 std |
| norm gains | 1 |
| Attention-Residual queries | 0: training starts from the uniform average |
| router bias | 0 |
| short convolution | uniform in +-1/sqrt(width) |
| A_log | 0 (padding included) |
| dt_bias | inverse softplus of dt, dt log-uniform in [1e-3, 1e-1] |
"""

from __future__ import annotations

import math

import torch
from torch import nn

_GAINS = ("norm", "gain")


@torch.no_grad()
def initialise(model: nn.Module, init_std: float, seed: int) -> None:
    """Fill every parameter; the same seed gives the same fp32 values for any dtype on a given kind of device."""
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    if device.type == "meta":
        return
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in parameters.items():
        _fill(name.rsplit(".", 1)[-1], parameter, init_std, generator)


def _fill(leaf: str, parameter: nn.Parameter, init_std: float, generator: torch.Generator) -> None:
    if leaf in ("query", "router_bias", "A_log"):
        parameter.zero_()
    elif leaf == "dt_bias":
        low, high = math.log(1e-3), math.log(1e-1)
        dt = torch.empty_like(parameter).uniform_(low, high, generator=generator).exp_().clamp_(min=1e-4)
        parameter.copy_(dt + torch.log(-torch.expm1(-dt)))
    elif leaf == "qkv_conv":
        bound = parameter.shape[1] ** -0.5
        parameter.uniform_(-bound, bound, generator=generator)
    elif leaf.endswith(_GAINS):
        parameter.fill_(1.0)
    else:
        normal = torch.empty_like(parameter, dtype=torch.float32)
        nn.init.trunc_normal_(normal, std=init_std, a=-3 * init_std, b=3 * init_std, generator=generator)
        parameter.copy_(normal)
