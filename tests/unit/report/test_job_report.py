"""Jobs as a table and as pictures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from strategies import job_point

from pytest_slmserve.report.findings import Findings
from pytest_slmserve.report.loads import JOB_LEGEND, job_sections
from pytest_slmserve.report.page.pictures import pictures
from pytest_slmserve.report.section import section_text
from pytest_slmserve.schema.records import Environment
from pytest_slmserve.schema.specs import EngineSpec

GRID = [job_point(output_tokens=n, rate=r) for n in (32, 256) for r in (None, 10.0)]
CACHES = [
    job_point(spec=EngineSpec("opt-1.3b", kv_cache_bytes=n << 20), kv_blocks=n, batch=float(n), preemptions=3.0)
    for n in (64, 1024)
]
LIMITS = [job_point(spec=EngineSpec("opt-1.3b", max_num_seqs=n)) for n in (64, 128)]


def job_report(jobs):
    return list(map(section_text, job_sections(jobs)))


def test_a_row_for_each_job_and_only_columns_in_which_something_is_known():
    [table] = job_report(GRID)
    lines = table.splitlines()
    assert lines[0] == "Jobs on NVIDIA H200, vLLM 0.26.0"
    rows = [line.split() for line in lines if line.startswith("opt-6.7b")]
    assert [(row[1], row[3]) for row in rows] == [
        ("512/32", "at"),
        ("512/32", "10"),
        ("512/256", "at"),
        ("512/256", "10"),
    ]
    assert "waste" not in table and "batching" not in table and JOB_LEGEND.startswith("Jobs:")


def series_of(picture):
    return list(dict.fromkeys(row["series"] for row in picture.panels[0]["data"]["values"]))


SIZED = [job_point(spec=EngineSpec(model), output_tokens=n) for model in ("opt-6.7b", "gpt-j-6b") for n in (32, 256)]


def test_models_of_one_size_have_a_picture_of_their_own():
    """In the other one they would hide each other."""
    both = pictures(Findings(jobs=[*GRID, *SIZED]))
    assert [picture.name for picture in both] == ["output-length", "models-of-one-size"]
    labels = [series_of(picture) for picture in both]
    assert labels == [
        ["opt-6.7b, all at once", "opt-6.7b, 10/s"],
        ["opt-6.7b", "gpt-j-6b"],
    ]


def test_jobs_under_several_limits_of_the_batch_differ_in_the_table_and_cards_in_the_picture():
    [table] = job_report(LIMITS)
    assert [line.split()[5] for line in table.splitlines() if "at once" in line] == ["64", "128"]
    other = [replace(job, environment=replace(job.environment, gpu_name="NVIDIA H100 80GB HBM3")) for job in LIMITS]
    (picture,) = pictures(Findings(jobs=[*LIMITS, *other]))
    assert series_of(picture) == ["opt-1.3b, NVIDIA H200", "opt-1.3b, NVIDIA H100 80GB HBM3"]


def test_jobs_through_the_server_are_told_from_those_of_the_engine():
    server = job_point(spec=EngineSpec("opt-1.3b", max_num_seqs=64, interface="server"))
    [table] = job_report([LIMITS[0], server])
    assert [line.split()[1] for line in table.splitlines() if "at once" in line] == ["512/256", "server"]
    assert "interface" in table and "interface" not in job_report(LIMITS)[0]


def test_what_is_invalid_is_told_with_its_reason():
    [table] = job_report([job_point(()), job_point(rate=1.0)])
    assert "INVALID: opt-6.7b, 256 output tokens: planted: invalid" in table and " NO" in table


def test_a_simulated_job_says_so_and_without_jobs_there_is_nothing():
    fake = replace(job_point(), environment=Environment(platform="simulated"))
    assert "SIMULATED, NOT MEASURED" in job_report([fake])[0]
    assert job_report([]) == []


@pytest.mark.parametrize(
    ("jobs", "name", "headings"),
    [
        (GRID, "output-length", ["requests/s", "mean E2E latency, s"]),
        (LIMITS, "batch-limit", ["output tokens/s", "mean E2E latency, s"]),
        (CACHES, "kv-blocks", ["output tokens/s", "requests in the engine", "preemptions"]),
    ],
)
def test_pictures(jobs, name, headings):
    (picture,) = pictures(Findings(jobs=jobs))
    assert (picture.name, picture.origins) == (name, ("NVIDIA H200, vLLM 0.26.0",))
    assert [panel["layer"][-1]["encoding"]["y"]["title"] for panel in picture.panels] == headings
    assert all(row["y"] is not None for panel in picture.panels for row in panel["data"]["values"])
