"""A GPU's peak in 8-bit floats is that of models whose weights and activations are such floats."""

from __future__ import annotations

from dataclasses import replace

from pytest_slmserve.analysis.metrics.gpu_figures import Peaks, peaks_for
from pytest_slmserve.schema.models import CATALOGUE, model_from_config
from pytest_slmserve.schema.specs import EngineSpec

FLOAT8 = {"num_bits": 8, "type": "float"}
PEAKS = Peaks("invented", (), flops_per_s=1.0, bytes_per_s=1.0, fp8_flops_per_s=2.0)


def test_what_is_computed_in_fp8():
    qwen = CATALOGUE["qwen3-0.6b"]
    groups = [{"0": {"weights": FLOAT8, "input_activations": inputs}} for inputs in (FLOAT8, None, {"num_bits": 8})]
    own = [{"quantization_config": {"quant_method": "compressed-tensors", "config_groups": group}} for group in groups]
    models = [model_from_config("mine", {**dict(qwen.config), **each}, qwen.parameters) for each in own]
    fp8 = EngineSpec("qwen3-0.6b", extra=(("quantization", "fp8"),))
    specs = [
        *(EngineSpec("mine", model_facts=each) for each in models),
        fp8,
        EngineSpec("qwen3-0.6b"),
        EngineSpec("mine"),
    ]
    assert [peaks_for(spec, PEAKS).flops_per_s for spec in specs] == [2.0, 1.0, 1.0, 2.0, 1.0, 1.0]
    assert peaks_for(fp8, replace(PEAKS, fp8_flops_per_s=None)).flops_per_s == 1.0, "the GPU has none"
