"""How a kernel of a chain begins before the one ahead of it has ended (programmatic dependent launch, on Hopper).

Launched so, a program may run as soon as all programs of the kernel ahead are past their `meet`. Before its own it may
read what no kernel of the chain writes, such as weights, and what kernels further back have written: those have ended,
since the one ahead met them before it let this one begin. Everything else, and all that it writes, comes behind.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def meet(CHAINED: tl.constexpr):
    """Wait for what the kernel ahead writes, then let the next one begin."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
