"""What `rille.ops.ahead` reads from machine code."""

import ast
from importlib import import_module
from pathlib import Path
from types import ModuleType

import rille
from rille.ops.ahead import Build, Specimen, kept_barriers, lost_addresses, violations

TOP = Path(rille.__file__).parent.parent

SOUND = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0040*/                   IADD3 R1, R1, -0x510, RZ ;
        /*0140*/                   VIADD R1, R1, 0xfffffc60 ;
        /*0880*/                   STL.64 [R1+0x1f8], R28 ;
        /*1180*/                   LDL.LU R250, [R1+0x468] ;
"""
LOST = """
        /*9290*/                   IADD3 R217, P5, R1, 0x2, RZ ;
        /*9350*/                   IADD3.X R9, R1, -0x7fffffe0, RZ, P5, !PT ;
        /*11640*/                   IADD3 R81, P5, R1.reuse, 0x2, RZ ;
"""


def test_stack_pointer_as_data_is_found() -> None:
    assert lost_addresses(SOUND) == 0
    assert lost_addresses(SOUND + LOST) == 3


def test_a_lost_address_breaks_the_build() -> None:
    specimen = Specimen("x", None, {})
    build = Build("x", 8, 255, 0, 0, 0, 0, 10, 0, lost_addresses(LOST), 0)
    assert violations(specimen, build) == ["x: the stack pointer stands for a lost address in 3 instructions"]
    assert violations(specimen, build._replace(lost=0)) == []


PTX = """
	@%p1 mbarrier.init.shared::cta.b64 [%r54], 1;
	@%p1 mbarrier.init.shared::cta.b64 [%r55], 1;
	mbarrier.try_wait.parity.shared.b64 complete, [%r54], %r66;
"""
GIVEN_UP = """
	@%p1 mbarrier.inval.shared::cta.b64 [%r54];
"""


def test_barriers_that_are_not_given_up_break_the_build() -> None:
    assert [kept_barriers(PTX + GIVEN_UP * count) for count in range(3)] == [2, 1, 0]
    build = Build("x", 8, 255, 0, 0, 0, 0, 10, 0, 0, kept_barriers(PTX + GIVEN_UP))
    assert violations(Specimen("x", None, {}), build) == ["x: 1 barriers are never given up"]


def test_gluon_kernels_name_only_what_the_installed_triton_has() -> None:
    """Gluon renames: `thread_barrier` of Triton 3.6 is `barrier` since. No interpreter looks such a name up."""
    unknown, asked = [], 0
    for path in sorted((TOP / "rille" / "ops").rglob("*_gluon.py")):
        module = import_module(".".join(path.relative_to(TOP).with_suffix("").parts))
        tree = ast.parse(path.read_text())
        guarded = {id(node) for choice in ast.walk(tree) if isinstance(choice, ast.IfExp) for node in ast.walk(choice)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name) or id(node) in guarded:
                continue
            owner = getattr(module, node.value.id, None)
            if isinstance(owner, ModuleType):
                asked += 1
                unknown += [] if hasattr(owner, node.attr) else [f"{path.name}: {node.value.id}.{node.attr}"]
    assert not unknown and asked > 1000
