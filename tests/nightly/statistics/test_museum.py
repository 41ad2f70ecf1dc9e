"""Regressions that people reported, on the simulated engine: a gate fails a side with the published effect, names the
layer, passes its own build, and takes few minutes."""

import json

import pytest
from scripts import CHECKOUT
from simulated_sessions import Open

from pytest_slmserve.analysis.gate.diagnosis import worse_layers
from pytest_slmserve.analysis.gate.launch_pairs import Gated
from pytest_slmserve.analysis.verdict import State
from pytest_slmserve.run.gate import Gates

MUSEUM = json.loads((CHECKOUT / "studies" / "museum.json").read_text("utf-8"))
STEP_S, BLOCKS = 0.032, 100_000  # of 256 sequences by the law below, and of the KV cache
LAW = ["t_inf=10000", "b_half=64", f"num_gpu_blocks_override={BLOCKS}", "start_s=30"]
AT_MOST = 15  # minutes of a gate
HOW = {"memory": "apart", "start": "start"}  # gates that judge these layers


def planted(layer: str, effect: float) -> str:
    """The argument of the candidate that makes it slower by the published effect."""
    match layer:
        case "host":
            return f"host_s={STEP_S / effect}"
        case "memory":
            return f"num_gpu_blocks_override={round(BLOCKS * effect)}"
        case "start":
            return f"start_s={30 * effect}"
    return f"slowdown={1 / effect - 1}"


def minutes(gated: Gated) -> float:
    """What a gate takes: in each launch its start, or the slower one of both at once, and then its windows."""
    seconds = 0.0
    for pair in gated.pairs:
        starts = [each.measurements[0].resolved.ready_s or 0.0 for each in pair.launches]
        seconds += max(starts) if gated.terms.together else sum(starts)
        seconds += sum(
            m.run.steps.time_s[-1] for each in pair.launches for m in each.measurements if m.run.steps.time_s
        )
    return seconds / 60


@pytest.mark.parametrize("row", MUSEUM, ids=lambda row: row["thread"].rpartition("#")[2])
def test_reported_regression_names_its_layer(opened: Open, row):
    of_texts = row.get("kind") == "embed"
    model = "bge-small-en-v1.5" if of_texts else "opt-1.3b"
    arguments = {
        "models": model,
        "concurrency": "256",
        "gate": True,
        "engine_arg": ["t_inf=500", "start_s=30"] if of_texts else LAW,
    }
    how = {"gate_launches": HOW[row["layer"]]} if row["layer"] in HOW else {}
    slow, same = (
        Gates(opened(name, **arguments, **how, side=side)).of(model)
        for name, side in (("slow", [f"candidate:arg={planted(row['layer'], row['effect'])}"]), ("same", []))
    )
    assert (slow.outcome, same.outcome) == (State.FAILS, State.PASSES)
    assert worse_layers(slow) == [row["layer"]]
    assert minutes(slow) < AT_MOST and minutes(same) < AT_MOST
