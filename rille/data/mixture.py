"""How often each document of a built set is read: shares of domains, weight of long documents, a cap of epochs.

A stream is the short or the long documents of one domain: T_s targets in n_s pieces. In one pass, which is as many
targets as the whole set has, T = sum_s T_s,

    targets of s  =  T * share(domain of s) * T_s w_s / sum over the streams u of the domain of T_u w_u
    draws of s    =  n_s * targets of s / T_s,  rounded

w is long_times for long streams, else 1; without shares, a domain's share is sum T_u w_u over the domain by that over
all. Draws go on from pass to pass through the stream's own epochs, so that a piece is read again only after every other
piece of its stream was. A stream that was read max_epochs times is left out; the others go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mixture:
    """shares: by domain, empty for natural ones. max_epochs: None for no cap."""

    shares: Mapping[str, float]
    long_times: float = 1.0
    max_epochs: float | None = None


@dataclass(frozen=True)
class StreamSize:
    """What the mixture needs to know of a stream."""

    domain: str
    long: bool
    targets: int
    pieces: int


def draws_a_pass(streams: Sequence[StreamSize], mixture: Mixture) -> list[int]:
    """Pieces of each stream in one pass. Raises ValueError if shares name other domains or nothing would be drawn."""
    names = {stream.domain for stream in streams}
    if mixture.shares and not set(mixture.shares) >= names:
        raise ValueError(f"the mixture has no share for {', '.join(sorted(names - set(mixture.shares)))}")
    weights = [stream.targets * (mixture.long_times if stream.long else 1.0) for stream in streams]
    by_domain = dict.fromkeys(names, 0.0)
    for stream, weight in zip(streams, weights, strict=True):
        by_domain[stream.domain] += weight
    shares = mixture.shares or by_domain
    counted = sum(shares[name] for name in names if by_domain[name])
    total = sum(stream.targets for stream in streams)
    draws = []
    for stream, weight in zip(streams, weights, strict=True):
        if not weight or not counted:
            draws.append(0)
            continue
        targets = total * shares[stream.domain] / counted * weight / by_domain[stream.domain]
        draws.append(round(stream.pieces * targets / stream.targets))
    if not any(draws):
        raise ValueError("the mixture draws nothing: all shares of domains with text are 0")
    return draws


def draws_of_pass(number: int, streams: Sequence[StreamSize], mixture: Mixture) -> list[int]:
    """Pieces of each stream in a certain pass, the cap of epochs obeyed; all 0 when everything is used up."""
    draws = draws_a_pass(streams, mixture)
    if mixture.max_epochs is None:
        return draws
    limits = [round(stream.pieces * mixture.max_epochs) for stream in streams]
    return [min(draw, max(0, limit - number * draw)) for draw, limit in zip(draws, limits, strict=True)]
