"""Hooks of every run of pytest: options, fixtures, and the skip of tests that measure if no mode was chosen.

pytest imports this module in every project, so heavy modules are imported only if a mode such as `--slm-gpu` is chosen.
`session_hooks` has the hooks of such a run.
"""

import os
from collections.abc import Generator
from itertools import pairwise

import pytest

from pytest_slmserve.options.table import OPTS, Options
from pytest_slmserve.plugin import NEEDS_A_MODE, PARAMETRISED, SESSION, fixtures, is_measured

MARKERS = (
    "slm(model=..., claim=..., models=..., points=..., jobs=..., lengths=..., lora=..., ramp_up=..., needs=..., "
    "gpus=..., gate=..., **spec): a test that measures; `model` and fields of EngineSpec choose its engine, `lengths` "
    "its requests, `lora` their adapters, `ramp_up` how they begin; `gpus` is how many there must be; "
    "`gate`: it compares two sides of a simulated engine without --slm-gate",
    "slm_suite(name): the suite that a test is part of: core, papers or all",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    for opt in OPTS:
        text = f"{opt.help}; default: {opt.default_text}" if opt.default_text else opt.help
        parser.addini(opt.key, text if opt.ini_only else f"{opt.flag} in an ini file", default="")
        if opt.ini_only:
            continue
        action = "store_true" if opt.is_flag else "append" if opt.many else "store"
        words = {} if opt.is_flag else {"metavar": opt.metavar}
        if opt.bare:
            words = {"nargs": "?", "const": opt.bare, "metavar": str(opt.metavar).strip("[]")}
        group = parser.getgroup(f"slmserve {opt.group}", f"slmserve: {opt.group}")
        group.addoption(opt.flag, action=action, default=None, help=text.replace("%", "%%"), dest=opt.key, **words)


@pytest.hookimpl(wrapper=True)  # conftest files may add options with this prefix
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
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    given = {opt.name: None if opt.ini_only else config.getoption(opt.key) for opt in OPTS}
    # Values as in the file, because `getini` refuses lists and booleans of TOML for a text option. pytest keeps types
    # from release 9 on.
    of_ini = {key: value.value for key, value in getattr(config, "_inicfg", {}).items()}
    ini = {opt.key: of_ini[opt.key] if opt.key in of_ini else config.getini(opt.key) for opt in OPTS}
    options: Options | None = None  # in a project that does not measure
    if any(given[opt.name] is not None or os.environ.get(opt.variable) or ini[opt.key] for opt in OPTS):
        from pytest_slmserve.options.read import read_options
        from pytest_slmserve.schema.errors import SlmError

        try:
            options = read_options(given, ini)
        except SlmError as error:
            raise pytest.UsageError(f"slmserve: {error}") from None
    typed = [*config.args] if config.args_source is pytest.Config.ArgsSource.ARGS else []
    config.pluginmanager.register(fixtures, "slmserve-fixtures")
    if config.pluginmanager.hasplugin("benchmark"):
        config.pluginmanager.register(fixtures.BenchmarkReporter(), "slmserve-carrier")
    else:
        config.addinivalue_line("markers", "benchmark(...): read by pytest-benchmark, where it is active")
    if config.option.pyargs and any(arg.startswith("pytest_slmserve.") for arg in config.args):
        from pytest_slmserve.plugin.items import path_of

        config.args[:] = map(path_of, config.args)
    if options is None:
        return
    _warn_of_misread_path(config)
    if options.platform is None:
        return
    if config.getoption("tx", None) and config.getoption("dist") != "no":
        why = "-n starts processes that would measure against each other"
        raise pytest.UsageError(f"slmserve: {why}; leave it out, or give --slm-ray local for all GPUs of this host")
    from pytest_slmserve.plugin.session_hooks import SessionHooks

    config.pluginmanager.register(SessionHooks.from_options(config, options, typed), "slmserve-session")


def _warn_of_misread_path(config: pytest.Config) -> None:
    # pytest does not know our options yet when it looks for the root. It takes a path after one of them for tests, and
    # another project for the root.
    here, root, chosen = config.invocation_params.dir, config.rootpath, config.option
    own = config.inipath is not None and here.is_relative_to(root)
    if own or chosen.rootdir or chosen.inifilename:
        return
    flags, words = {opt.flag for opt in OPTS if not opt.is_flag}, map(str, config.invocation_params.args)
    for flag, value in pairwise(words):
        if flag in flags and (path := here / value).exists() and not path.is_relative_to(here):
            said = f"{flag} {value} made {root} the root of this run, with its settings: type {flag}={value}"
            try:
                config.issue_config_time_warning(pytest.PytestConfigWarning(f"slmserve: {said}"), stacklevel=2)
            except pytest.PytestConfigWarning as error:  # the settings of that other project make warnings errors
                raise pytest.UsageError(str(error)) from None
            return


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create one item for each test that the options would parametrize, if no mode was chosen."""
    wanted = PARAMETRISED & set(metafunc.fixturenames)
    if wanted and SESSION not in metafunc.config.stash:
        metafunc.parametrize(next(iter(wanted)), [pytest.param(None, id="-")], indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip items that measure if no mode was chosen. With SLM_REQUIRE_GPU=1 raise UsageError instead."""
    measured = [] if SESSION in config.stash else list(filter(is_measured, items))
    if measured and os.environ.get("SLM_REQUIRE_GPU") == "1":
        raise pytest.UsageError(f"slmserve: SLM_REQUIRE_GPU=1, but {measured[0].nodeid} {NEEDS_A_MODE}")
    for item in measured:
        item.add_marker(pytest.mark.skip(reason=NEEDS_A_MODE))
