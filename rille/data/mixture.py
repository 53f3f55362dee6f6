"""How often each document of a built set is read: shares of domains, weight of long documents, a cap of epochs.

A stream is the short or the long documents of one domain: T_s targets in n_s pieces. In one pass, which is as many
targets as the whole set has, T = sum_s T_s,

    targets of s  =  T * share(domain of s) * T_s w_s / sum over the streams u of the domain of T_u w_u
    draws of s    =  n_s * targets of s / T_s  =  x_s,  in the passes before pass p together  min(ceil(p x_s), limit)

w is long_times for long streams, else 1; without shares, a domain's share is sum T_u w_u over the domain by that over
all. Where x_s is no whole number, passes differ by one draw: a share is kept over passes however few pieces a stream
has, and the first pass has something of every stream. Draws go on from pass to pass through the stream's own epochs, so
that a piece is read again only after every other piece of its stream was. A stream that was read max_epochs times (the
limit, n_s * max_epochs) is left out; the others go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

_LEAST = 1e-6  # of a draw in a pass


@dataclass(frozen=True)
class Mixture:
    """shares: by domain, empty for natural ones. max_epochs: None for no cap. read: epochs of domains that were read
    before, in other stages of a run, and count for the cap."""

    shares: Mapping[str, float]
    long_times: float = 1.0
    max_epochs: float | None = None
    read: Mapping[str, float] = field(default_factory=dict)

    def limit(self, stream: StreamSize) -> int | None:
        """Pieces of a stream that may be drawn, None for any number."""
        if self.max_epochs is None:
            return None
        return round(stream.pieces * max(0.0, self.max_epochs - self.read.get(stream.domain, 0.0)))


@dataclass(frozen=True)
class StreamSize:
    """What the mixture needs to know of a stream."""

    domain: str
    long: bool
    targets: int
    pieces: int


def draws_a_pass(streams: Sequence[StreamSize], mixture: Mixture) -> list[float]:
    """x of each stream. Raises ValueError if shares name other domains or ones without text, or nothing is drawn."""
    names = {stream.domain for stream in streams}
    if mixture.shares and not set(mixture.shares) >= names:
        raise ValueError(f"the mixture has no share for {', '.join(sorted(names - set(mixture.shares)))}")
    weights = [stream.targets * (mixture.long_times if stream.long else 1.0) for stream in streams]
    by_domain = dict.fromkeys([*names, *mixture.shares], 0.0)
    for stream, weight in zip(streams, weights, strict=True):
        by_domain[stream.domain] += weight
    shares = mixture.shares or by_domain
    if empty := [name for name, share in shares.items() if share > 0 and not by_domain[name]]:
        raise ValueError(f"the mixture gives {', '.join(empty)} a share, but there is no text of it; give it 0")
    counted, total = sum(shares.values()), sum(stream.targets for stream in streams)
    draws = []
    for stream, weight in zip(streams, weights, strict=True):
        if not weight or not counted:
            draws.append(0.0)
            continue
        targets = total * shares[stream.domain] / counted * weight / by_domain[stream.domain]
        draws.append(_whole(stream.pieces * targets / stream.targets))
        if 0 < draws[-1] < _LEAST:
            raise ValueError(f"{stream.domain} would be read once in {1 / draws[-1]:,.0f} passes; give it more, or 0")
    if not any(draws):
        raise ValueError("the mixture draws nothing: all shares of domains with text are 0")
    return draws


def _whole(draws: float) -> float:
    """A number that is whole but for its last bits is meant to be."""
    return float(round(draws)) if abs(draws - round(draws)) < 1e-9 * draws else draws


def draws_before(number: int, streams: Sequence[StreamSize], mixture: Mixture) -> list[int]:
    """Pieces of each stream in all passes before a certain one, the cap of epochs obeyed."""
    draws = [ceil(number * draw) for draw in draws_a_pass(streams, mixture)]
    limits = [mixture.limit(stream) for stream in streams]
    return [draw if limit is None else min(draw, limit) for draw, limit in zip(draws, limits, strict=True)]


def draws_of_pass(number: int, streams: Sequence[StreamSize], mixture: Mixture) -> list[int]:
    """Pieces of each stream in a certain pass; all 0 when everything is used up."""
    before, after = (draws_before(n, streams, mixture) for n in (number, number + 1))
    return [b - a for a, b in zip(before, after, strict=True)]


def next_pass(number: int, streams: Sequence[StreamSize], mixture: Mixture) -> int:
    """The first pass from `number` on in which something is drawn; `number` itself where everything is used up."""
    last = draws_before(number + ceil(1 / _LEAST), streams, mixture)
    found = number
    while (before := draws_before(found, streams, mixture)) != last:
        if draws_before(found + 1, streams, mixture) != before:
            return found
        found += 1
    return number
