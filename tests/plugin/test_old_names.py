"""Names from before the first release: a usage error with the new name, wherever they stand."""

from __future__ import annotations

from dataclasses import fields

import pytest
from inside import ONE, usage_error

from pytest_slmserve.__main__ import main, parser
from pytest_slmserve.options.old_names import COMMANDS, MARKER, OPTIONS
from pytest_slmserve.options.table import OPTS
from pytest_slmserve.plugin.items import NOT_OF_THE_ENGINE
from pytest_slmserve.schema.specs import EngineSpec


@pytest.mark.parametrize("old", OPTIONS)
@pytest.mark.parametrize("value", ["", "=1"])
def test_an_old_option_is_told_by_its_new_name(pytester, old, value):
    text = usage_error(pytester.runpytest_inprocess(*ONE, f"{old}{value}"))
    assert f"slmserve: {old} is now {OPTIONS[old]}" in text


def test_an_old_variable_is_told_by_its_new_name(pytester, monkeypatch):
    monkeypatch.setenv("SLM_LENGTHS", "512/256")
    text = usage_error(pytester.runpytest_inprocess(*ONE))
    assert "slmserve: SLM_LENGTHS is now SLM_INPUT_LEN and SLM_OUTPUT_LEN" in text


def test_an_old_key_of_an_ini_file_is_told_by_its_new_name(pytester):
    pytester.makeini("[pytest]\nslm_tensor_parallel = 2\n")
    text = usage_error(pytester.runpytest_inprocess("-p", "no:cacheprovider"))
    assert "slmserve: slm_tensor_parallel is now slm_tensor_parallel_size" in text


@pytest.mark.parametrize("old", MARKER)
def test_an_old_word_of_a_marker_is_told_by_its_new_name(pytester, old):
    pytester.makepyfile(f"import pytest\n@pytest.mark.slm({old}=1)\ndef test_it(slm_measure): slm_measure(1)\n")
    assert f"@pytest.mark.slm: {old}= is now {MARKER[old]}=" in usage_error(pytester.runpytest_inprocess(*ONE))


def test_a_marker_with_a_value_without_a_name_is_refused(pytester):
    pytester.makepyfile('import pytest\n@pytest.mark.slm("opt-1.3b")\ndef test_it(slm_measure): slm_measure(1)\n')
    text = usage_error(pytester.runpytest_inprocess(*ONE))
    assert "@pytest.mark.slm('opt-1.3b') has values without a name\n  try: @pytest.mark.slm(model='opt-1.3b')" in text


@pytest.mark.parametrize(("command", "old"), [(command, old) for command in COMMANDS for old in COMMANDS[command]])
def test_an_old_option_of_a_command_is_told_by_its_new_name(capsys, command, old):
    assert main([command, f"{old}=1"]) == 4
    assert f"error: {old} is now {COMMANDS[command][old]}" in capsys.readouterr().err


def test_a_prefix_of_an_option_is_none(capsys, tmp_path):
    assert main(["advise", str(tmp_path / "a.jsonl"), "--slo", "2x@32"]) == 4
    assert "unrecognized arguments: --slo 2x@32" in capsys.readouterr().err


def test_every_new_name_exists():
    flags, words = {opt.flag for opt in OPTS}, {each.name for each in fields(EngineSpec)} | {*NOT_OF_THE_ENGINE}
    assert {flag for new in OPTIONS.values() for flag in new.split(" and ")} <= flags
    assert not OPTIONS.keys() & flags and {*MARKER.values()} <= words and not MARKER.keys() & words
    helps = {command: parser()._subparsers._group_actions[0].choices[command].format_help() for command in COMMANDS}
    assert all(new in helps[command] for command, named in COMMANDS.items() for new in named.values())
