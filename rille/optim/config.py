"""How parameters follow their gradients. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal


@dataclass(frozen=True)
class OptimConfig:
    """The update rule and its schedule."""

    rule: Literal["adamw", "muon"] = "adamw"
    """Of matrices: muon orthogonalises their updates, head by head. All else takes adamw."""

    lr: float = 2e-3
    """Peak learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW: decay of the running mean of the gradient and of its square."""

    eps: float = 1e-8
    """AdamW: added to the root of the mean square."""

    momentum: float = 0.95
    """Muon: share of the running sum of gradients that is kept."""

    weight_decay: float = 0.1
    """Decoupled decay of matrices, experts and embeddings; vectors have none."""

    qk_clip: float | None = None
    """Largest attention logit of an MLA head (K2: 100); a louder head's weights are scaled down. None: no limit."""

    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """Course of the learning rate after warm-up; wsd: stable, then linear decay."""

    warmup_fraction: float = 0.05
    """Share of all steps over which the learning rate rises linearly to its peak."""

    decay_fraction: float = 0.2
    """Share of all steps that wsd takes for its decay."""

    min_lr_ratio: float = 0.1
    """Learning rate at the end of cosine and wsd, as a share of the peak."""

    clip: float = 1.0
    """Largest norm of the whole gradient; a longer one is scaled down to it."""

    def __post_init__(self):
        """Raises ValueError that names a field out of range."""
        for name in ("lr", "eps"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"optim.{name} is {getattr(self, name)}; it must be above 0 and finite")
        if not self.clip > 0:
            raise ValueError(f"optim.clip is {self.clip}; it must be above 0 (inf clips nothing)")
        for name in ("warmup_fraction", "decay_fraction", "min_lr_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optim.{name} is {getattr(self, name)}; it is a share, from 0 to 1")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optim.momentum is {self.momentum}; it must be at least 0 and below 1")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas are {self.betas}; both must be at least 0 and below 1")
        if self.qk_clip is not None and not self.qk_clip > 0:
            raise ValueError(f"optim.qk_clip is {self.qk_clip}; it must be above 0, or none")
        if not 0 <= self.weight_decay < inf:
            raise ValueError(f"optim.weight_decay is {self.weight_decay}; it must be at least 0 and finite")
        if self.schedule == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            shares = f"optim.warmup_fraction {self.warmup_fraction} and optim.decay_fraction {self.decay_fraction}"
            raise ValueError(f"{shares} exceed 1 together")
