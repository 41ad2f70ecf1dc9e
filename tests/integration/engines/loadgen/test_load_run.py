"""The client in its own process against a server that keeps time: its stamps, ends, and what must never be
told. Its loads and faults are in tests/unit/engines/loadgen, by a clock that is played."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from urllib.request import urlopen

import pytest
from interfaces import small_workload
from processes import gone, until
from scripts import checkout_script

from pytest_slmserve.engines.base import message_of
from pytest_slmserve.engines.child import Child
from pytest_slmserve.engines.endpoint import CLIENT, LoadClient, body_of, run_of
from pytest_slmserve.schema.errors import EngineFailed
from pytest_slmserve.schema.specs import ClosedLoop
from pytest_slmserve.workload.arrivals import job

TTFT_S, ITL_S, TOKENS = 0.02, 0.005, 8
KEY = "sk-a-key-that-nobody-may-see"
REQUEST, SENT, FIRST, LAST, PROMPT, OUTPUT, FINISHED = 0, 1, 3, 4, 5, 6, 7


@contextmanager
def truth_server(*options):
    script = str(checkout_script("studies/truth_server.py"))
    command = [sys.executable, script, "--ttft", f"{TTFT_S}", "--itl", f"{ITL_S}", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            scheme = "https" if options else "http"
            yield f"{scheme}://127.0.0.1:{int(process.stdout.readline())}/v1/completions"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url():
    with truth_server() as found:
        yield found


class Client:
    """A client in its own process. said: all its lines so far."""

    def __init__(self, url, **env):
        self.said = []
        self.child = Child([sys.executable, str(CLIENT)], os.environ | env)
        self.child.send(url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout_s=20.0)
        self.hear()

    def hear(self):
        self.said.append(self.child.receive(20, "measuring"))
        return self.said[-1]

    def begin(self, count, tokens=TOKENS, concurrency=None, requests=None):
        """Hand over requests, and send each once, all at once, unless told otherwise."""
        usage = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens}
        bodies = [json.dumps({"prompt": f"p{i}", **usage}) for i in range(count)]
        self.child.send(op="load", bodies=bodies, output_tokens=[tokens] * count)
        assert self.hear() == {"event": "loaded"}
        self.child.send(op="run", load=message_of(ClosedLoop(concurrency or count, requests=requests or count)))

    def result(self):
        while self.hear()["event"] != "done":
            pass
        return self.said[-1]

    def burst(self, count, **more):
        self.begin(count, **more)
        return self.result()

    def close(self):
        self.child.kill()


@pytest.fixture
def client(url):
    """Starts clients, of the server of this module where no URL is given."""
    with ExitStack() as stack:
        yield lambda at=url, **env: stack.enter_context(closing(Client(at, **env)))


def test_client_stamps_agree_with_server(client, url):
    base, one = url.removesuffix("/v1/completions"), client()
    urlopen(f"{base}/forget").close()
    done = one.burst(40)
    with urlopen(f"{base}/truth") as answer:
        truth = {row["name"]: row for row in json.load(answer)["rows"]}
    assert (done["failed"], len(done["samples"]), done["told"], done["chunks"]) == ([], 40, 40 * TOKENS, 40 * TOKENS)
    _, most_doubt_s = done["doubt_s"]  # where it was held up, it says how much later than a token its stamp may be
    for row in done["samples"]:
        server = truth[f"p{row[REQUEST]}"]
        assert row[SENT] <= server["arrived"] <= server["read"]
        assert -0.003 <= row[FIRST] - server["writes"][0] <= 0.003 + most_doubt_s
        assert row[LAST] == pytest.approx(server["writes"][-1], abs=0.003)
        assert (row[PROMPT], row[OUTPUT], row[FINISHED]) == (1, TOKENS, True)
    assert not done["on_schedule"] and sum(done["bins"].values()) == 40 * TOKENS
    assert sum(done["gaps"][0]["counts"].values()) == 40 * (TOKENS - 1)
    many = one.burst(300, tokens=3)
    assert (many["failed"], len(many["samples"])) == ([], 300)
    assert KEY not in json.dumps(one.said) and KEY not in one.child.log.read_text()
    held = client()
    held.begin(4, tokens=300)
    assert held.hear()["event"] == "progress"
    os.kill(held.child.process.pid, signal.SIGSTOP)
    time.sleep(0.2)  # of the second that the answers still take
    os.kill(held.child.process.pid, signal.SIGCONT)
    mean, most = held.result()["doubt_s"]
    assert 0 < mean <= most and most > ITL_S


@pytest.fixture
def two(url):
    found, workload = LoadClient(url, {}, processes=2), small_workload(16)
    found.load(workload, [json.dumps(body_of(request, "m")) for request in workload.requests])
    yield found
    found.kill()


@pytest.mark.parametrize("load", [ClosedLoop(6, window_s=0.7), ClosedLoop(31, requests=31), job(40, 200)], ids=str)
def test_client_processes_report_one_load(two, load):
    parts = two.run(message_of(load), None, None)
    run = run_of(parts, small_workload(16))
    assert len(parts) == 2 and run.failures == 0
    if load.requests:
        assert sorted(run.samples.request) == sorted(i % 16 for i in range(load.requests))
        return
    begin, end = run.window_s
    # One that was cut off was in flight until the end, whatever it had got.
    ends = [last if done else end for last, done in zip(run.samples.last_token_s, run.samples.finished)]
    looks = [begin + share * (end - begin) for share in (0.1, 0.3, 0.5, 0.7, 0.9)]
    held = [sum(sent <= at < last for sent, last in zip(run.samples.sent_s, ends)) for at in looks]
    assert 1 <= max(held) <= 6 and end - begin >= 0.6


def test_killed_client_process_ends_others(two):
    def until_both_are_seen(progress):
        assert progress.in_flight <= 6
        if progress.in_flight == 6:
            os.kill(two.children[1].process.pid, signal.SIGKILL)

    with pytest.raises(EngineFailed) as caught:
        two.run(message_of(ClosedLoop(6, window_s=30.0)), until_both_are_seen, None)
    assert "SIGKILL" in caught.value.problem and all(gone(child.process.pid) for child in two.children)
    assert [child.log.exists() for child in two.children] == [False, True], "the error names one"


PARENT = """
import json, sys
from pytest_slmserve.engines.endpoint import LoadClient, body_of
from pytest_slmserve.engines.base import message_of
from pytest_slmserve.schema.specs import ClosedLoop
from interfaces import small_workload
client, workload = LoadClient(sys.argv[1], {}), small_workload()
print(client.children[0].process.pid, flush=True)
client.load(workload, [json.dumps(body_of(request, "m")) for request in workload.requests])
client.run(message_of(ClosedLoop(4, window_s=600.0)), lambda progress: print("progress", flush=True), None)
"""


def test_client_ends_with_its_parent(url):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", PARENT, url], stdout=subprocess.PIPE, text=True, env=env) as parent:
        group = int(parent.stdout.readline())
        until(lambda: parent.stdout.readline().startswith("progress"), 10, "a load")
        parent.send_signal(signal.SIGKILL)
    assert gone(group, within_s=3)


def test_client_checks_tls_certificate(client, tmp_path):
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs openssl, to make a certificate")
    with truth_server("--certificate", certificate, key) as url:
        done = client(url, SSL_CERT_FILE=certificate).burst(10, concurrency=4, requests=30)
        assert (done["failed"], done["first_failure"], len(done["samples"])) == ([], None, 30)
        assert all(row[FIRST] - row[SENT] >= TTFT_S - 0.001 for row in done["samples"])
        refused = client(url).burst(10, concurrency=2, requests=30)
        assert "certificate" in refused["first_failure"]
