"""The shell: hooks between pytest and the rest. It does no arithmetic, and costs nothing until something is measured.

Everything heavy is imported where a session has been asked for (by a mode: `--slm-gpu`, `--slm-simulate` ...), never
at the top: pytest imports this module in every run of every project that has it installed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from pytest_slmserve.plugin.items import (
    BASELINE,
    COLLECTED,
    NEEDS_A_MODE,
    PARAMETRISED,
    PROBLEM,
    SESSION,
    detail_of,
    engine_of,
    in_running_order,
    is_gate,
    is_measured,
    is_skipped,
    judged_claim,
    left_out_reason,
    models_of_markers,
    path_of,
)
from pytest_slmserve.schema.errors import BadUsage, SlmError

if TYPE_CHECKING:
    from pytest_slmserve.options.table import Options
    from pytest_slmserve.run.ray.driver import Cluster
    from pytest_slmserve.run.session import Session


EXIT_INCONCLUSIVE = 10
EXIT_BROKEN_OFF = pytest.ExitCode.INTERNAL_ERROR  # of a gate: a crash on the way to a verdict is none
CLUSTER: pytest.StashKey[Cluster] = pytest.StashKey()
STATES = pytest.StashKey[set[str]]()  # of the failures of a test: several where it has subtests
STATE = "slm_state"  # user property of a report without a verdict: inconclusive, or a gate that was broken off


@contextmanager
def _as_usage_errors(config: pytest.Config) -> Iterator[None]:
    """Context manager that raises errors of ours as pytest's, and keeps them for hooks that are called all the same."""
    try:
        yield
    except SlmError as error:
        config.stash[PROBLEM] = f"slmserve: {error}"
        raise pytest.UsageError(config.stash[PROBLEM]) from None


def pytest_addoption(parser: pytest.Parser) -> None:
    from pytest_slmserve.options.table import OPTS

    for opt in OPTS:
        group = parser.getgroup(f"slmserve {opt.group}", f"slmserve: {opt.group}")
        action = "store_true" if opt.is_flag else "append" if opt.many else "store"
        words = {} if opt.is_flag else {"metavar": opt.metavar}
        words |= {"nargs": "?", "const": opt.bare, "metavar": str(opt.metavar).strip("[]")} if opt.bare else {}
        default = f"; default: {opt.default_text}" if opt.default_text else ""
        text = f"{opt.help}{default}"
        parser.addini(opt.key, text if opt.ini_only else f"{opt.flag} in an ini file", default="")
        if not opt.ini_only:
            help_text = text.replace("%", "%%")
            group.addoption(opt.flag, action=action, default=None, help=help_text, dest=opt.key, **words)


@pytest.hookimpl(wrapper=True)  # conftest files may add options of this prefix, so their names are known afterwards
def pytest_load_initial_conftests(parser: pytest.Parser, args: list[str]) -> Generator[None, None, None]:
    yield
    if not any(word.startswith("--slm-") for word in args):
        return
    _, unknown = parser.parse_known_and_unknown_args(args)
    for word in unknown:
        flag = word.partition("=")[0]
        if flag.startswith("--slm-"):
            from pytest_slmserve.options.read import near_option

            raise pytest.UsageError(f"unrecognized arguments: {flag}{near_option(flag)}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "slm(model=..., claim=..., models=..., points=..., jobs=..., lengths=..., ramp_up=..., needs=..., gpus=..., "
        "gate=..., **spec): a test that measures; `model` and fields of EngineSpec choose its engine, `lengths` its "
        "requests, `ramp_up` how they begin; `gpus` is how many there must be; "
        "`gate`: it compares two sides of a simulated engine without --slm-gate",
    )
    config.addinivalue_line("markers", "slm_suite(name): the suite that a test is part of: core, papers or all")
    options = _options(config)
    typed = [*config.args] if config.args_source is pytest.Config.ArgsSource.ARGS else []
    from pytest_slmserve.plugin import fixtures

    shows = config.pluginmanager.hasplugin("benchmark")
    if not shows:
        config.addinivalue_line("markers", "benchmark(...): read by pytest-benchmark, where it is active")
    carrier = fixtures.BenchmarkReporter() if shows else fixtures.NoReporter()
    config.pluginmanager.register(carrier, "slmserve-carrier")
    config.pluginmanager.register(fixtures, "slmserve-fixtures")
    if config.option.pyargs:
        config.args[:] = map(path_of, config.args)
    if options is not None and (misread := _misread_path(config)):
        try:
            config.issue_config_time_warning(pytest.PytestConfigWarning(f"slmserve: {misread}"), stacklevel=2)
        except pytest.PytestConfigWarning as error:  # the settings of that other project make warnings errors
            raise pytest.UsageError(str(error)) from None
    if options is None or options.platform is None:
        return
    if config.getoption("tx", None) and config.getoption("dist") != "no":
        why = "-n starts processes that would measure against each other"
        raise pytest.UsageError(f"slmserve: {why}; leave it out, or give --slm-ray local for all GPUs of this host")
    _make_session(config, options)
    config.stash[SESSION].command = _command(config, typed, options)


def _make_session(config: pytest.Config, options: Options) -> None:
    """Put the session of this run into pytest's stash, and the cluster that measures for it, if there is one."""
    from pytest_slmserve.run.interrupts import as_interrupts
    from pytest_slmserve.run.session import Session

    undo = ExitStack()
    undo.enter_context(as_interrupts())
    config.add_cleanup(undo.close)
    with _as_usage_errors(config):
        if options.ray and not options.plan:
            from pytest_slmserve.run.ray.driver import Cluster
            from pytest_slmserve.run.ray.local import LocalGpus

            kind = LocalGpus if options.on_all_gpus else Cluster
            config.stash[CLUSTER] = kind.from_options(options, config.rootpath)
            config.stash[SESSION] = Session.from_options(options, config.rootpath, host=config.stash[CLUSTER].host)
            config.stash[SESSION].executor.remote = config.stash[CLUSTER]
        else:
            config.stash[SESSION] = Session.from_options(options, config.rootpath)


def _command(config: pytest.Config, typed: Sequence[str], options: Options) -> str:
    """The command line that runs the same tests with the same options, wherever these came from. typed: names of tests
    as they were given. Options that would reuse measurements, or write over a page, are left out."""
    import shlex

    from pytest_slmserve.options.read import as_words

    chosen = {"-k": config.option.keyword, "-m": config.option.markexpr}
    words = [*(["--pyargs"] if config.option.pyargs else []), *typed]
    words += [word for flag, value in chosen.items() if value for word in (flag, value)]
    left_out = ("plan", "resume", "skip_damaged", "html", "export")
    return shlex.join(["pytest", *words, *as_words(options, left_out)])


def _options(config: pytest.Config) -> Options | None:
    """None where nothing is said of any of them, as in the projects that do not measure."""
    from pytest_slmserve.options.table import OPTS

    given = {opt.name: None if opt.ini_only else config.getoption(opt.key) for opt in OPTS}
    # As their file has them: `getini` refuses lists and booleans of TOML for a text, and an option may be given as
    # either. Where pytest knows types, from 9 on, it keeps them.
    typed = {key: value.value for key, value in getattr(config, "_inicfg", {}).items()}
    ini = {opt.key: typed[opt.key] if opt.key in typed else config.getini(opt.key) for opt in OPTS}
    if not any(given[opt.name] is not None or os.environ.get(opt.variable) or ini[opt.key] for opt in OPTS):
        return None
    from pytest_slmserve.options.read import read_options

    with _as_usage_errors(config):
        return read_options(given, ini)


def _misread_path(config: pytest.Config) -> str | None:
    """A sentence on a path after one of our options that pytest took for a place of tests, and so another project for
    the root of the run; None where it did not. When pytest looks for the root it does not know our options yet."""
    from pytest_slmserve.options.table import OPTS

    here, root, chosen = config.invocation_params.dir, config.rootpath, config.option
    own = config.inipath is not None and here.is_relative_to(root)
    if own or chosen.rootdir or chosen.inifilename:
        return None
    flags, words = {opt.flag for opt in OPTS if not opt.is_flag}, map(str, config.invocation_params.args)
    for flag, value in pairwise(words):
        if flag in flags and (path := here / value).exists() and not path.is_relative_to(here):
            return f"{flag} {value} made {root} the root of this run, with its settings: type {flag}={value}"
    return None


def pytest_report_header(config: pytest.Config) -> str | None:
    session = config.stash.get(SESSION, None)
    if session is None:
        return None
    environment, source = session.host.environment, session.options.source
    chosen = ", ".join(f"{name} ({where})" for name, where in source.items() if where != "default")
    vllm = f"vLLM {environment.vllm}" if environment.vllm else "no vLLM"
    served = f"{environment.gpu_name or environment.cpu}, {vllm}"
    if session.options.endpoint:
        served = f"at {', '.join(session.options.endpoint)}"
    sampler = session.devices.sampler
    sensors = sampler.name if sampler else "simulated" if session.platform == "simulated" else "none"
    if CLUSTER in config.stash:
        sensors, served = "those of the tasks", f"{served}, {config.stash[CLUSTER].where}"
    sweep = "adaptive sweep; " if session.options.sweep == "adaptive" else ""
    records = session.options.records if session.keeps_records else "not kept"
    from pytest_slmserve.report.text_table import folded

    return folded(f"slmserve: {served}; {sweep}sensors: {sensors}; records: {records}; set: {chosen}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item per point of a sweep, and per model of a claim."""
    wanted = PARAMETRISED & set(metafunc.fixturenames)
    if not wanted:
        return
    session = metafunc.config.stash.get(SESSION, None)
    if session is None:
        metafunc.parametrize(next(iter(wanted)), [pytest.param(None, id="-")], indirect=True)
        return
    from pytest_slmserve.plugin.parametrize import parameters_of

    name, marker, values = next(iter(wanted)), metafunc.definition.get_closest_marker("slm"), []
    try:
        values = parameters_of(name, session, marker)
    except SlmError as error:  # raised here, pytest would take it for an error of the test's file
        metafunc.config.stash.setdefault(PROBLEM, f"slmserve: {error}")
    metafunc.parametrize(name, values, indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    slm = config.stash.get(SESSION, None)
    if slm is None:
        measured = list(filter(is_measured, items))
        if measured and os.environ.get("SLM_REQUIRE_GPU") == "1":  # the runner is there to measure
            raise pytest.UsageError(f"slmserve: SLM_REQUIRE_GPU=1, but {measured[0].nodeid} {NEEDS_A_MODE}")
        for item in measured:
            item.add_marker(pytest.mark.skip(reason=NEEDS_A_MODE))
        return
    if PROBLEM in config.stash:
        raise pytest.UsageError(config.stash[PROBLEM])
    with _as_usage_errors(config):
        _leave_out(config, items)
        slm.claims = set(filter(None, map(judged_claim, items)))
        if slm.options.gate and not any(map(is_gate, items)) and not session.testsfailed:
            flag = "--slm-calibrate" if slm.options.calibrate else "--slm-gate"
            hint = "--pyargs pytest_slmserve.benchmarks, or a path with such a test"
            raise BadUsage(f"{flag}: no test uses slm_gate", hint)
        ordered = in_running_order(slm, list(filter(is_measured, items)))
        if said := models_of_markers(slm, ordered):
            config.stash[COLLECTED] = [*config.stash.get(COLLECTED, []), said]
    items[:] = [item for item in items if not is_measured(item)] + ordered


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what is no part of this run, and keeps a sentence for each reason. What does not measure is none where
    a mode and no path was given: the mode was given to measure. A gate runs alone: other measurements could wait, and
    its engines would not be fresh."""
    session = config.stash[SESSION]
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    reasons = [left_out_reason(session, item, named) for item in items]
    others = [item for item, why in zip(items, reasons) if why]
    if not others:
        return
    from pytest_slmserve.report.text_table import counted

    config.hook.pytest_deselected(items=others)
    items[:] = [item for item, why in zip(items, reasons) if not why]
    counts = Counter(filter(None, reasons))
    config.stash[COLLECTED] = [f"slmserve leaves out {counted(n, 'test')}: {why}" for why, n in counts.items()]


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    if COLLECTED not in config.stash:
        return []
    from pytest_slmserve.report.text_table import folded

    return [folded(line) for line in config.stash[COLLECTED]]


@pytest.hookimpl(tryfirst=True)  # before the terminal tells what was collected
def pytest_collection_finish(session: pytest.Session) -> None:
    """Take the device before the first item: a run that would disturb another must not start."""
    slm = session.config.stash.get(SESSION, None)
    if slm is None or session.config.option.collectonly:
        return
    if PROBLEM in session.config.stash or not any(map(is_measured, session.items)):
        return  # the hook is called although the one before it has raised
    from pytest_slmserve.plugin.estimates import LONG_S, length_of, plan_rows
    from pytest_slmserve.plugin.items import cases_of_items
    from pytest_slmserve.plugin.progress import ProgressLine

    with _as_usage_errors(session.config):
        if slm.options.plan:
            _resume(slm, session)
            return
        if slm.options.baseline:
            from pytest_slmserve.run.baseline import StoredBaseline

            session.config.stash[BASELINE] = StoredBaseline.from_session(slm)
        slm.open()
        _resume(slm, session)
        rows = plan_rows(slm, session.items)
        if CLUSTER in session.config.stash:
            session.config.stash[CLUSTER].send(slm, cases_of_items(session.items), rows)
        for spec in dict.fromkeys(engine_of(slm, item) for item in session.items if is_measured(item)):
            if spec is not None:
                slm.devices.take(spec)
        seconds, length = length_of(slm, list(filter(is_measured, session.items)), rows)
        if seconds >= LONG_S:
            length = f"slmserve: {length}; --slm-plan lists them"
            session.config.stash[COLLECTED] = [*session.config.stash.get(COLLECTED, []), length]
        slm.begin(compares=any(is_gate(item) and not is_skipped(item) for item in session.items))
    if reporter := session.config.pluginmanager.getplugin("terminalreporter"):
        progress = ProgressLine(session, slm, reporter)
        progress.install()
        if CLUSTER in session.config.stash:
            session.config.stash[CLUSTER].on_progress = progress.wait
        session.config.pluginmanager.register(progress, "slmserve-progress")


def _resume(slm: Session, session: pytest.Session) -> None:
    """Say before the first engine starts what is resumed; of a plan it is read here. Raises SlmError."""
    if slm.options.gate or not slm.resumes:
        return
    from pytest_slmserve.report.text_table import folded

    if slm.options.plan:
        slm.resume()
    from pytest_slmserve.plugin.measuring import cases_by_engine, fits

    said = fits(slm, list(cases_by_engine(slm, session.items)))
    if terminal := session.config.pluginmanager.getplugin("terminalreporter"):
        terminal.write_line(folded(f"slmserve: {said}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    slm = session.config.stash.get(SESSION, None)
    if slm is None or not slm.options.plan or session.testsfailed:
        return None
    from pytest_slmserve.plan.schedule import plan_lines, spread_lines
    from pytest_slmserve.plugin.estimates import estimate_notes, length_of, plan_rows
    from pytest_slmserve.report.text_table import folded
    from pytest_slmserve.run.gpu_slots import slot_count

    cells, local, writer = plan_rows(slm, session.items), slm.options.on_all_gpus, session.config.get_terminal_writer()
    with _as_usage_errors(session.config):
        spread = spread_lines(cells, slot_count(slm.options, slm.host)) if local else []
        _, length = length_of(slm, list(filter(is_measured, session.items)), cells)
    writer.line()
    notes = [*slm.notes, *estimate_notes(slm)]
    for line in [f"{length}:", *plan_lines(cells), *spread, *(f"note: {note}" for note in notes)]:
        writer.line(folded(line))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.excinfo and isinstance(call.excinfo.value, AttributeError) and is_measured(item):
        from pytest_slmserve.plugin.items import name_the_figures

        name_the_figures(call.excinfo.value)
    report = yield
    if SESSION not in item.config.stash:
        return report
    states = item.stash.setdefault(STATES, set())
    if call.when == "setup":
        states.clear()  # of an earlier attempt
    elif call.when == "call":  # what an earlier subtest was is none of this report's
        report.user_properties = [each for each in report.user_properties if each[0] != STATE]
    if call.excinfo is None:
        if call.when == "call" and states == {"inconclusive"}:
            report.user_properties.append((STATE, "inconclusive"))
        return report
    from pytest_slmserve.analysis.verdict import Inconclusive

    state = ""
    if call.excinfo.errisinstance(Inconclusive):
        state = "inconclusive"
        if not is_gate(item) and not judged_claim(item):  # those have a line of their own
            item.config.stash[SESSION].inconclusive.append(f"{item.nodeid}: {call.excinfo.value}")
    elif is_gate(item) and call.excinfo.errisinstance(Exception) and not call.excinfo.errisinstance(AssertionError):
        state = "broken off"
    if report.failed:
        states.add(state)
    if state:
        report.user_properties.append((STATE, state))
        item.user_properties.append((STATE, state))  # JUnit reads those of the teardown
    if call.excinfo.errisinstance(SlmError):  # its message says it all; the way to it is ours, not the user's
        report.longrepr = f"{type(call.excinfo.value).__name__}: {call.excinfo.value}"
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    told = getattr(report, "user_properties", ())  # a file that could not be imported has none
    if report.when == "call" and report.passed and (STATE, "inconclusive") in told and not hasattr(report, "context"):
        report.outcome, report.longrepr = (
            "failed",
            "its failed subtests are inconclusive",
        )  # as pytest fails such a test
    if report.when == "call" and report.failed and (STATE, "inconclusive") in told:
        return "inconclusive", "U", "INCONCLUSIVE"
    if report.failed and (STATE, "broken off") in told:
        return "error", "E", "ERROR"
    return None


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop an engine when no later item needs it: items are sorted by engine, so the next one tells."""
    session = item.config.stash.get(SESSION, None)
    if session is not None and session.page and session.page.due and is_measured(item):
        items = item.session.items
        ended = f"{items.index(item) + 1} of {len(items)} tests have ended. The run goes on: reload this page for more."
        _write_page(session, progress=ended)
    if session is None or session.devices.pool.current is None:
        return

    if nextitem is None or engine_of(session, nextitem) != session.devices.pool.current:
        session.devices.stop()


def _write_page(session: Session, status: int | None = None, progress: str = "") -> None:
    """Write the HTML report of a run. A failure is a note, because the results file has everything."""
    assert session.page
    if note := session.page.write(session.findings(), status, progress):
        session.notes.append(note)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    slm = session.config.stash.get(SESSION, None)
    terminal = session.config.pluginmanager.getplugin("terminalreporter")
    stats = terminal.stats if terminal else {}
    if session.exitstatus == pytest.ExitCode.TESTS_FAILED and not stats.get("failed"):  # but not all is well
        errors = stats.get("error", ())
        if any((STATE, "broken off") in getattr(error, "user_properties", ()) for error in errors):
            session.exitstatus = EXIT_BROKEN_OFF
        elif stats.get("inconclusive") and not errors:
            session.exitstatus = EXIT_INCONCLUSIVE
    if slm is None:
        return
    if session.exitstatus == EXIT_INCONCLUSIVE and slm.options.allow_inconclusive:
        session.exitstatus = pytest.ExitCode.OK
    if slm.moved and session.exitstatus in (pytest.ExitCode.OK, EXIT_INCONCLUSIVE):
        # of a gate 1 would be a verdict
        session.exitstatus = EXIT_BROKEN_OFF if slm.options.gate else pytest.ExitCode.TESTS_FAILED
    asked = slm.options.gate and not slm.options.plan and not session.config.option.collectonly
    if asked and not slm.gates and session.exitstatus == pytest.ExitCode.OK:
        slm.notes.append("--slm-gate: nothing was compared, and that is no pass")
        session.exitstatus = EXIT_INCONCLUSIVE
    for report in (*stats.get("failed", ()), *stats.get("error", ())):
        crash = getattr(report.longrepr, "reprcrash", None)
        lines = (crash.message if crash else str(report.longrepr)).splitlines()
        slm.failed.append(f"{report.nodeid}: {lines[0] if lines else 'failed'}")
    try:
        if slm.page and (slm.results or slm.gates or slm.failed):
            _write_page(slm, status=int(session.exitstatus))
    finally:
        slm.close()


@pytest.hookimpl(trylast=True)  # what a person wants to know comes last, where a terminal shows it
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    session = config.stash.get(SESSION, None)
    if (
        session is None
        or session.options.plan
        or not (session.results or session.verdicts.judged or session.gates or session.failed or session.notes)
    ):
        return
    from pytest_slmserve.report.screen import summary_lines, write_for_others

    terminalreporter.ensure_newline()
    terminalreporter.section("slmserve")
    page = f"page: {session.page.path}" if session.page and session.page.path.exists() else ""
    found = session.findings()
    others = write_for_others(found, session.options.records)
    written = "; ".join(filter(None, (others, page)))
    for text, colour in summary_lines(replace(found, written=written), detail_of(config)):
        terminalreporter.write_line(text, **({colour: True} if colour else {}))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Whatever happened, leave no engine behind."""
    for held in (config.stash.get(SESSION, None), config.stash.get(CLUSTER, None)):
        if held is not None:
            held.close()


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    session = config.stash.get(SESSION, None)
    if session is not None:
        machine_info["slmserve"] = asdict(session.host.environment)
