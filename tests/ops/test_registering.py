"""Ops that run as they are where nobody looks on: what must go through torch does, and both ways are one op."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import rille
from rille.ops.registering import Op, is_alone, op

bodies: list[str] = []


@op("rille::test_doubled")
def doubled(x: Tensor, others: list[Tensor], factor: float) -> Tensor:
    """x times 2 factor, and others on top."""
    bodies.append(type(x).__name__)
    total = 2 * factor * x.detach()
    for other in others:
        total = total + other.detach()
    return total


@doubled.register_fake
def _(x: Tensor, others: list[Tensor], factor: float) -> Tensor:
    return x.new_empty(x.shape)


def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.factor, ctx.count = inputs[2], len(inputs[1])


doubled.register_autograd(lambda ctx, dy: (2 * ctx.factor * dy, [dy] * ctx.count, None), setup_context=save)


@op("rille::test_moved_on", mutated=("pool",))
def moved_on(pool: Tensor, by: Tensor) -> Tensor:
    pool.detach().add_(by)
    return by + 1


@moved_on.register_fake
def _(pool: Tensor, by: Tensor) -> Tensor:
    return by.new_empty(by.shape)


class Seen(TorchDispatchMode):
    """Names of the ops that pass the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _no_bodies() -> Iterator[None]:
    bodies.clear()
    yield


def test_an_op_has_its_body_name_and_text() -> None:
    assert isinstance(doubled, Op) and doubled.__name__ == "doubled" and "times 2" in (doubled.__doc__ or "")
    x, others = torch.randn(3), [torch.randn(3)]
    assert torch.equal(doubled(x, others, 3.0), doubled.registered(x, others, 3.0))
    assert torch.equal(doubled(x, others, factor=3.0), doubled(x, others, 3.0))


@pytest.mark.parametrize("recorded", [False, True])
def test_plain_tensors_are_alone(recorded: bool) -> None:
    x, weight = torch.randn(3), nn.Parameter(torch.randn(3), requires_grad=False)
    learns = nn.Parameter(torch.randn(3))
    with torch.set_grad_enabled(recorded):
        assert is_alone((x, None, 1, 0.5, True, "form", torch.bfloat16, weight, [x, weight], (x,)))
        assert is_alone((x, learns)) is not recorded and is_alone((x, [x, learns])) is not recorded
    with torch.inference_mode():
        assert is_alone((x, learns))


def test_gradients_go_through_the_registered_op() -> None:
    for x, other in (
        (torch.randn(3, requires_grad=True), torch.randn(3)),
        (torch.randn(3), nn.Parameter(torch.ones(3))),
    ):
        y = doubled(x, [other, other], 1.5)
        y.sum().backward()
        assert x.grad is None or torch.equal(x.grad, torch.full((3,), 3.0))
        assert other.grad is None or torch.equal(other.grad, torch.full((3,), 2.0))
        assert (x.grad is None) != (other.grad is None)


def test_a_compiled_model_sees_the_registered_op() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, others: doubled(x, others, 0.5) + 1, backend=backend, fullgraph=True)
    x, others = torch.randn(3), [torch.randn(3)]
    with torch.no_grad():
        assert torch.equal(compiled(x, others), doubled(x, others, 0.5) + 1)
    assert len(graphs) == 1 and any("test_doubled" in target for target in graphs[0])
    torch._dynamo.reset()


def test_whoever_traces_sees_the_registered_op() -> None:
    x = torch.randn(3)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert doubled(fake, [], 1.0).shape == (3,)
    assert not is_alone((fake,)) and not bodies, "a fake tensor is not plain outside of its mode either"
    with Seen() as seen:
        doubled(x, [], 1.0)
    assert seen.names[0] == "rille.test_doubled.default"
    traced = make_fx(lambda y: doubled(y, [], 1.0), tracing_mode="fake")(x)
    assert any("test_doubled" in str(node.target) for node in traced.graph.nodes)
    assert torch.func.functional_call(nn.Identity(), {}, (x,)) is x and is_alone((x,))
    with pytest.raises(RuntimeError):  # no rule for vmap was registered, and nobody falls back
        torch.func.vmap(lambda row: doubled(row, [], 1.0))(torch.randn(2, 3))
    with torch.overrides.TorchFunctionMode():
        assert not is_alone((x,))


def test_a_subclass_of_tensors_goes_through_torch() -> None:
    class Own(Tensor): ...

    assert not is_alone((torch.randn(3).as_subclass(Own),)) and not is_alone(([torch.randn(3).as_subclass(Own)],))


def test_a_graph_finds_out_that_what_it_saved_was_written_to() -> None:
    pool, w = torch.ones(3), torch.ones(3, requires_grad=True)
    loss = (pool * w).sum()  # saves the pool
    with torch.no_grad():
        moved_on(pool, torch.ones(3))
    assert torch.equal(pool, torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        inner = torch.ones(3)
        moved_on(inner, torch.ones(3))
        moved_on(pool, torch.ones(3))
    assert torch.equal(inner, torch.full((3,), 2.0))


def test_both_ways_pass_the_checks_of_torch() -> None:
    rules = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    x = torch.randn(3, requires_grad=True)
    torch.library.opcheck(doubled.registered, (x, [torch.randn(3)], 2.0), test_utils=rules)
    torch.library.opcheck(
        moved_on.registered, (torch.randn(3), torch.randn(3)), test_utils=("test_schema", "test_faketensor")
    )


def test_every_op_is_registered_here() -> None:
    """One place decides how an op is called."""
    root = Path(rille.__file__).parent
    places = []
    for path in root.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        places += [path.name for node in calls if node.attr in ("custom_op", "Library", "triton_op")]
    assert places == ["registering.py"]
