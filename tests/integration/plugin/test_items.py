"""Items: one per point and claim, in an order that starts each engine once."""

from __future__ import annotations

import re

import pytest
from inside import usage_error

from pytest_slmserve.options.table import OPTS
from pytest_slmserve.plugin import SESSION, items

MIXED = """
    import pytest

    @pytest.mark.slm(model="opt-350m")
    def test_first(slm_measure): assert slm_measure(8).valid

    @pytest.mark.slm(model="opt-125m", max_num_seqs=8)
    def test_limited(slm_measure): assert slm_measure(8).valid

    @pytest.mark.slm(model="opt-350m")
    def test_again(slm_engine, sharegpt): assert slm_engine.spec.model == "opt-350m" and len(sharegpt.requests) == 1024
"""


class Starts:
    """Keeps the session's pool to ask it afterwards."""

    def pytest_sessionfinish(self, session):
        self.specs = [(spec.model, spec.max_num_seqs) for spec in session.config.stash[SESSION].devices.pool.starts]


def test_an_engine_starts_once_though_its_tests_are_apart(pytester):
    pytester.makepyfile(MIXED)
    starts = Starts()
    result = pytester.runpytest_inprocess("--slm-simulate", "--slm-window=1", plugins=[starts])
    result.assert_outcomes(passed=3)
    assert starts.specs == [("opt-350m", 1024), ("opt-125m", 8)]


def test_the_marker_of_a_parameter_adds_its_words_to_those_of_the_test(pytester):
    pytester.makepyfile("""
        import pytest

        two = [pytest.param(n, marks=pytest.mark.slm(max_num_seqs=n)) for n in (8, 16)]

        @pytest.mark.slm(model="opt-350m", max_num_seqs=4)
        @pytest.mark.parametrize("limit", two)
        def test_it(slm_engine, limit):
            assert (slm_engine.spec.model, slm_engine.spec.max_num_seqs) == ("opt-350m", limit)
    """)
    pytester.runpytest_inprocess("--slm-simulate").assert_outcomes(passed=2)


def test_a_marker_with_unknown_words_is_refused_with_the_known_ones(pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.slm(modle='opt-125m')\ndef test_it(slm_engine): pass")
    text = usage_error(pytester.runpytest_inprocess("--slm-simulate"))
    assert "has no modle" in text
    assert "model, " in text


@pytest.mark.parametrize(
    ("marker", "fixture", "problem"),
    [
        ("model=['opt-125m']", "slm_measure", "slm(model=['opt-125m']) is no name of a model"),
        ("max_num_seqs='64'", "slm_measure", "max_num_seqs is a whole number, not '64'"),
        ("extra=[('a', 1)]", "slm_measure", "extra is a tuple of pairs, not [('a', 1)]"),
        ("claim=None", "slm_claim", "unknown claim None"),
        ("", "slm_claim", "test_it[opt-125m]: slm_claim needs a claim"),
        ("claim='throughput-plateau', models=[None]", "slm_claim", "slm(models=[None]) is no list of models"),
        ("points=64", "slm_point", "points=64 is no list of points"),
        ("jobs=64", "slm_job_point", "jobs=64 is no list of jobs"),
    ],
)
def test_a_word_of_a_marker_that_is_of_another_type_is_refused(pytester, marker, fixture, problem):
    pytester.makepyfile(f"import pytest\n@pytest.mark.slm({marker})\ndef test_it({fixture}): pass")
    assert problem in usage_error(pytester.runpytest_inprocess("--slm-simulate", "--slm-models=opt-125m"))


def test_an_item_without_fixtures_measures_nothing(pytester):
    pytester.makeconftest("""
        import pytest

        def pytest_collect_file(parent, file_path):
            if file_path.suffix == ".txt":
                return OneItem.from_parent(parent, path=file_path)

        class OneItem(pytest.File):
            def collect(self):
                item = NoFunction.from_parent(self, name="checked")
                item.add_marker(pytest.mark.slm(model="opt-125m"))
                yield item

        class NoFunction(pytest.Item):
            def runtest(self): pass
            def reportinfo(self): return self.path, 0, self.name
    """)
    pytester.maketxtfile("")
    pytester.makepyfile(MIXED)
    pytester.runpytest_inprocess("--slm-simulate", "--slm-window=1", ".").assert_outcomes(passed=4)


def test_a_runner_that_is_there_to_measure_forbids_the_skip(pytester, monkeypatch):
    pytester.makepyfile(MIXED)
    monkeypatch.setenv("SLM_REQUIRE_GPU", "1")
    assert "SLM_REQUIRE_GPU=1" in usage_error(pytester.runpytest_inprocess())


def test_a_deselected_point_leaves_its_claim_inconclusive(sweep):
    result = sweep("-k", "not 128")
    assert result.ret == 10
    result.stdout.fnmatch_lines(["*inconclusive*not measured at concurrency 128*"])


def test_options_come_from_environment_and_ini_too_and_the_header_says_so(pytester, sweep, monkeypatch):
    pytester.makeini("[pytest]\nslm_repeats = 3\nslm_window = 9\n")
    monkeypatch.setenv("SLM_REPEATS", "2")
    result = sweep("--slm-plan")
    result.stdout.fnmatch_lines(["slmserve: simulated, *window (command line), repeats (environment)*"])


def test_help_has_the_options_in_groups_in_few_words_with_their_defaults(pytester, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = pytester.runpytest_inprocess("--help").stdout.str()
    groups = re.findall(r"^slmserve: (.+):$", text, re.MULTILINE)
    assert groups == ["what to run", "load", "engine", "replicas", "gate", "telemetry", "records", "cluster"]
    assert all(opt.flag in text for opt in OPTS if not opt.ini_only) and "slm_gate_pairs" in text
    assert max(len(opt.help.split()) for opt in OPTS) <= 25
    assert "share of the GPU's memory that the engine may take; default: 0.9" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arg", "path"),
    [
        ("pytest_slmserve.benchmarks", "benchmarks"),
        ("pytest_slmserve.benchmarks.test_gate", "benchmarks/test_gate.py"),
        ("pytest_slmserve.benchmarks.test_gate::test_no_worse", "benchmarks/test_gate.py::test_no_worse"),
        ("pytest_slmserve.quickstart", None),
        ("my.tests", None),
    ],
)
def test_the_shipped_tests_of_a_checkout_are_found_by_the_name_that_they_have_in_a_wheel(
    tmp_path, monkeypatch, arg, path
):
    monkeypatch.setattr(items, "PACKAGE", tmp_path / "pytest_slmserve")
    assert items.path_of(arg) == (f"{tmp_path}/{path}" if path else arg)
    (tmp_path / "pytest_slmserve" / "benchmarks").mkdir(parents=True)
    assert items.path_of(arg) == arg, "a wheel has the module"


def test_pyargs_names_the_shipped_tests_wherever_they_are(pytester):
    module = "pytest_slmserve.benchmarks.test_gate"
    result = pytester.runpytest_inprocess("--pyargs", module, "--slm-simulate", "--slm-gate", "--slm-plan")
    result.stdout.fnmatch_lines(["*test_no_worse?opt-125m-throughput?*"])
