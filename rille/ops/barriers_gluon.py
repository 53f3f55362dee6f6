"""Where all threads of a program meet; and barriers in shared memory, which stay barriers until a kernel gives them up.

For the compiler the eight bytes are free after the last wait, and it may lay a tile there. For the card they are a
barrier until `mbarrier.inval` (PTX ISA: before that the memory must not serve anything else). Nothing is seen of it
while one process has the card; among processes that take turns an H200 now and then put the two barriers of KDA's first
kernel back into the tile that had followed them: 16 bytes, in many programs at once, in one of some 10^5 calls. So each
kernel gives its barriers up, at its end or where all its threads meet behind the last wait; until then the compiler
keeps their bytes apart. `ahead.py` refuses kernels that do not.
"""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # as Triton 3.6 calls it


@gluon.jit
def give_up(bars):
    """bars: one, or several along the first axis. Nobody waits for them any more."""
    if len(bars.shape) == 1:
        mbarrier.invalidate(bars)
    else:
        COUNT: gl.constexpr = bars.shape[0]
        for i in gl.static_range(COUNT):
            mbarrier.invalidate(bars.index(i))
