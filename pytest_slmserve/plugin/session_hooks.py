"""Hooks of a run that measures, from the parameters of its tests to its exit status. They do no arithmetic."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest

from pytest_slmserve.analysis.estimates import FIRST_LOOKS
from pytest_slmserve.analysis.gate.decision import STARTS
from pytest_slmserve.analysis.verdict import Inconclusive
from pytest_slmserve.engines.interrupts import as_interrupts
from pytest_slmserve.options.read import as_words
from pytest_slmserve.options.table import Options
from pytest_slmserve.plan.cases import plan_lines, spread_lines
from pytest_slmserve.plugin import BASELINE, ELSEWHERE, PARAMETRISED, PLAN, SESSION, is_measured, items as tests
from pytest_slmserve.plugin.progress import ProgressLine, length_of, plan_rows
from pytest_slmserve.report.screen import summary_lines, write_for_others
from pytest_slmserve.report.text_table import counted, folded
from pytest_slmserve.run.cluster import RayEngines
from pytest_slmserve.run.executor import slot_count
from pytest_slmserve.run.judge import StoredBaseline
from pytest_slmserve.run.session import Session
from pytest_slmserve.schema.errors import BadUsage, Detail, SlmError
from pytest_slmserve.schema.printable import printable
from pytest_slmserve.schema.secrecy import secret_in

LONG_S = 300.0  # a longer run says how long it takes before it begins
EXIT_INCONCLUSIVE = 10
EXIT_BROKEN_OFF = pytest.ExitCode.INTERNAL_ERROR  # of a gate that crashed before its verdict
STATES = pytest.StashKey[set[str]]()  # of the failures of a test: several if it has subtests
STATE = "slm_state"  # user property of a report without a verdict: inconclusive, or a gate that was broken off


def detail_of(config: pytest.Config) -> Detail:
    """Return how much is printed at the end: as the command line says, else by pytest's -v and -q, else by options."""
    options, verbose = config.stash[SESSION].options, config.option.verbose
    if options.source["report"] == "command line" or not verbose:
        return options.report
    if verbose < 0:
        return "summary"
    return "all" if verbose > 1 or options.report == "all" else "tables"


@dataclass(eq=False, repr=False)
class SessionHooks:
    config: pytest.Config
    slm: Session
    elsewhere: RayEngines | None = None  # engines of Ray, if the run uses it
    problem: str = ""  # error in the options, found while items were created
    collected: list[str] = field(default_factory=list)  # sentences on deselected tests and the length of the run

    @classmethod
    def from_options(cls, config: pytest.Config, options: Options, typed: Sequence[str]) -> SessionHooks:
        """Create the session of a run, and the engines of Ray if it uses Ray.

        Args:
            typed: names of tests as the user typed them.
        """
        undo = ExitStack()
        undo.enter_context(as_interrupts())
        config.add_cleanup(undo.close)
        elsewhere: RayEngines | None = None
        try:
            if options.ray and not options.plan:
                elsewhere = config.stash[ELSEWHERE] = RayEngines.from_options(options, config.rootpath)
                config.add_cleanup(elsewhere.close)
            host, is_run = elsewhere.host if elsewhere else None, not config.option.collectonly
            slm = Session.from_options(options, config.rootpath, host, is_run)
        except SlmError as error:
            raise pytest.UsageError(f"slmserve: {error}") from None
        # The command that repeats this run, with options from any source. Options that would reuse measurements or
        # overwrite a report are excluded.
        chosen = {"-k": config.option.keyword, "-m": config.option.markexpr}
        words = [*(["--pyargs"] if config.option.pyargs else []), *typed]
        words += [word for flag, value in chosen.items() if value for word in (flag, value)]
        if any(secret_in(word, named=False) for word in words):
            why = "a name of a test, -k or -m holds what looks like a secret, and it goes into records"
            raise pytest.UsageError(f"slmserve: {why}")
        left_out = ("plan", "resume", "skip_damaged", "html", "export")
        slm.command = shlex.join(["pytest", *words, *as_words(options, left_out)])
        if elsewhere:
            slm.executor.fetch = elsewhere.fetch
        config.add_cleanup(slm.close)  # whatever happens, leave no engine behind
        config.stash[SESSION] = slm
        return cls(config, slm, elsewhere)

    @contextmanager
    def _as_usage_errors(self) -> Iterator[None]:
        """Raise our errors as pytest's, and keep them, because pytest calls later hooks all the same."""
        try:
            yield
        except SlmError as error:
            self.problem = f"slmserve: {error}"
            raise pytest.UsageError(self.problem) from None

    def pytest_report_header(self) -> str:
        options, environment = self.slm.options, self.slm.host.environment
        chosen = ", ".join(f"{name} ({where})" for name, where in options.source.items() if where != "default")
        vllm = f"vLLM {environment.vllm}" if environment.vllm else "no vLLM"
        served = f"{environment.gpu_name or environment.cpu or 'no GPU'}, {vllm}"
        if options.endpoint:
            served = f"at {', '.join(options.endpoint)}"
        sampler = self.slm.devices.sampler
        sensors = sampler.name if sampler else "simulated" if self.slm.platform == "simulated" else "none"
        if self.elsewhere:
            sensors, served = "those of the tasks", f"{served}, {self.elsewhere.where}"
        sweep = "adaptive sweep; " if options.sweep == "adaptive" else ""
        records = options.records if self.slm.keeps_records else "not kept"
        return folded(f"slmserve: {served}; {sweep}sensors: {sensors}; records: {records}; set: {chosen}")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Create an item for each point of a sweep, and for each model of a claim."""
        if not (wanted := PARAMETRISED & set(metafunc.fixturenames)):
            return
        name, marker, values = next(iter(wanted)), metafunc.definition.get_closest_marker("slm"), []
        try:
            values = tests.parameters_of(name, self.slm, marker.kwargs if marker else {})
        except SlmError as error:  # raised here, pytest would take it for an error of the test's file
            self.problem = self.problem or f"slmserve: {error}"
        metafunc.parametrize(name, values, indirect=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Deselect items that are not part of this run, and sort the rest. With `--slm-gate` only gates run."""
        if self.problem:
            raise pytest.UsageError(self.problem)
        options, named = self.slm.options, self.config.args_source is pytest.Config.ArgsSource.ARGS
        with self._as_usage_errors():
            reasons = [tests.left_out_reason(self.slm, item, named) for item in items]
            counts = Counter(filter(None, reasons))
            if counts:
                self.config.hook.pytest_deselected(items=[item for item, why in zip(items, reasons) if why])
            self.collected += [f"slmserve: deselected {counted(n, 'test')}: {why}" for why, n in counts.items()]
            built_in = shlex.join(["pytest", *as_words(options), "--pyargs", "pytest_slmserve.benchmarks"])
            kept = [item for item, why in zip(items, reasons) if not why]
            measured = list(filter(is_measured, kept))
            gates = [item for item in measured if "slm_gates" in item.fixturenames]  # type: ignore[attr-defined]
            if options.gate and not gates and not session.testsfailed:
                flag = "--slm-calibrate" if options.calibrate else "--slm-gate"
                raise BadUsage(f"{flag}: no test uses slm_gate", built_in)
            if not any(map(is_measured, items)) and not session.testsfailed:
                self.collected.append(f"slmserve: no test here uses a fixture of slmserve; try: {built_in}")
            tests.check_judged(gates)
            ordered = tests.in_running_order(self.slm, measured)
            self.slm.claims = {plan.claim.row.claim for plan in tests.plans_of(ordered) if plan.claim}
            # Their marker names a model that the options do not; an endpoint skips them.
            words = [tests.words_of(item) for item in ordered if not item.stash[PLAN].skipped]
            models = [each["model"] for each in words if "model" in each and options.models]
            others = [model for model in models if not self.slm.planner.swept(model)]
            if others and self.slm.platform != "remote":
                tests_of = f"{counted(len(others), 'test')} of {', '.join(dict.fromkeys(others))}"
                as_marked = "as the marker has it: --slm-models does not change that"
                self.collected.append(f"slmserve: {tests_of}, {as_marked}")
        items[:] = [item for item in kept if not is_measured(item)] + ordered

    @pytest.hookimpl(tryfirst=True)  # before the terminal tells what was collected
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Lock the device before the first item, because a run that would disturb another must not start."""
        slm, options, plans = self.slm, self.slm.options, tests.plans_of(session.items)
        if self.config.option.collectonly or self.problem or not any(map(is_measured, session.items)):
            return  # the hook is called although the one before it has raised
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        with self._as_usage_errors():
            if options.plan:
                slm.resume()
            else:
                if options.baseline:
                    self.config.stash[BASELINE] = StoredBaseline.of_run(slm.verdicts)
                slm.open()
            if options.resume and not options.gate and (slm.resumes or not options.plan):
                said = tests.fits(slm, plans)
                if terminal:
                    terminal.write_line(folded(f"slmserve: {said}"))
            if options.plan:
                return
            rows = plan_rows(slm, plans)
            if self.elsewhere:
                slm.undo.callback(self.elsewhere.close)  # what has come by then goes into the archive
                self.elsewhere.send(slm, tests.cases_of_items(plans), rows)
                if self.elsewhere.warning:
                    self.collected.append(f"slmserve: {self.elsewhere.warning}")
            for engine in dict.fromkeys(plan.engine for plan in plans if plan.engine):
                slm.devices.take(engine)
            seconds, length = length_of(slm, plans, rows)
            if seconds >= LONG_S:
                self.collected.append(f"slmserve: {length}; --slm-plan lists them")
            slm.begin(compares=any(plan.compares for plan in plans))
        if terminal:
            progress = ProgressLine(session, slm, terminal, seconds)
            if self.elsewhere:
                self.elsewhere.on_progress = progress.wait
            self.config.pluginmanager.register(progress, "slmserve-progress")

    def pytest_report_collectionfinish(self) -> list[str]:
        return list(map(folded, self.collected))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Print the plan instead of running, if it was requested."""
        options = self.slm.options
        if not options.plan or session.testsfailed:
            return None
        plans, writer = tests.plans_of(session.items), self.config.get_terminal_writer()
        rows = plan_rows(self.slm, plans)
        with self._as_usage_errors():
            spread = spread_lines(rows, slot_count(options, self.slm.host)) if options.on_all_gpus else []
            _, length = length_of(self.slm, plans, rows)
        notes = list(self.slm.notes)  # the last ones tell what the estimates leave open
        if options.sweep == "adaptive" and not options.gate:
            most = "an adaptive sweep takes at most what all points of its model take, and typically a third"
            notes.append(f"{most}: it skips those that do not decide where the plateau is")
        if len(self.slm.looks) > 1 and not options.gate:
            budget = f"up to {self.slm.budget_s:g} s a model (--slm-budget)"
            notes.append(f"a sweep continues until its claims are conclusive, {budget}")
        if options.gate:
            pairs = (FIRST_LOOKS[0], options.gate_pairs) if options.gate_launches != "start" else STARTS
            clear = f"a gate is estimated as a clear case, {pairs[0]} pairs"
            notes.append(f"{clear}; one that is not takes up to {pairs[-1]}")
        if options.endpoint:
            priced = "points of an endpoint are priced by their windows"
            notes.append(f"{priced}: how long its requests take is not known beforehand")
        writer.line()
        for line in [f"{length}:", *plan_lines(rows), *spread, *(f"note: {note}" for note in notes)]:
            writer.line(folded(line))
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the state to reports without a verdict, and show only the message of our errors."""
        raised = call.excinfo.value if call.excinfo else None
        if isinstance(raised, AttributeError) and type(raised.obj).__module__.startswith("pytest_slmserve."):
            public = [name for name in dir(raised.obj) if not name.startswith("_")]
            raised.args = (f"{raised}; it has {tests.nearest(raised.name or '', public)}",)
        report = yield
        states = item.stash.setdefault(STATES, set())
        if call.when == "setup":
            states.clear()  # of an earlier attempt
        elif call.when == "call":  # what an earlier subtest was is none of this report's
            report.user_properties = [each for each in report.user_properties if each[0] != STATE]
        if call.excinfo is None:
            if call.when == "call" and states == {"inconclusive"}:
                report.user_properties.append((STATE, "inconclusive"))
            return report
        state, [plan] = "", tests.plans_of([item])
        if call.excinfo.errisinstance(Inconclusive):
            state = "inconclusive"
            if not plan.compares and not plan.claim:  # those have a line of their own
                self.slm.inconclusive.append(f"{item.nodeid}: {call.excinfo.value}")
        elif plan.compares and call.excinfo.errisinstance(Exception) and not call.excinfo.errisinstance(AssertionError):
            state = "broken off"
        if report.failed:
            states.add(state)
        if state:
            report.user_properties.append((STATE, state))
            item.user_properties.append((STATE, state))  # JUnit reads those of the teardown
        if call.excinfo.errisinstance(SlmError):  # the message is enough; the traceback is in our code
            report.longrepr = f"{type(call.excinfo.value).__name__}: {call.excinfo.value}"
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        told = getattr(report, "user_properties", ())  # a file that could not be imported has none
        in_setup = report.when == "setup" and report.failed  # a fixture used the truth of an inconclusive verdict
        inconclusive = (in_setup or report.when == "call") and (STATE, "inconclusive") in told
        if inconclusive and report.passed and not hasattr(report, "context"):  # as pytest fails such a test
            report.outcome, report.longrepr = "failed", "its failed subtests are inconclusive"
        if inconclusive and report.failed:
            return "inconclusive", "U", "INCONCLUSIVE"
        if report.failed and (STATE, "broken off") in told:
            return "error", "E", "ERROR"
        return None

    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Stop an engine that the next item does not need, because items are sorted by engine."""
        slm = self.slm
        if slm.page and time.monotonic() >= slm.page.next_at and is_measured(item):
            items = item.session.items
            ended = f"{items.index(item) + 1} of {len(items)} tests have ended."
            self._write_page(progress=f"{ended} The run continues: reload this page for updates.")
        current = slm.devices.pool.current
        if current is not None and (nextitem is None or tests.plans_of([nextitem])[0].engine != current):
            slm.devices.pool.close()

    def _write_page(self, status: int | None = None, progress: str = "") -> None:
        assert self.slm.page
        # A failure is only a note, because the results file has everything.
        if note := self.slm.page.write(self.slm.findings(), status, progress):
            self.slm.notes.append(note)

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Remove traceback entries without a line number, which some instructions have and pytest cannot show."""
        self.slm.interrupted = True
        excinfo.traceback = excinfo.traceback.filter(lambda entry: entry._rawentry.tb_lineno is not None)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Set the exit status, write the HTML report, and close the session."""
        slm, ok = self.slm, pytest.ExitCode.OK
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        stats = terminal.stats if terminal else {}
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and not stats.get("failed"):  # but not all is well
            errors = stats.get("error", ())
            if any((STATE, "broken off") in getattr(error, "user_properties", ()) for error in errors):
                session.exitstatus = EXIT_BROKEN_OFF
            elif stats.get("inconclusive") and not errors:
                session.exitstatus = EXIT_INCONCLUSIVE
        if session.exitstatus == EXIT_INCONCLUSIVE and slm.options.allow_inconclusive:
            session.exitstatus = ok
        if slm.moved and session.exitstatus in (ok, EXIT_INCONCLUSIVE):
            # Exit status 1 would mean that the gate failed.
            session.exitstatus = EXIT_BROKEN_OFF if slm.options.gate else pytest.ExitCode.TESTS_FAILED
        asked = slm.options.gate and not slm.options.plan and not self.config.option.collectonly
        if asked and not slm.gates and session.exitstatus == ok:
            slm.notes.append("--slm-gate: nothing was compared, so nothing passes")
            session.exitstatus = EXIT_INCONCLUSIVE
        for report in (*stats.get("failed", ()), *stats.get("error", ())):
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash else str(report.longrepr)).splitlines()
            slm.failed.append(f"{report.nodeid}: {lines[0] if lines else 'failed'}")
        try:
            if slm.page and (slm.results.repeats or slm.gates or slm.failed):
                self._write_page(status=int(session.exitstatus))
        finally:
            slm.close()

    @pytest.hookimpl(trylast=True)  # the summary is printed last, so that it is visible
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slm = self.slm
        something = slm.results.repeats or slm.verdicts.judged or slm.gates or slm.failed or slm.notes
        if slm.options.plan or not something:
            return
        terminalreporter.ensure_newline()
        terminalreporter.section("slmserve")
        page = f"page: {slm.page.path}" if slm.page and slm.page.path.exists() else ""
        found = slm.findings()
        others = write_for_others(found, slm.options.records)
        written = "; ".join(filter(None, (others, page)))
        for text, colour in summary_lines(replace(found, written=written), detail_of(self.config)):
            terminalreporter.write_line(printable(text), **({colour: True} if colour else {}))

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        machine_info["slmserve"] = asdict(self.slm.host.environment)
