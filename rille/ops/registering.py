"""Ops that are registered with torch, and that run as they are where nobody but the caller looks on.

torch's dispatcher and the Python around it take 20 to 30 microseconds of a card's host a call: with some hundred ops in
a step that reads prompts, milliseconds. It is needed where a compiler or another mode traces, where a gradient is
recorded, and for subclasses of tensors. Elsewhere an op is its body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

PLAIN = {Tensor, Parameter, int, float, bool, str, torch.dtype, type(None)}
_c: Any = torch._C


class Op:
    """`registered` is the op that torch knows, `body` what it does on every device. mutated: names of the arguments
    that it writes to."""

    def __init__(self, name: str, body: Callable[..., Any], mutated: tuple[str, ...]) -> None:
        self.registered = torch.library.custom_op(name, mutates_args=mutated)(body)
        self.body, self.__doc__, self.__name__ = body, body.__doc__, body.__name__
        self._mutated = [list(signature(body).parameters).index(one) for one in mutated]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if named or not is_alone(arguments):
            return self.registered(*arguments, **named)
        for at in self._mutated:
            written: Any = arguments[at]
            if not written.is_inference():
                torch.autograd.graph.increment_version(written)  # so that a graph which saved it finds out
        return self.body(*arguments)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        return self.registered.register_fake(fake)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., Any]) -> None:
        self.registered.register_autograd(backward, setup_context=setup_context)


def op(name: str, mutated: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Op]:
    """Decorator for the body of an op; takes the place of `torch.library.custom_op`."""
    return lambda body: Op(name, body, mutated)


def is_alone(arguments: Sequence[Any]) -> bool:
    """Whether nobody but the caller looks on: no compiler, mode or transform that traces, no gradient that is recorded,
    no subclass of tensors."""
    if torch.compiler.is_compiling() or _c._len_torch_dispatch_stack() or _c._is_torch_function_mode_enabled():
        return False
    if _c._functorch.peek_interpreter_stack() is not None or _c._get_tracing_state() is not None:
        return False
    return all_plain(arguments) and not (torch.is_grad_enabled() and any_learns(arguments))


def all_plain(arguments: Sequence[Any]) -> bool:
    others = set(map(type, arguments)) - PLAIN
    return not others or (others <= {list, tuple} and all(all_plain(x) for x in arguments if type(x) in others))


def any_learns(arguments: Sequence[Any]) -> bool:
    return any(
        x.requires_grad if isinstance(x, Tensor) else isinstance(x, (list, tuple)) and any_learns(x) for x in arguments
    )
