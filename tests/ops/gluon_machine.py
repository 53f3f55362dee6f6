"""The program that runs now, for `gluon_on_cpu.py`, and what it has under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Machine:
    """What the program that runs now is, and the copies that it has asked for."""

    program: tuple[int, ...] = (0,)
    grid: tuple[int, ...] = (1,)
    num_warps: int = 4
    eager: bool = False
    groups: list[list[Any]] = field(default_factory=lambda: [[]])
    leaving: list[Any] = field(default_factory=list)  # copies to memory
    barriers: list[Any] = field(default_factory=list)

    def begin(self, program: tuple[int, ...]) -> None:
        self.program, self.groups, self.leaving, self.barriers = program, [[]], [], []

    def end(self) -> None:
        """What arrives after a program's end lands in the shared memory of the next one."""
        assert not self.leaving and not any(self.groups), "copies are under way at a program's end"
        assert not any(barrier.arrivals for barrier in self.barriers), "copies are under way at a program's end"
        assert not self.barriers, "barriers that were not given up"


MACHINE = Machine()
