"""Cases of the campaign in tests/nightly/faults: one fault of each kind ends in time and with the right status, one
sentence says why, nothing is lost, and nothing is left."""

import random
import signal

import campaign
import pytest
from judged import Case

# What carries a fault out, and what it is given.
FAULTS = {
    "an archive that is removed in the middle": (campaign.change_disk, "kept/r.jsonl", (1,), "removed"),
    "a signal while it measures": (campaign.kill, "simulated", signal.SIGINT, "measuring"),
    "a signal between two points": (campaign.kill, "stand-in", signal.SIGKILL, "between two points"),
    "signals in a burst": (campaign.kill_in_a_burst, "stand-in", random.randrange(1 << 32)),
    "a model with entries that no model has": (campaign.plan_model, "num_attention_heads", [0, 10**9, "text"]),
    "hostile values of an option": (campaign.set_option, "window", ["nan", "\x1b[2J"]),
    "hostile values of measure": (campaign.set_option_of_measure, "--request-rate", ["1e999", "\udc80"]),
    "a secret as an argument": (campaign.type_secrets, "engine-arg", ["hf_token=hf_FAULT9f8e7d6c5b4a"]),
    "a secret of a side": (campaign.type_secrets, "side-arg", ['a={"aws_secret_access_key": "hunter2"}']),
    "a secret as a variable": (campaign.type_secrets, "SLM_ENV", ["A=1 PASSWORD_HASH=hunter2"]),
    "a secret in a body": (campaign.type_secrets, "measure body", ['{"api_key": "hunter2"']),
    "a secret in a URL": (campaign.ask_secret_urls, ["http://u%3Ahunter2%40h/v1"]),
    "secrets in the environment": (campaign.inherit_secrets,),
}
ON_THE_WIRE = {
    "usage-float": (campaign.measure, "usage-float", "count"),
    "usage-flood": (campaign.measure, "usage-flood", "window"),
    "lines without end": (campaign.measure, "event-of-lines-without-end", "count"),
    "hang-in-the-middle": (campaign.measure, "hang-in-the-middle", "window"),
    "first-http-429": (campaign.measure, "first-http-429", "count"),
    "an odd stream": (campaign.measure_odd, random.randrange(1 << 32)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_ends_run_cleanly(case: Case, fault: str) -> None:
    work, *given = FAULTS[fault]
    work(case, *given)


@pytest.mark.parametrize("fault", ON_THE_WIRE)
def test_wire_fault_ends_run_cleanly(case: Case, url: str, fault: str) -> None:
    work, *given = ON_THE_WIRE[fault]
    work(case, url, *given)


def test_gate_outputs_spare_linked_files(case: Case) -> None:
    there = {"gate.md": "pipe", "gate.json": "link"}
    assert there.keys() <= {*campaign.places_of_writes(case, "gate")}
    for name, kind in there.items():
        campaign.link_at(case, "gate", name, kind)


@pytest.mark.parametrize(("reader", "names"), [("report", ("deep.", "cut.gz", "nowhere.")), ("resume", ("deep.",))])
def test_hostile_files_end_reader_cleanly(case: Case, tmp_path_factory, reader: str, names: tuple[str, ...]) -> None:
    good = campaign.good_archive(tmp_path_factory.mktemp("good"))
    files = campaign.hostile_files(tmp_path_factory.mktemp("files"), good)
    some = [path for path in files if path.name.startswith(names)]
    campaign.read_files(case, reader, some, memory=1 << 29)
