"""Studies, one function each: templates for more. `rille study NAME` runs one."""

from __future__ import annotations

from collections.abc import Callable

from rille.eval.study_config import Curve, Reading, Study, StudyConfig
from rille.model.presets import preset


def quantile_balancing() -> Study:
    """Quantile Balancing against the sign rule and no balancing: load violation by step, dead experts."""
    return Study(
        name="quantile-balancing",
        line="Quantile Balancing, the sign rule (rate 0.001) and no balancing at all",
        config=StudyConfig(model=preset("tiny"), out="studies/quantile-balancing", steps=100),
        variants={"quantile": {"balance": "quantile"}, "sign": {"balance": "sign"}, "none": {"balance": "none"}},
        readings=(
            Reading("held-out loss, nats a token", "held_out_loss", "end"),
            Reading("load violation, last quarter", "expert_load_violation", "last quarter"),
            Reading("load violation, all steps", "expert_load_violation", "run"),
            Reading("dead experts of all layers, last quarter", "dead_experts/", "last quarter"),
            Reading("dead experts of all layers, all steps", "dead_experts/", "run"),
        ),
        curves=(
            Curve("load violation of the worst layer", "expert_load_violation"),
            Curve("dead experts, all layers", "dead_experts/"),
            Curve("held-out loss, nats a token", "held_out_loss"),
        ),
        remarks=("Load violation is max load / mean load - 1 of a step's worst layer; 0 is a perfect balance.",),
    )


def attnres_tiny() -> Study:
    """Block Attention Residuals against plain residuals at tiny size: held-out loss, output RMS by depth."""
    return Study(
        name="attnres-tiny",
        line="Block Attention Residuals (blocks of 2 layers) and plain residuals",
        config=StudyConfig(model=preset("tiny"), out="studies/attnres-tiny", steps=150),
        variants={"plain": {"residual": "standard"}, "attnres": {"residual": "attn_res"}},
        readings=(
            Reading("held-out loss, nats a token", "held_out_loss", "end"),
            Reading("training loss, last quarter", "loss", "last quarter"),
            Reading("largest output RMS", "output_rms/", "end", fold="max"),
            Reading("output RMS of the last sub-layer", "output_rms/layers.7.mlp", "end"),
        ),
        curves=(
            Curve("held-out loss, nats a token", "held_out_loss"),
            Curve("RMS of what a sub-layer adds, at the end", "output_rms/", along="part", log=True),
        ),
        remarks=("Both have the learning rate of the tiny recipe; none was tuned for either.",),
    )


def overview() -> str:
    studies = "\n".join(f"  {name:<20}{study().line}" for name, study in STUDIES.items())
    return f"""Train variants side by side over random seeds and compare them, with intervals and a plot.

usage: rille study NAME [flags]        `rille study NAME --help` lists all flags with their defaults

studies
{studies}

examples
  rille study quantile-balancing                     a quarter of an hour on one idle core
  rille study attnres-tiny --seeds 0 1 2 3 4
  rille study attnres-tiny --steps 1000 --data notes/ --out studies/notes"""


STUDIES: dict[str, Callable[[], Study]] = {"quantile-balancing": quantile_balancing, "attnres-tiny": attnres_tiny}
