"""fp32 master weights for parameters that are held in 16 bits.

    m <- rule(m, fp32(g))          x <- round(m)

A step of AdamW or Muon changes a weight by about lr times its size, far less than half a unit in the last place of
bf16 (2^-9 of it): added to the 16-bit weight most steps would be lost. So the rule works on an fp32 twin of every such
parameter, and the parameter is its rounding. Parameters that are fp32 already are their own twins.

Source: mixed precision training, arXiv 1710.03740, section 3.1; the K3 report trains the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from rille.optim.config import OptimConfig
from rille.optim.groups import Named

Rule = Callable[[Iterable[Named], OptimConfig], torch.optim.Optimizer]


def with_masters(rule: Rule, parameters: Iterable[Named], config: OptimConfig) -> torch.optim.Optimizer:
    """`rule` over the parameters; where some are held in 16 bits, over their fp32 twins. Errors: see the rule."""
    rows = [Named(*row) for row in parameters]
    if all(row.parameter.dtype not in (torch.bfloat16, torch.float16) for row in rows):
        return rule(rows, config)
    twins = [row._replace(parameter=twin(row.parameter)) for row in rows]
    return Masters(rule(twins, config), [(a.parameter, b.parameter) for a, b in zip(rows, twins, strict=True)])


def twin(parameter: nn.Parameter) -> nn.Parameter:
    """An fp32 copy of a 16-bit parameter; any other parameter itself."""
    if parameter.dtype not in (torch.bfloat16, torch.float16):
        return parameter
    return nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)


class Masters(torch.optim.Optimizer):
    """An optimiser whose step goes through fp32 twins. Groups and state are the inner optimiser's; the twins are saved
    with them, under `masters`, in the order of the parameters."""

    def __init__(self, inner: torch.optim.Optimizer, pairs: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        self.inner = inner
        self.pairs = [(held, master) for held, master in pairs if held is not master and held.requires_grad]
        self.defaults, self.param_groups, self.state = inner.defaults, inner.param_groups, inner.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient."""
        assert closure is None
        live = [(held, master) for held, master in self.pairs if held.grad is not None]
        for held, master in live:
            assert held.grad is not None
            master.grad = held.grad.float()
        self.inner.step()
        if live:
            torch._foreach_copy_([held for held, _ in live], [master for _, master in live])  # pyright: ignore[reportPrivateImportUsage]
        for _, master in live:
            master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the held parameters."""
        for held, _ in self.pairs:
            held.grad = None
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {**self.inner.state_dict(), "masters": [master.detach() for _, master in self.pairs]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Restore the state and the twins, and round the held parameters from them.

        Raises ValueError for a state without twins, or with others.
        """
        rest = dict(state_dict)
        masters = rest.pop("masters", [])
        if [tuple(m.shape) for m in masters] != [tuple(master.shape) for _, master in self.pairs]:
            raise ValueError(f"the state has {len(masters)} master weights that fit, this model {len(self.pairs)}")
        self.inner.load_state_dict(rest)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        for (held, master), saved in zip(self.pairs, masters, strict=True):
            master.copy_(saved)
            held.copy_(master)
