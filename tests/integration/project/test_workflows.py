"""What the workflows promise beside what zizmor and the schemas of `tox -e lint` hold: causes, places, rights and
tokens of each job that has to do with our own machines; inputs and outputs that fit; and the scripts of steps, run."""

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
def test_who_causes_a_workflow_where_it_runs_and_what_it_may_do(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == READ and "pull_request_target" not in workflow["on"]
    if name in RIGHTS:
        assert rights(workflow) == RIGHTS[name] and "env" not in workflow
    else:
        assert [job for job in workflow["jobs"].values() if job["runs-on"] != HOSTED] == []
        assert all(0 < job["timeout-minutes"] <= 120 for job in workflow["jobs"].values())


def test_only_main_starts_by_itself_callers_get_our_labels_and_what_comes_from_others_is_pinned() -> None:
    """Actions by one commit, which says its version, and what makes a release by hash."""
    assert WORKFLOWS["gpu.yml"]["on"]["push"] == {"branches": ["main"]}
    gate = WORKFLOWS["gate.yml"]
    assert yaml.safe_load(gate["on"]["workflow_call"]["inputs"]["runner"]["default"]) == LABELS
    download, write = gate["jobs"]["report"]["steps"]
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


def test_the_action_sees_no_token_and_inputs_and_outputs_go_through() -> None:
    action, inputs = read(ACTION), WORKFLOWS["gate.yml"]["on"]["workflow_call"]["inputs"]
    *_, gate = action["runs"]["steps"]
    assert {step["shell"] for step in action["runs"]["steps"]} == {"bash"}, "with pipefail"
    assert (gate["id"], gate["env"]["SLM_REQUIRE_GPU"], uses(action["runs"])) == ("gate", "1", [])
    assert [word for word in TOKENS if word in yaml.safe_dump(action, width=10_000)] == []
    there = {name: dict(each) for name, each in inputs.items() if name != "runner"}
    assert {each.pop("type") for each in there.values()} == {"string"} and there == action["inputs"]
    (used,) = (step for step in WORKFLOWS["gate.yml"]["jobs"]["gate"]["steps"] if step.get("id") == "gate")
    assert used["with"] == {name: f"${{{{ inputs.{name} }}}}" for name in action["inputs"]}
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
def test_a_caller_names_tests_models_and_loads(step: Step, inputs: dict[str, str], words: str) -> None:
    assert gated(step, 0, **inputs).called.startswith(f"pytest {words}")


@pytest.mark.parametrize(("status", "outputs", "said"), [
    (0, "status=0\nverdict=passes\n", "::notice::passes, 0.27.0 against 0.26.0"),
    (1, "status=1\nverdict=fails\n", "::error::fails, 0.27.0 against 0.26.0"),
    (10, "status=10\nverdict=inconclusive\n", "::error::inconclusive, 0.27.0 against 0.26.0"),
    (3, "", "::error::no verdict, the gate was broken off"),
    (137, "", "::error::no verdict, pytest ended with 137"),
])  # fmt: skip
def test_the_gate_ends_as_pytest_does_and_tells_the_status_of_a_verdict(step: Step, status, outputs, said) -> None:
    ran = gated(step, status)
    assert (ran.status, ran.outputs) == (status, outputs) and said in ran.printed
    assert (step.folder / "gate/summary.md").read_text("utf-8") == "# Gate\n"
    sides = zip(("baseline", "candidate"), ("0.26.0", "0.27.0"))
    words = [f"--slm-side={side}:python={step.temp}/vllm-{release}/bin/python" for side, release in sides]
    assert f"--slm-gate --junitxml=gate/junit.xml {' '.join(words)}\n" in ran.called


def test_the_gate_is_rehearsed_in_somebodys_repository(step: Step) -> None:
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
def test_a_result_becomes_an_issue_which_a_pass_closes_or_a_comment(step: Step, given, said: str, called: list) -> None:
    ran, body = reported(step, **given)
    assert ran.status == 0 and re.findall("gh issue (.*)\n", ran.called) == called
    assert body == f"vLLM 0.27.0 {said} against 0.26.0. [Log and records](https://example.org/run/1)\n\n# Gate\n"


def test_the_text_of_an_issue_is_cut_calls_nobody_and_is_written_if_it_is_no_text(step: Step) -> None:
    ran, body = reported(step, text="@everyone $(touch harm) `touch harm` é\n" + "x" * 100_000)
    assert ran.status == 0 and len(body) < 65_000 and not (step.folder / "harm").exists()
    assert "@everyone" not in body and "@\u200beveryone $(touch harm) `touch harm` é\n" in body
    (step.folder / "gate/summary.md").write_bytes(b"caf\xe9\n")
    ran, body = reported(step, text="")
    assert ran.status == 0 and body.endswith("caf\ufffd\n")


@pytest.mark.parametrize("status", ["", "4", "0; true", "a link"])
def test_what_is_no_status_or_a_link_in_place_of_the_text_writes_no_issue(step: Step, status: str) -> None:
    if status == "a link":
        (step.folder / "gate/summary.md").symlink_to("/proc/self/environ")
    ran, body = reported(step, "1" if status == "a link" else status, text="")
    assert (ran.status, ran.called, body) == (1, "", "") and "::error::no " in ran.printed


@pytest.mark.parametrize("plugin", ["", "pytest-slmserve @ git+https://example.org/o/r@0123456789abcdef"])
def test_each_release_has_an_environment_of_its_own_and_the_plugin_is_what_pip_takes(step: Step, plugin: str) -> None:
    """Without a plugin that of the action is installed: it is on no index yet, and its commit the caller has read."""
    step.environments(pip='echo "installed: ${0%/bin/pip}"')
    ran = step.act(INSTALL, {"plugin": plugin})
    assert ran.status == 0 and ran.called.startswith(f"python3 -m venv --clear {step.temp}/plugin\n"), ran.printed
    first, *others = re.findall("pip install (.*)\n", ran.called)
    assert first == f"-- {plugin or ACTION.parent / '../../..'}"
    releases = [f"--only-binary vllm vllm=={release}" for release in ("0.26.0", "0.27.0")]
    assert others == ["pytest-slmserve[report]", *releases]
    assert "vllm-0.27.0" in (step.folder / "gate/vllm-0.27.0.txt").read_text("utf-8")


def test_the_nightly_run_takes_the_release_in_use(step: Step) -> None:
    step.environments()
    (step.folder / ".github").mkdir()
    (step.folder / ".github/vllm-baseline.txt").write_text("0.26.0\n", "utf-8")
    (install,) = (each for each in WORKFLOWS["gpu.yml"]["jobs"]["sweep"]["steps"] if "Install" in each.get("name", ""))
    ran = step.run(install["run"])
    assert ran.status == 0 and "pip install --only-binary vllm vllm==0.26.0\n" in ran.called
    assert step.files["GITHUB_ENV"].read_text("utf-8") == f"SLM_PYTHON={step.temp}/vllm-0.26.0/bin/python\n"
