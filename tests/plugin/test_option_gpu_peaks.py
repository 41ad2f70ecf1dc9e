"""--slm-gpu-peaks: the data sheet of a GPU that the roofline does not know, here of a simulated one."""

from inside import usage_error

from pytest_slmserve.analysis.metrics.roofline import roofline_fraction
from pytest_slmserve.schema.environment import GpuPeaks


def test_it_is_in_the_records_and_makes_a_roofline(sweep, archive):
    sweep("--slm-concurrency=1,2", "--slm-records=without.jsonl")
    sweep("--slm-concurrency=1,2", "--slm-records=with.jsonl", "--slm-gpu-peaks=tflops=989,gbps=4800")
    without, given = (archive(f"{name}.jsonl").measurements[0] for name in ("without", "with"))
    assert (without.environment.gpu_peaks, given.environment.gpu_peaks) == (None, GpuPeaks(989, 4800))
    assert roofline_fraction(without, 10.0, 1.0) is None and 0 < roofline_fraction(given, 10.0, 1.0) < 1
    assert given.environment.key == without.environment.key, "the GPU is the same"


def test_one_rate_alone_is_refused(sweep):
    assert "is not dense TFLOP/s and the memory's GB/s" in usage_error(sweep("--slm-gpu-peaks=tflops=989"))
