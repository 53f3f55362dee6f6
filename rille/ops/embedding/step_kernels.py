"""What a recorded step begins with, in one launch: the tokens of its rows, and where they stand.

    ids[s, 0] = drawn[sources[s]] where the step before drew it, else tokens[s, 0]      ids[s, t] = tokens[s, t]
    history[s] = positions[s]      places[s, t] = positions[s] + t

Suffixes: T tokens of a row.
"""

import triton
import triton.language as tl


@triton.jit
def step_kernel(
    tokens, sources, drawn, positions, ids, history, places, T: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (S). tokens, ids and places int64 [S, T], or places None; sources, drawn, positions int64; history int32."""
    s, t_T = tl.program_id(0), tl.arange(0, BLOCK)
    source, position = tl.load(sources + s), tl.load(positions + s)
    id_T = tl.load(tokens + s * T + t_T, mask=t_T < T, other=0)
    before = tl.load(drawn + tl.maximum(source, 0))
    tl.store(ids + s * T + t_T, tl.where((t_T == 0) & (source >= 0), before, id_T), mask=t_T < T)
    tl.store(history + s, position.to(tl.int32))
    if places is not None:
        tl.store(places + s * T + t_T, position + t_T, mask=t_T < T)
