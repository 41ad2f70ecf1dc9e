"""The client in its own process against a server that keeps time: its stamps, faults, ends, and what must never be
told. Its loads are in tests/unit/engines/loadgen, by a clock that is played."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from urllib.request import urlopen

import pytest
from interfaces import small_workload
from processes import gone, until
from scripts import checkout_script

from pytest_slmserve.engines.base import message_of
from pytest_slmserve.engines.child import Child
from pytest_slmserve.engines.endpoint import CLIENT, LoadClient, completion, run_of
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.printable import HIDDEN
from pytest_slmserve.schema.specs import ClosedLoop
from pytest_slmserve.workload.arrivals import job

SERVER = checkout_script("studies/truth_server.py")
TTFT_S, ITL_S, TOKENS = 0.02, 0.005, 8
KEY = "sk-a-key-that-nobody-may-see"
LOST = ("request", "sent", "scheduled", "ended", "kind")
REQUEST, SENT, FIRST, LAST, PROMPT, OUTPUT, FINISHED = 0, 1, 3, 4, 5, 6, 7


@contextmanager
def truth_server(*options):
    command = [sys.executable, str(SERVER), "--ttft", f"{TTFT_S}", "--itl", f"{ITL_S}", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def port():
    with truth_server() as number:
        yield number


@pytest.fixture
def truth(port):
    """Requests that the server has served since the test began, by their prompts."""
    urlopen(f"http://127.0.0.1:{port}/forget").close()

    def told():
        with urlopen(f"http://127.0.0.1:{port}/truth") as answer:
            return {row["name"]: row for row in json.load(answer)["rows"]}

    return told


class Client:
    """A client in its own process. said: all its lines so far."""

    def __init__(self, url, timeout_s=20.0, env=None):
        self.said = []
        self.child = Child([sys.executable, str(CLIENT)], {**os.environ, **(env or {})})
        headers = {"Authorization": f"Bearer {KEY}"}
        self.child.send(url=url, headers=headers, timeout_s=timeout_s)
        self.ready = self.hear()

    def hear(self):
        self.said.append(self.child.receive(20, "measuring"))
        return self.said[-1]

    def load(self, *faults, count=None, tokens=TOKENS, asked=None, **more):
        """Requests, each with its fault or none. asked: tokens of each; None: as many as events."""
        faults = faults or ("",) * (count or 1)
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        bodies = [
            json.dumps({"prompt": f"p{i}", "max_tokens": tokens, "fault": fault, **usage, **more})
            for i, fault in enumerate(faults)
        ]
        self.child.send(op="load", bodies=bodies, output_tokens=[asked or tokens] * len(bodies))
        assert self.hear() == {"event": "loaded"}
        return len(bodies)

    def run(self, load, **more):
        self.child.send(op="run", load=load, **more)
        while self.hear()["event"] != "done":
            if self.said[-1]["event"] == "settled":
                now = time.monotonic()
                self.child.send(op="open", window=[now + 0.05, now + 0.35])
        return read(self.said[-1])

    def burst(self, *faults, **more):
        number = self.load(*faults, **more)
        return self.run(loop(number, requests=number))


def read(done):
    """What a client has told, with a column for each field of the requests that failed."""
    failed = dict(zip(LOST, zip(*done["failed"]))) if done["failed"] else {}
    rows = sorted(done["samples"], key=lambda row: row[SENT])
    scheduled = [row[-1] for row in rows]
    per_chunk = done["told"] / done["chunks"] if done["chunks"] else None
    return {
        **done,
        "samples": [row[:-1] for row in rows],
        "scheduled": scheduled,
        "failed": {name: list(column) for name, column in failed.items()},
        "failures": len(done["failed"]),
        "tokens_per_chunk": per_chunk,
    }


@pytest.fixture(scope="module")
def shared(port):
    client = Client(f"http://127.0.0.1:{port}/v1/completions")
    yield client
    client.child.keep_log = False
    client.child.kill()


@pytest.fixture
def one(shared):
    """The client of all tests that leave it as it was."""
    shared.said.clear()
    return shared


@pytest.fixture
def client(port):
    """Starts clients, of the server of this module where no URL is given."""
    started = []

    def start(url=None, **options):
        started.append(Client(url or f"http://127.0.0.1:{port}/v1/completions", **options))
        return started[-1]

    yield start
    for each in started:
        each.child.keep_log = False
        each.child.kill()


def rows(done):
    return done["samples"]


def loop(concurrency, window_s=0.3, requests=None, ramp_up="staggered"):
    return {
        "kind": "closed_loop",
        "concurrency": concurrency,
        "window_s": window_s,
        "settle_lifetimes": 1.0,
        "requests": requests,
        "ramp_up": ramp_up,
    }


def test_a_burst_is_what_the_server_says_it_was(one, truth):
    done, told = one.burst(count=40), truth()
    assert (done["failures"], len(rows(done)), done["tokens_per_chunk"], done["on_schedule"]) == (0, 40, 1.0, False)
    _, most_doubt_s = done["doubt_s"]  # where it was held up, it says how much later than a token its stamp may be
    for row in rows(done):
        server = told[f"p{row[REQUEST]}"]
        assert row[SENT] <= server["arrived"] <= server["read"]
        assert -0.003 <= row[FIRST] - server["writes"][0] <= 0.003 + most_doubt_s
        assert row[LAST] == pytest.approx(server["writes"][-1], abs=0.003)
        assert (row[PROMPT], row[OUTPUT], row[FINISHED]) == (1, TOKENS, True)
    assert sum(done["bins"].values()) == 40 * TOKENS
    gaps = sum(done["gaps"][0]["counts"].values())
    assert gaps == 40 * (TOKENS - 1)


def test_a_client_that_was_held_up_says_how_far_its_stamps_can_be_off(client):
    held = client()
    held.child.send(op="run", load=loop(4, requests=held.load(count=4, tokens=300)))
    assert held.hear()["event"] == "progress"
    os.kill(held.child.process.pid, signal.SIGSTOP)
    time.sleep(0.2)  # of the second that the answers still take
    os.kill(held.child.process.pid, signal.SIGCONT)
    while (done := held.hear())["event"] != "done":
        pass
    mean, most = done["doubt_s"]
    assert 0 < mean <= most and most > ITL_S


def in_flight(done, at):
    """A request that was cut off was so until the end, whatever it had got."""
    return sum(row[SENT] <= at and (not row[FINISHED] or at < row[LAST]) for row in rows(done))


@pytest.fixture
def two(port):
    """Two processes that share each load, with 16 requests."""
    found = LoadClient(f"http://127.0.0.1:{port}/v1/completions", {}, processes=2)
    workload = small_workload(16)
    found.load(workload, [json.dumps(completion(request, "m")) for request in workload.requests])
    yield found
    found.kill()


LOADS = {
    "window": ClosedLoop(6, window_s=0.7),
    "number": ClosedLoop(6, requests=30),
    "burst": ClosedLoop(31, requests=31),
    "one": ClosedLoop(1, requests=1),
    "rate": job(40, 200),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_several_processes_are_told_as_one(two, load):
    parts = two.run(message_of(load), None, None)
    run = run_of(parts, small_workload(16))
    assert len(parts) == (1 if load.requests == 1 else 2) and run.failures == 0
    if load.requests:
        assert sorted(run.samples.request) == sorted(i % 16 for i in range(load.requests))
    else:
        done = {"samples": [row for part in parts for row in part["samples"]]}
        begin, end = (run.began_s + at for at in run.window_s)
        held = [in_flight(done, begin + share * (end - begin)) for share in (0.1, 0.3, 0.5, 0.7, 0.9)]
        assert 1 <= max(held) <= 6 and end - begin >= 0.6


def test_the_progress_of_several_processes_is_one(two):
    class Seen(Exception):
        pass

    def until_both_are_seen(progress):
        assert progress.in_flight <= 6
        if progress.in_flight == 6:
            raise Seen

    with pytest.raises(Seen):
        two.run(message_of(ClosedLoop(6, window_s=30.0)), until_both_are_seen, None)


def test_one_of_several_processes_that_dies_ends_them_all(two):
    threading.Timer(0.5, lambda: os.kill(two.children[1].process.pid, signal.SIGKILL)).start()
    with pytest.raises(EngineFailed) as caught:
        two.run(message_of(ClosedLoop(4, window_s=600.0)), None, None)
    assert "SIGKILL" in caught.value.problem and all(gone(child.process.pid) for child in two.children)


FAULTS = {"die": ("broke off", "3"), "error": ("HTTP 500", HIDDEN), "silent": ("no tokens", f"{TOKENS}")}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_failure_of_its_kind_and_the_others_are_served(one, fault):
    done = one.burst("", fault, "", "", tokens=TOKENS)
    assert done["failures"] == 1 and sorted(row[REQUEST] for row in rows(done)) == [0, 2, 3]
    lost, (kind, fact) = done["failed"], FAULTS[fault]
    assert (lost["request"], lost["scheduled"], lost["kind"]) == ([1], [None], [kind]) and fact in done["first_failure"]
    assert done["began"] <= lost["sent"][0] <= lost["ended"][0]
    assert KEY not in json.dumps(one.said) and KEY not in one.child.log.read_text()
    assert one.burst("", "")["failures"] == 0


def test_a_load_far_beyond_the_queue_of_connections(one):
    done = one.burst(count=300, tokens=3)
    assert (done["failures"], len(rows(done))) == (0, 300)


def test_it_leaves_when_told_and_when_its_parent_has_closed(client):
    polite, deserted = client(), client()
    polite.child.send(op="close")
    assert polite.child.process.wait(5) == 0
    deserted.child.socket.close()
    assert deserted.child.process.wait(5) == 0
    assert gone(polite.child.process.pid) and gone(deserted.child.process.pid)


def test_it_ends_with_its_parent_in_the_middle_of_a_load(port, tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, f"http://127.0.0.1:{port}/v1/completions"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path])},
    )
    group = int(parent.stdout.readline())
    until(lambda: parent.stdout.readline().startswith("progress"), 10, "a load")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(group)


PARENT = """
import json, os, sys
from pytest_slmserve.engines.base import message_of
from pytest_slmserve.engines.child import Child, converse
from pytest_slmserve.schema.printable import HIDDEN
from pytest_slmserve.schema.specs import ClosedLoop
child = Child([sys.executable, "-m", "pytest_slmserve.engines.loadgen.load_run"], dict(os.environ))
print(child.process.pid, flush=True)
child.send(url=sys.argv[1], headers={}, timeout_s=20.0)
child.receive(10, "starting")
child.send(op="load", bodies=[json.dumps({"max_tokens": 8})], output_tokens=[8])
child.receive(10, "loading")
child.send(op="run", load=message_of(ClosedLoop(4, window_s=600.0)))
while True:
    print(child.receive(10, "measuring")["event"], flush=True)
"""


def test_tls(client, tmp_path):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs openssl, to make a certificate")
    with truth_server("--certificate", str(certificate), str(key)) as port:
        url = f"https://127.0.0.1:{port}/v1/completions"
        one = client(url, env={"SSL_CERT_FILE": str(certificate)})
        one.load(count=10)
        done = one.run(loop(4, requests=30))
        assert (done["failures"], done["first_failure"], len(rows(done))) == (0, None, 30)
        assert all(row[FIRST] - row[SENT] >= TTFT_S - 0.001 for row in rows(done))
        refused = client(url)
        refused.load(count=10)
        assert "certificate" in refused.run(loop(2, requests=30))["first_failure"]
