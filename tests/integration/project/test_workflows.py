"""What the workflows promise beside what zizmor and the schemas of `tox -e lint` hold: causes, places, rights and
tokens of each job that has to do with our own machines; inputs and outputs that fit; and the scripts of steps, run."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from scripts import CHECKOUT
from shipped import put
from workflow_steps import ACTION, FOLDER, INSTALL, REHEARSED, Ran, Step, read, script_of, yaml

WORKFLOWS = {path.name: read(path) for path in sorted(FOLDER.glob("*.yml"))}
READ = {"contents": "read"}
HOSTED = "ubuntu-latest"
GUARD = "github.repository == vars.SLM_GPU_REPOSITORY"  # which a fork does not have
NOT_A_FORK = "github.event.pull_request.head.repo.full_name == github.repository"
NOT_A_FORK = f"(!github.event.pull_request || {NOT_A_FORK})"  # without a pull request, or with one of our own branches
NO_PULL_REQUEST = f"{GUARD} && !github.event.pull_request"  # somebody who may write names what is run
LABELS = ["self-hosted", "linux", "gpu"]
TOKENS = ("secrets", "github.token", "GITHUB_TOKEN", "GH_TOKEN", "id-token", "toJSON(github)", "environment:")
# Two runs on one GPU would measure each other, and one that measures is not cancelled.
MEASURES = {"permissions": READ, "concurrency": {"group": "gpu", "cancel-in-progress": False}, "tokens": []}
# No stranger causes one: no pull request, comment or end of another workflow. Who may write runs no code of a release.
RIGHTS = {
    "gpu.yml": {
        "causes": {"workflow_dispatch", "schedule", "push"},
        "sweep": {
            **MEASURES, "if": GUARD, "runs-on": LABELS, "timeout-minutes": 90,
            "env": {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "SLM_REQUIRE_GPU": "1"},
            "uses": ["actions/checkout", "actions/upload-artifact"],
        },
    },
    "gate.yml": {
        "causes": {"workflow_call"},
        "gate": {
            **MEASURES, "if": f"{GUARD} && {NOT_A_FORK}", "runs-on": "${{ fromJSON(inputs.runner) }}",
            "timeout-minutes": 120,
            "uses": ["actions/checkout", "$/.github/actions/gate", *["actions/upload-artifact"] * 2],
        },
        "report": {
            "needs": "gate", "if": "${{ !cancelled() && needs.gate.outputs.status != '' }}", "runs-on": HOSTED,
            "timeout-minutes": 10, "permissions": {"issues": "write"}, "tokens": ["github.token", "GH_TOKEN"],
            "uses": ["actions/download-artifact"],
        },
    },
    "check.yml": {
        "causes": {"workflow_call"},
        "choose": {
            "if": NO_PULL_REQUEST, "runs-on": HOSTED, "timeout-minutes": 10, "permissions": READ, "uses": [],
            "tokens": ["github.token", "GH_TOKEN"],
        },
        "gate": {
            **MEASURES, "needs": "choose", "if": NO_PULL_REQUEST, "runs-on": "${{ fromJSON(inputs.runner) }}",
            "timeout-minutes": 120, "uses": ["$/.github/actions/gate", *["actions/upload-artifact"] * 2],
        },
        "check": {
            "needs": ["choose", "gate"], "if": "${{ !cancelled() && needs.gate.outputs.status != '' }}",
            "runs-on": HOSTED, "timeout-minutes": 10, "permissions": {"checks": "write"},
            "tokens": ["github.token", "GH_TOKEN"], "uses": ["actions/download-artifact"],
        },
    },
    "upgrade-gate.yml": {
        "causes": {"workflow_dispatch", "schedule"},
        "release": {
            "if": GUARD, "runs-on": HOSTED, "timeout-minutes": 10, "permissions": READ | {"issues": "read"},
            "tokens": ["github.token", "GH_TOKEN"], "uses": ["actions/checkout"],
        },
        "gate": {
            "needs": "release", "if": f"{GUARD} && needs.release.outputs.candidate != ''", "tokens": [],
            "permissions": READ | {"issues": "write"}, "uses": ["$/.github/workflows/gate.yml"],
        },
    },
}  # fmt: skip


def uses(job: Mapping[str, Any]) -> list[str]:
    return [each["uses"].partition("@")[0] for each in (job, *job.get("steps", ())) if "uses" in each]


def rights(workflow: Mapping[str, Any]) -> dict[str, Any]:
    """What causes a workflow, and all of each job but what it is called, does and hands on."""
    found: dict[str, Any] = {"causes": {*workflow["on"]}}
    for name, job in workflow["jobs"].items():
        facts = {key: value for key, value in job.items() if key not in ("name", "steps", "with", "outputs")}
        text = yaml.safe_dump(job, width=10_000)
        found[name] = facts | {"uses": uses(job), "tokens": [word for word in TOKENS if word in text]}
    return found


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_has_allowed_rights(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == READ and "pull_request_target" not in workflow["on"]
    if name in RIGHTS:
        assert rights(workflow) == RIGHTS[name] and "env" not in workflow
    else:
        assert [job for job in workflow["jobs"].values() if job["runs-on"] != HOSTED] == []
        assert all(0 < job["timeout-minutes"] <= 120 for job in workflow["jobs"].values())


def test_workflow_actions_are_pinned() -> None:
    """Actions are pinned by one commit, which says its version, and what makes a release by hash."""
    assert WORKFLOWS["gpu.yml"]["on"]["push"] == {"branches": ["main"]}
    gate = WORKFLOWS["gate.yml"]
    assert yaml.safe_load(gate["on"]["workflow_call"]["inputs"]["runner"]["default"]) == LABELS
    for steps in (gate["jobs"]["report"]["steps"], WORKFLOWS["check.yml"]["jobs"]["check"]["steps"]):
        download, write = steps
        assert download["with"]["name"] == "gate-summary"
        assert re.findall(r"pip|git clone|curl|\bsh\b|bash", yaml.safe_dump(write, width=10_000)) == []
    texts = [path.read_text("utf-8") for path in (*FOLDER.glob("*.yml"), ACTION)]
    found = {line for text in texts for line in re.findall(r"uses: (\S+@[0-9a-f]{40}.*)", text)}
    assert all(re.search(r" # v\d+\.\d+\.\d+$", line) for line in found)
    assert len(found) == len({line.split("@")[0] for line in found}) > 0
    scripts = [step.get("run", "") for step in WORKFLOWS["release.yml"]["jobs"]["build"]["steps"]]
    pip = "python -m pip install --require-hashes -r requirements/publish.lock"
    assert [line for line in scripts if "pip install" in line] == [pip]
    assert "python -m build --no-isolation" in scripts, "or pip would fetch what the backend needs"
    everything = WORKFLOWS["ci.yml"]["jobs"]
    (required,) = (job for job in everything.values() if job.get("if") == "always()")
    assert {*required["needs"]} == {name for name, job in everything.items() if job is not required}


def test_action_passes_inputs_without_token() -> None:
    action, inputs = read(ACTION), WORKFLOWS["gate.yml"]["on"]["workflow_call"]["inputs"]
    *_, gate = action["runs"]["steps"]
    assert {step["shell"] for step in action["runs"]["steps"]} == {"bash"}, "with pipefail"
    assert (gate["id"], gate["env"]["SLM_REQUIRE_GPU"], uses(action["runs"])) == ("gate", "1", [])
    assert [word for word in TOKENS if word in yaml.safe_dump(action, width=10_000)] == []
    there = {name: dict(each) for name, each in inputs.items() if name != "runner"}
    assert {each.pop("type") for each in there.values()} == {"string"} and there == action["inputs"]
    (used,) = (step for step in WORKFLOWS["gate.yml"]["jobs"]["gate"]["steps"] if step.get("id") == "gate")
    assert used["with"] == {name: f"${{{{ inputs.{name} }}}}" for name in action["inputs"]}
    called = WORKFLOWS["check.yml"]["on"]["workflow_call"]["inputs"].keys() - {"commit", "runner"}
    (used,) = (step for step in WORKFLOWS["check.yml"]["jobs"]["gate"]["steps"] if step.get("id") == "gate")
    chosen = {name: f"${{{{ needs.choose.outputs.{name} }}}}" for name in ("baseline", "candidate", "source")}
    assert used["with"] == chosen | {name: f"${{{{ inputs.{name} }}}}" for name in called}
    given = WORKFLOWS["upgrade-gate.yml"]["jobs"]["gate"]["with"].keys()
    assert {name for name, each in inputs.items() if each.get("required")} <= given <= inputs.keys()
    assert {name: each["value"] for name, each in action["outputs"].items()} == {
        "records": gate["env"]["SLM_RECORDS"], "page": gate["env"]["SLM_HTML"],
        "status": "${{ steps.gate.outputs.status }}", "verdict": "${{ steps.gate.outputs.verdict }}",
    }  # fmt: skip


@pytest.fixture
def step(tmp_path: Path) -> Step:
    made = Step(tmp_path)
    (made.folder / "gate").mkdir()
    return made


def gated(step: Step, status: int, **inputs: str) -> Ran:
    told = f'echo "# Gate" | tee gate/gate.json >> "$GITHUB_STEP_SUMMARY"\nexit {status}'
    step.command(step.temp / "plugin/bin/pytest", told)
    return step.act("Gate", inputs)


@pytest.mark.parametrize(("inputs", "words"), [
    (
        {"tests": "tests/gpu\n-k gate", "models": "Qwen/Qwen3-0.6B,models/mine", "concurrency": "8,256"},
        "tests/gpu -k gate --slm-models=Qwen/Qwen3-0.6B,models/mine --slm-concurrency=8,256 --slm-gpu",
    ),
    ({}, "--pyargs pytest_slmserve.benchmarks --slm-gpu --slm-gate"),
    ({"tests": ""}, "--slm-gpu --slm-gate"),
])  # fmt: skip
def test_caller_chooses_tests_models_loads(step: Step, inputs: dict[str, str], words: str) -> None:
    assert gated(step, 0, **inputs).called.startswith(f"pytest {words}")


@pytest.mark.parametrize(("status", "outputs", "said"), [
    (0, "status=0\nverdict=passes\n", "::notice::passes, 0.27.0 against 0.26.0"),
    (1, "status=1\nverdict=fails\n", "::error::fails, 0.27.0 against 0.26.0"),
    (10, "status=10\nverdict=inconclusive\n", "::error::inconclusive, 0.27.0 against 0.26.0"),
    (3, "", "::error::no verdict, the gate was broken off"),
    (137, "", "::error::no verdict, pytest ended with 137"),
])  # fmt: skip
def test_gate_step_ends_like_pytest(step: Step, status, outputs, said) -> None:
    ran = gated(step, status)
    assert (ran.status, ran.outputs) == (status, outputs) and said in ran.printed
    assert (step.folder / "gate/summary.md").read_text("utf-8") == "# Gate\n"
    sides = zip(("baseline", "candidate"), ("0.26.0", "0.27.0"))
    words = [f"--slm-side={side}:python={step.temp}/vllm-{release}/bin/python" for side, release in sides]
    assert f"--slm-gate --junitxml=gate/junit.xml {' '.join(words)}\n" in ran.called


def test_gate_rehearses_in_foreign_repository(step: Step) -> None:
    """The steps of the action as scripts, on a simulated engine, with models and margin of its pyproject.toml."""
    own = 'slm_models = ["opt-1.3b"]\nslm_concurrency = ["64"]\nslm_input_len = "64"\n'
    (step.folder / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\n{own}", "utf-8")
    step.command(step.temp / "plugin/bin/pytest", REHEARSED)
    variables = {"PYTHON": sys.executable, "PYTHONPATH": str(CHECKOUT), "SLOWER": "--slm-simulate-slowdown=5%"}
    ran = step.act("Gate", {"tests": put(step.folder, "test_gate")}, **variables)
    assert (ran.status, ran.outputs) == (1, "status=1\nverdict=fails\n"), ran.printed
    left = {path.name for path in (step.folder / "gate").iterdir()}
    assert left >= {"records.jsonl.gz", "page.html", "junit.xml", "summary.md", "gate.json"}
    told, body = reported(step, text="")
    assert told.status == 0 and "opt-1.3b: FAIL" in body and "output tokens/s" in body
    assert "\ufffd" not in body and "opt-125m" not in body, "all is seen, of the repository's own models"


def reported(step: Step, status: str = "1", known: str = "", text: str = "# Gate\n", pull: str = "") -> tuple[Ran, str]:
    """How the step that writes the issue ended, and the text of the issue. text: empty leaves what is there."""
    if text:
        (step.folder / "gate/summary.md").write_text(text, "utf-8")
    (step.folder / "listing").write_text(known, "utf-8")
    reply = 'case "$1 $2" in "issue create") echo https://example.org/7 ;; "api --paginate") cat listing ;; esac'
    step.command(step.bin / "gh", reply)
    names = {"GH_REPO": "o/r", "BASELINE": "0.26.0", "CANDIDATE": "0.27.0", "RUN": "https://example.org/run/1"}
    ran = step.run(script_of("report", "Write the issue"), STATUS=status, PULL=pull, **names)
    body = step.folder / "body.md"
    return ran, body.read_text("utf-8") if body.exists() else ""


CREATE = "create --title vLLM 0.27.0: gate --label vllm-gate --body-file body.md"
KNOWN = "3\tvLLM 0.27.0: gated\n4\tvLLM 0.27.0: gate\n5\tvLLM 0.27.01: gate\n"


@pytest.mark.parametrize(("given", "said", "called"), [
    ({"status": "0"}, "passes", [CREATE, "close 7"]),
    ({"status": "1"}, "fails", [CREATE, "reopen 7"]),
    ({"status": "10"}, "is inconclusive", [CREATE, "reopen 7"]),
    ({"known": KNOWN}, "fails", ["comment 4 --body-file body.md", "reopen 4"]),
    ({"pull": "12"}, "fails", ["comment 12 --body-file body.md"]),
])  # fmt: skip
def test_result_becomes_issue_or_comment(step: Step, given, said: str, called: list) -> None:
    ran, body = reported(step, **given)
    assert ran.status == 0 and re.findall("gh issue (.*)\n", ran.called) == called
    assert body == f"vLLM 0.27.0 {said} against 0.26.0. [Log and records](https://example.org/run/1)\n\n# Gate\n"


def test_issue_text_mentions_nobody(step: Step) -> None:
    ran, body = reported(step, text="@everyone $(touch harm) `touch harm` é\n" + "x" * 100_000)
    assert ran.status == 0 and len(body) < 65_000 and not (step.folder / "harm").exists()
    assert "@everyone" not in body and "@\u200beveryone $(touch harm) `touch harm` é\n" in body
    (step.folder / "gate/summary.md").write_bytes(b"caf\xe9\n")
    ran, body = reported(step, text="")
    assert ran.status == 0 and body.endswith("caf\ufffd\n")


@pytest.mark.parametrize("status", ["", "4", "0; true", "a link"])
def test_bad_status_writes_no_issue(step: Step, status: str) -> None:
    if status == "a link":
        (step.folder / "gate/summary.md").symlink_to("/proc/self/environ")
    ran, body = reported(step, "1" if status == "a link" else status, text="")
    assert (ran.status, ran.called, body) == (1, "", "") and "::error::no " in ran.printed


HEAD, BASE, SHORT = "a1" * 20, "b2" * 20, "a1a1a1a1a"
SOURCE = "https://github.com/vllm-project/vllm"
CHOSEN = f"baseline={BASE}\ncandidate={HEAD}\nsource={SOURCE}\n"
PYTHON_ONLY = {"merge_base_commit": {"sha": BASE}, "files": [{"filename": "vllm/engine.py"}]}
ON_MAIN = {"merge_base_commit": {"sha": HEAD, "parents": [{"sha": BASE}]}, "files": []}
MANY = PYTHON_ONLY | {"files": PYTHON_ONLY["files"] * 300}
INDEX = [{"version": f"0.27.1rc1.dev14+g{SHORT}", "path": f"../../{HEAD}/vllm-0.27.1rc1.dev14%2Bg{SHORT}-x.whl"}]


def compiles(name: str) -> dict[str, Any]:
    return PYTHON_ONLY | {"files": [{"filename": "README.md"}, {"filename": name}]}


@pytest.mark.parametrize(("commit", "compared", "index", "status", "outputs"), [
    (HEAD, PYTHON_ONLY, [], 0, CHOSEN),
    (HEAD, ON_MAIN, [], 0, CHOSEN.replace(SOURCE, "")),
    (HEAD, compiles("csrc/a.cu"), [], 4, ""), (HEAD, compiles("CMakeLists.txt"), [], 4, ""), (HEAD, MANY, [], 4, ""),
    (HEAD[:9], ON_MAIN, [], 4, ""), ("$(touch harm)", ON_MAIN, [], 4, ""), (f"{HEAD}\nsource=x", ON_MAIN, [], 4, ""),
    ("", {}, INDEX, 0, f"baseline=0.26.0\ncandidate={HEAD}\nsource=\n"), ("", {}, [], 1, ""),
])  # fmt: skip
def test_commit_is_compared_with_main(
    step: Step, commit: str, compared: dict[str, Any], index: list[Any], status: int, outputs: str
) -> None:
    """What changes compiled files is refused: there is no wheel of it, and the baseline's files would be measured."""
    for name, value in {"c.json": compared, "n.json": index, "p.json": {"info": {"version": "0.26.0"}}}.items():
        (step.temp / name).write_text(json.dumps(value), "utf-8")
    step.command(
        step.bin / "gh",
        f'case $2 in */compare/main...{HEAD}) cat "$RUNNER_TEMP/c.json" ;; */{SHORT}) echo {HEAD} ;; esac',
    )
    served = 'case "${@: -1}" in */nightly/vllm/metadata.json) from=n ;; */pypi/vllm/json) from=p ;; esac'
    step.command(step.bin / "curl", f'{served}\ncp "$RUNNER_TEMP/$from.json" "${{@: -2:1}}"')
    ran = step.run(script_of("choose", "Choose", "check.yml"), COMMIT=commit, GH_REPO="vllm-project/vllm", FROM=SOURCE)
    assert (ran.status, ran.outputs) == (status, outputs), ran.printed
    assert ("::error::" in ran.printed) is (status != 0) and not (step.folder / "harm").exists()


def checked(step: Step, status: str, text: bytes) -> tuple[Ran, dict[str, Any]]:
    """How the step that writes the check run ended, and what it sent."""
    if not (step.folder / "gate/summary.md").is_symlink():
        (step.folder / "gate/summary.md").write_bytes(text)
    step.command(step.bin / "gh", 'cp "$4" sent.json')
    names = {"GH_REPO": "o/r", "BASELINE": "0.26.0", "CANDIDATE": HEAD, "RUN": "https://example.org/run/1"}
    ran = step.run(script_of("check", "Write the check run", "check.yml"), STATUS=status, **names)
    sent = step.folder / "sent.json"
    return ran, json.loads(sent.read_text("utf-8")) if sent.exists() else {}


FIVE = "### FAILS: it serves \\[a\\] at 0.943\n\n- why: kernels\n- do this: it\n- trust: me\n- where: here"


@pytest.mark.parametrize(("status", "conclusion"), [("0", "success"), ("1", "failure"), ("10", "neutral")])
def test_verdict_becomes_check_run(step: Step, status: str, conclusion: str) -> None:
    ran, sent = checked(step, status, f"{FIVE}\n\n### opt-1.3b: FAIL\n\n| a |\n\n### To repeat it\n".encode())
    assert ran.status == 0 and ran.called == "gh api repos/o/r/check-runs --input check.json --jq .html_url\n"
    output = sent.pop("output")
    assert sent == {
        "name": "small-model gate", "head_sha": HEAD, "status": "completed", "conclusion": conclusion,
        "details_url": "https://example.org/run/1",
    }  # fmt: skip
    assert output["title"] == "FAILS: it serves [a] at 0.943"
    assert output["summary"] == f"vLLM {HEAD} against 0.26.0\n\n{FIVE}"
    assert output["text"] == "### opt-1.3b: FAIL\n\n| a |\n\n### To repeat it\n"


@pytest.mark.parametrize("text", [
    b"", b"@everyone $(touch harm) `touch harm` '\n" + "\u00e9".encode() * 100_000, b"\xff\x00\x1b[2J\xed\xa0\x80",
    b"@" * 1_000_000, b"\n\n### " * 50_000, b"{CANDIDATE} {GH_TOKEN} %s\"}, \"conclusion\": \"success\"",
], ids=range(6))  # fmt: skip
def test_host_text_cannot_decide_check(step: Step, text: bytes) -> None:
    ran, sent = checked(step, "1", text)
    assert ran.status == 0 and sent["conclusion"] == "failure" and not (step.folder / "harm").exists(), ran.printed
    for name, part in sent["output"].items():
        assert part and len(part.encode()) <= 65_535 and not re.search("@(?!\u200b)", part)
        assert all(each.isprintable() or each in "\n\t\u200b" for each in part) and (
            name != "title" or "\n" not in part
        )


@pytest.mark.parametrize("status", ["", "4", "0; true", "a link"])
def test_missing_verdict_writes_no_check(step: Step, status: str) -> None:
    if status == "a link":
        (step.folder / "gate/summary.md").symlink_to("/proc/self/environ")
    ran, sent = checked(step, "1" if status == "a link" else status, b"# Gate\n")
    assert (ran.status, ran.called, sent) == (1, "", {}) and "::error::no " in ran.printed


@pytest.mark.parametrize(
    ("source", "built"), [(SOURCE, f"vllm @ git+{SOURCE}@{HEAD}"), ("", "{temp}/wheel-{head}/v.whl")]
)
def test_commits_install_from_own_index(step: Step, source, built) -> None:
    told = 'case $1 in download) mkdir -p "${@: -2:1}"; touch "${@: -2:1}/v.whl" ;; esac'
    step.environments(pip=f'{told}\necho "with $VLLM_USE_PRECOMPILED $VLLM_PRECOMPILED_WHEEL_LOCATION" >> "$CALLED"')
    ran = step.act(INSTALL, {"baseline": BASE, "candidate": HEAD, "source": source})
    assert ran.status == 0, ran.printed
    downloaded = re.findall("pip download .*--index-url (\\S+) --dest", ran.called)
    commits = [BASE] if source else [BASE, HEAD]
    assert downloaded == [f"https://wheels.vllm.ai/{commit}" for commit in commits]
    _, _, baseline, candidate = re.findall("pip install (.*)\nwith (.*)\n", ran.called)
    wheel = f"{step.temp}/wheel-{BASE}/v.whl"
    assert baseline == (wheel, " ")
    assert candidate == (built.format(temp=step.temp, head=HEAD), f"1 {wheel}" if source else " ")


@pytest.mark.parametrize("inputs", [
    {"source": SOURCE}, {"candidate": HEAD[:39]},
    {"source": "https://x;touch harm", "baseline": BASE, "candidate": HEAD},
])  # fmt: skip
def test_bad_commit_installs_nothing(step: Step, inputs: dict[str, str]) -> None:
    step.environments()
    ran = step.act(INSTALL, inputs)
    assert (ran.status, ran.called) == (4, "") and "::error::" in ran.printed and not (step.folder / "harm").exists()


@pytest.mark.parametrize("plugin", ["", "pytest-slmserve @ git+https://example.org/o/r@0123456789abcdef"])
def test_each_release_gets_own_environment(step: Step, plugin: str) -> None:
    """Without a plugin that of the action is installed: it is on no index yet, and its commit the caller has read."""
    step.environments(pip='echo "installed: ${0%/bin/pip}"')
    ran = step.act(INSTALL, {"plugin": plugin})
    assert ran.status == 0 and ran.called.startswith(f"python3 -m venv --clear {step.temp}/plugin\n"), ran.printed
    first, *others = re.findall("pip install (.*)\n", ran.called)
    assert first == f"-- {plugin or ACTION.parent / '../../..'}"
    releases = [f"--only-binary vllm vllm=={release}" for release in ("0.26.0", "0.27.0")]
    assert others == ["pytest-slmserve[report]", *releases]
    assert "vllm-0.27.0" in (step.folder / "gate/vllm-0.27.0.txt").read_text("utf-8")


def test_nightly_run_takes_current_release(step: Step) -> None:
    step.environments()
    (step.folder / ".github").mkdir()
    (step.folder / ".github/vllm-baseline.txt").write_text("0.26.0\n", "utf-8")
    (install,) = (each for each in WORKFLOWS["gpu.yml"]["jobs"]["sweep"]["steps"] if "Install" in each.get("name", ""))
    ran = step.run(install["run"])
    assert ran.status == 0 and "pip install --only-binary vllm vllm==0.26.0\n" in ran.called
    assert step.files["GITHUB_ENV"].read_text("utf-8") == f"SLM_PYTHON={step.temp}/vllm-0.26.0/bin/python\n"
