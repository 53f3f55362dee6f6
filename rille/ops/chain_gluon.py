"""`chain_kernels.py` for kernels in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def meet(CHAINED: gl.constexpr):
    """Wait for what the kernel ahead writes, then let the next one begin."""
    if CHAINED:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
