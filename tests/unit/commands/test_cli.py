"""What all commands share: near words are found, wrong usage is a BadUsage, options are typed in full, and a result is
printed in the one format that was asked for, with its notes where they belong."""

import argparse
import csv
import io
import json
import re
from importlib import import_module

import pytest
from refusals import refused

from pytest_slmserve.__main__ import parser as program
from pytest_slmserve.commands import cli
from pytest_slmserve.commands.cli import Parser, did_you_mean
from pytest_slmserve.options.table import positive


def test_nearest_command_name_is_suggested():
    names = [name for group in cli.COMMANDS.values() for name in group]
    assert list(cli.SUMMARIES) == names and len(set(names)) == len(names) == 10
    assert all(callable(getattr(import_module(f"pytest_slmserve.commands.{name}"), f"add_{name}")) for name in names)
    near = {"reprot": "report", "p": "plan", "compar": "compare", "advice": "advise", "xyz": ""}
    for word, name in near.items():
        assert did_you_mean(word, cli.SUMMARIES) == (f", did you mean {name}?" if name else "")
    for begun in [name[:length] for name in cli.SUMMARIES for length in range(1, len(name))]:
        assert did_you_mean(begun, cli.SUMMARIES).startswith(f", did you mean {begun}")


def parser() -> Parser:
    top = Parser("slmserve")
    command = cli.add_command(top.add_subparsers(dest="command"), "report", "0 is well", lambda given: 7)
    cli.add_archives(command, "PATH")
    cli.add_formats(command, "each point")
    command.add_argument("--margin", type=cli.typed(positive), default=0.5)
    return top


@pytest.mark.parametrize(("words", "facts"), [
    ([], ["PATH"]), (["a", "--jsn"], ["--jsn", "--json"]), (["a", "--js"], ["--js", "--json"]),
    (["a", "--margn=2"], ["--margn=2", "did you mean --margin?"]), (["a", "--json", "--csv"], ["--json", "--csv"]),
    (["a", "--margin", "-1"], ["--margin", "'-1'"]), (["a", "--margin", "wide"], ["--margin", "'wide'"]),
])  # fmt: skip
def test_wrong_usage_names_option(words, facts):
    with refused(*facts, hint="slmserve report --help"):
        parser().parse_args(["report", *words])
    cli.add_formats(without := Parser("slmserve"))  # of no points: it knows no --csv
    assert not hasattr(without.parse_args([]), "csv")
    with refused("--csv"):
        without.parse_args(["--csv"])


FACTS, ROWS = {"a": 1, "notes": ["n"]}, [{"a": 1, "b": 2.5}, {"a": 2, "b": None}]


def printed(capsys, **formats):
    given = argparse.Namespace(**{"json": False, "csv": False, **formats})
    cli.print_result(given, FACTS, ROWS, ["first part", "second part"], ["one", "two"])
    return capsys.readouterr()


def test_command_prints_one_format(capsys):
    top = parser()
    given = top.parse_args(["report", "a", "b", "--run=last", "--since", "2026-01-31", "--margin", "0.25"])
    assert given.carry_out(given) == 7 and [str(path) for path in given.paths] == ["a", "b"]
    assert (given.run, given.since, given.margin) == ("last", "2026-01-31", 0.25)
    assert not (given.skip_damaged or given.json or given.csv)
    (action,) = (each for each in top._actions if isinstance(each, argparse._SubParsersAction))
    told = " ".join(action.choices["report"].format_help().split())
    summary = cli.SUMMARIES["report"]
    assert "Exit status: 0 is well" in told and f"{summary[0].upper()}{summary[1:]}." in told
    init = cli.add_command(Parser("slmserve").add_subparsers(), "init", "0", lambda given: 0, "make a folder")
    assert init.description == "Make a folder.", "an action of a command has its own"
    assert printed(capsys) == ("first part\nsecond part\nnote: one\nnote: two\n", "")
    out, err = printed(capsys, json=True)
    assert (json.loads(out), err) == (FACTS, "")
    out, err = printed(capsys, csv=True)
    assert list(csv.DictReader(io.StringIO(out))) == [{"a": "1", "b": "2.5"}, {"a": "2", "b": ""}]
    assert err == "note: one\nnote: two\n"


def options(parser, of="slmserve"):
    """Pairs of an option or argument of any command, with its name, and its action."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from options(command, f"{of} {name}")
        elif not isinstance(action, argparse._HelpAction):
            yield f"{of} {'/'.join(action.option_strings) or action.dest}", action


def test_each_option_has_help(capsys):
    found, defaults = dict(options(program())), 0
    assert len(found) > 100
    for name, action in found.items():
        assert action.help and (action.nargs == 0 or action.metavar or action.choices), name
        assert action.dest != "json" or "JSON" in action.help, name
        told, usual = re.search(r"default: (\S+?)[,;)]", action.help), action.default
        if told and usual not in (None, "", []):
            assert told[1] in {str(usual), f"{usual:g}" if isinstance(usual, float) else ""}, name
            defaults += 1
    assert defaults > 15
    for name in cli.SUMMARIES:
        if name not in ("asv", "plan"):  # one has actions, the other hands words on
            with pytest.raises(SystemExit) as end:
                program(name).parse_args([name, "--help"])
            assert end.value.code == 0 and "Exit status: 0 " in " ".join(capsys.readouterr().out.split())
