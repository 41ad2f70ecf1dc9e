"""Cases of the campaign in tests/nightly/faults: one fault of each kind ends in time and with the right status, one
sentence says why, nothing is lost, and nothing is left."""

import random
import signal

import campaign
import pytest
from judged import Case


def test_an_archive_that_is_removed_in_the_middle(case: Case) -> None:
    campaign.change_disk(case, "kept/r.jsonl", (1,), "removed")


def test_what_lies_where_a_gate_writes(case: Case) -> None:
    there = {"gate.md": "pipe", "gate.json": "link"}
    assert there.keys() <= {*campaign.places_of_writes(case, "gate")}
    for name, kind in there.items():
        campaign.link_at(case, "gate", name, kind)


@pytest.mark.parametrize(("engine", "number", "moment"), [
    ("simulated", signal.SIGINT, "measuring"), ("stand-in", signal.SIGKILL, "between two points"),
])  # fmt: skip
def test_a_signal_at_a_moment(case: Case, engine: str, number: int, moment: str) -> None:
    campaign.kill(case, engine, number, moment)


def test_signals_in_a_burst(case: Case) -> None:
    campaign.kill_in_a_burst(case, "stand-in", random.randrange(1 << 32))


@pytest.mark.parametrize(("fault", "load"), [
    ("usage-float", "count"), ("usage-flood", "window"), ("event-of-lines-without-end", "count"),
    ("hang-in-the-middle", "window"), ("first-http-429", "count"),
])  # fmt: skip
def test_a_fault_on_the_wire(case: Case, url: str, fault: str, load: str) -> None:
    campaign.measure(case, url, fault, load)


def test_an_odd_stream(case: Case, url: str) -> None:
    campaign.measure_odd(case, url, random.randrange(1 << 32))


@pytest.mark.parametrize(("reader", "names"), [("report", ("deep.", "cut.gz", "nowhere.")), ("resume", ("deep.",))])
def test_a_reader_with_some_hostile_files(case: Case, tmp_path_factory, reader: str, names: tuple[str, ...]) -> None:
    good = campaign.good_archive(tmp_path_factory.mktemp("good"))
    files = campaign.hostile_files(tmp_path_factory.mktemp("files"), good)
    some = [path for path in files if path.name.startswith(names)]
    campaign.read_files(case, reader, some, memory=1 << 29)


def test_a_model_with_entries_that_no_model_has(case: Case) -> None:
    campaign.plan_model(case, "num_attention_heads", [0, 10**9, "text"])


@pytest.mark.parametrize(("set_option", "name", "texts"), [
    (campaign.set_option, "window", ["nan", "\x1b[2J"]),
    (campaign.set_option_of_measure, "--request-rate", ["1e999", "\udc80"]),
])  # fmt: skip
def test_an_option_with_hostile_values(case: Case, set_option, name: str, texts: list[str]) -> None:
    set_option(case, name, texts)


@pytest.mark.parametrize(("way", "text"), [
    ("engine-arg", "hf_token=hf_FAULT9f8e7d6c5b4a"), ("side-arg", 'a={"aws_secret_access_key": "hunter2"}'),
    ("SLM_ENV", "A=1 PASSWORD_HASH=hunter2"), ("measure body", '{"api_key": "hunter2"'),
])  # fmt: skip
def test_a_secret_that_is_typed(case: Case, way: str, text: str) -> None:
    campaign.type_secrets(case, way, [text])


def test_secrets_in_a_url_and_in_the_environment(case: Case) -> None:
    campaign.ask_secret_urls(case, ["http://u%3Ahunter2%40h/v1"])
    campaign.inherit_secrets(case)
