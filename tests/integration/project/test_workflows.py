"""What the workflows promise beside what zizmor and the schemas of `tox -e lint` hold: rules for our own machines, each
tried on a planted violation; inputs and outputs that fit; and the scripts of their steps, run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from scripts import CHECKOUT
from shipped import put
from workflow_steps import ACTION, FOLDER, INSTALL, REHEARSED, Ran, Step, read, script_of, yaml

Workflow = Mapping[str, Any]
WORKFLOWS = {path.name: read(path) for path in sorted(FOLDER.glob("*.yml"))}
OURS = ("gate.yml", "gpu.yml")  # those that use our own machines
GATED = ("upgrade-gate.yml", *OURS)
CALLED = "$/.github/workflows/gate.yml"  # by a job that has no steps; $ is the repository and commit of the file
STEPS_OF_THE_GATE = "$/.github/actions/gate"
HOSTED = "ubuntu-latest"
GUARD = "github.repository == vars.SLM_GPU_REPOSITORY"
NOT_A_FORK = "github.event.pull_request.head.repo.fork != true"
FOR_THE_GATE = {"contents": "read", "issues": "write"}  # of a job that calls it, whose jobs take less each
READ = {"contents": "read"}
TRUSTED = {"actions/checkout", "actions/download-artifact", "actions/upload-artifact"}
SHA = "0123456789abcdef0123456789abcdef01234567"


def jobs(workflow: Workflow, own: bool) -> dict[str, Workflow]:
    """Those on our own machines, or the others. What is not known to be GitHub's is ours."""
    there = workflow["jobs"].items()
    return {name: job for name, job in there if "uses" not in job and (job.get("runs-on") != HOSTED) is own}


def callers(workflow: Workflow) -> dict[str, Workflow]:
    return {name: job for name, job in workflow["jobs"].items() if "uses" in job}


def steps(workflow: Workflow) -> Iterator[Workflow]:
    for job in workflow["jobs"].values():
        yield from job.get("steps", ())


# Rules for workflows that use our own machines: what breaks each


def started_by_strangers(workflow: Workflow) -> list[str]:
    """Whatever a stranger can cause: a pull request, a comment, another workflow's end. Who calls a workflow answers
    for what causes the call; the called one runs nothing of a fork."""
    found = sorted(set(workflow["on"]) - {"workflow_dispatch", "schedule", "push", "workflow_call"})
    push = workflow["on"].get("push", {"branches": ["main"]})
    return found if push == {"branches": ["main"]} else [*found, f"push: {push}"]


def runs_in_forks(workflow: Workflow) -> list[str]:
    """A job without needs, or on our machines, asks for the repository's own variable; all it asks for has to hold.
    Where others call it, a pull request's code is not a fork's."""
    asking = (each for each in workflow["jobs"].items() if each[1].get("runs-on") != HOSTED or "needs" not in each[1])
    asked = {name: str(job.get("if", "")) for name, job in asking}
    found = [name for name, text in asked.items() if not re.fullmatch(rf"{re.escape(GUARD)}( && [^|]+)?", text)]
    if "workflow_call" in workflow["on"]:
        found += [name for name in jobs(workflow, own=True) if f" && {NOT_A_FORK}" not in asked[name]]
    return found


def has_too_much_access(workflow: Workflow) -> list[str]:
    """On our machines reading the code; writing only where nothing but issues can be written."""
    found = [name for name, job in jobs(workflow, own=True).items() if job.get("permissions") != READ]
    for name, job in jobs(workflow, own=False).items():
        given = job.get("permissions", READ)
        if not isinstance(given, dict) or ("write" in given.values() and given != {"issues": "write"}):
            found.append(name)
    return found + [name for name, job in callers(workflow).items() if job.get("permissions") != FOR_THE_GATE]


def has_tokens(workflow: Workflow) -> list[str]:
    """On our machines."""
    known = ("secrets", "github.token", "GITHUB_TOKEN", "GH_TOKEN", "id-token", "toJSON(github)", "environment:")
    text = yaml.safe_dump([jobs(workflow, own=True), workflow.get("env", {})], width=10_000)
    return [word for word in known if word in text]


def writes_issues_and_runs_code(workflow: Workflow) -> list[str]:
    """Who may write fetches one text and no code."""
    found = []
    for name, job in workflow["jobs"].items():
        if "steps" in job and "write" in (job.get("permissions") or {}).values():
            using = [step for step in job["steps"] if "uses" in step]
            used = [(step["uses"].partition("@")[0], step.get("with", {}).get("name")) for step in using]
            strange = re.findall(r"pip|git clone|curl|\bsh\b|bash", yaml.safe_dump(job, width=10_000))
            if used != [("actions/download-artifact", "gate-summary")] or strange or "defaults" in job:
                found.append(name)
    return found


def uses_strange_actions(workflow: Workflow) -> list[str]:
    """Each by a commit, as zizmor holds everywhere; here only those of GitHub, and our own of the very commit."""
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    used += [job["uses"] for job in callers(workflow).values() if job["uses"] != CALLED]
    return [use for use in used if use != STEPS_OF_THE_GATE and use.partition("@")[0] not in TRUSTED]


def has_no_limit(workflow: Workflow) -> list[str]:
    limits = {name: job.get("timeout-minutes") for own in (True, False) for name, job in jobs(workflow, own).items()}
    return [name for name, limit in limits.items() if not isinstance(limit, int) or not 0 < limit <= 120]


def measures_beside_others(workflow: Workflow) -> list[str]:
    """One group for all that measure, in all workflows; what measures is not cancelled."""
    wanted = {"group": "gpu", "cancel-in-progress": False}
    ours = jobs(workflow, own=True).items()
    return [name for name, job in ours if job.get("concurrency") != wanted or "strategy" in job]


def runs_elsewhere(workflow: Workflow) -> list[str]:
    """The labels are those of the documentation, or those that a caller names."""
    inputs = (workflow["on"].get("workflow_call") or {}).get("inputs", {})
    wanted: list[object] = [["self-hosted", "linux", "gpu"]]
    if inputs.get("runner", {}).get("default") == '["self-hosted", "linux", "gpu"]':
        wanted.append("${{ fromJSON(inputs.runner) }}")
    ours = jobs(workflow, own=True).items()
    return [name for name, job in ours if job["runs-on"] not in wanted or "container" in job]


def skips_without_a_gpu(workflow: Workflow) -> list[str]:
    """The action sees to it where it is all that runs."""
    running = {name: job for name, job in jobs(workflow, own=True).items() if any("run" in s for s in job["steps"])}
    return [name for name, job in running.items() if job.get("env", {}).get("SLM_REQUIRE_GPU") != "1"]


DELETED = object()
Rule = Callable[[Workflow], Sequence[str]]
# fmt: off
RULES: dict[Rule, dict[str, Sequence[object]]] = {  # by where something is planted, what
    started_by_strangers: {
        "on/pull_request": [None], "on/pull_request_target": [None], "on/issue_comment": [None], "on/push": [None],
        "on/workflow_run": [{"workflows": ["CI"]}], "on/push/branches": [["main", "**"]],
    },
    runs_in_forks: {
        "jobs/gate/if": [DELETED, f"{GUARD} || true", "needs.release.outputs.candidate != ''"],
        "jobs/report/needs": [DELETED], "jobs/call/if": [DELETED], "on/workflow_call": [None],
    },
    has_too_much_access: {
        "jobs/gate/permissions": [DELETED, "write-all"], "jobs/gate/permissions/issues": ["write"],
        "jobs/report/permissions": ["write-all"], "jobs/report/permissions/contents": ["write"],
        "jobs/call/permissions": [DELETED], "jobs/call/permissions/contents": ["write"],
    },
    has_tokens: {
        "jobs/gate/env/HF_TOKEN": ["${{ secrets.HF_TOKEN }}"], "jobs/gate/steps/1/env/T": ["${{ github.token }}"],
        "jobs/gate/environment": ["gpu"], "env": [{"T": "${{ secrets.T }}"}],
    },
    writes_issues_and_runs_code: {
        "jobs/report/steps/0/uses": [f"actions/checkout@{SHA}"],
        "jobs/report/steps/0/with": [{"name": "gate-records"}, {}],
        "jobs/report/steps/1/run": ["pip install vllm"], "jobs/gate/permissions/issues": ["write"],
    },
    uses_strange_actions: {
        "jobs/gate/steps/0/uses": [f"somebody/checkout@{SHA}", "./.github/actions/gate", "$/.github/actions/other"],
        "jobs/gate/uses": ["somebody/else/.github/workflows/gpu.yml@main"],
        "jobs/call/uses": ["$/.github/workflows/release.yml"],
    },
    has_no_limit: {"jobs/gate/timeout-minutes": [DELETED], "jobs/report/timeout-minutes": [360]},
    measures_beside_others: {
        "jobs/gate/concurrency": [DELETED], "jobs/gate/concurrency/group": ["gate"],
        "jobs/gate/concurrency/cancel-in-progress": [True],
    },
    runs_elsewhere: {
        "jobs/gate/runs-on": [["self-hosted"], "${{ fromJSON(inputs.runner) }}"], "jobs/report/runs-on": ["gpu"],
    },
    skips_without_a_gpu: {"jobs/gate/env": [{}], "jobs/gate/env/SLM_REQUIRE_GPU": ["0"]},
}
# fmt: on
SOUND: dict[str, Any] = yaml.safe_load(f"""
on:
  workflow_dispatch:
  schedule: [{{cron: 0 3 * * *}}]
  push: {{branches: [main]}}
jobs:
  gate:
    if: "{GUARD} && needs.release.outputs.candidate != ''"
    runs-on: [self-hosted, linux, gpu]
    timeout-minutes: 90
    permissions: {READ}
    concurrency: {{group: gpu, cancel-in-progress: false}}
    env: {{SLM_REQUIRE_GPU: "1"}}
    steps:
      - uses: actions/checkout@{SHA}
      - {{run: pytest $ARGUMENTS, env: {{ARGUMENTS: "${{{{ inputs.arguments }}}}"}}}}
  report:
    needs: gate
    runs-on: {HOSTED}
    timeout-minutes: 10
    permissions: {{issues: write}}
    steps:
      - uses: actions/download-artifact@{SHA}
        with: {{name: gate-summary, path: gate}}
      - {{run: gh issue create, env: {{GH_TOKEN: "${{{{ github.token }}}}"}}}}
  call: {{needs: gate, if: "{GUARD}", permissions: {FOR_THE_GATE}, uses: {CALLED}}}
""")
SOUND["on"] = SOUND.pop(True)  # YAML 1.1 reads the key `on` as true


def planted(where: str, what: object) -> dict[str, Any]:
    """What is sound, with one entry more, another, or one less."""
    workflow = deepcopy(SOUND)
    *path, last = where.split("/")
    place: Any = workflow
    for part in path:
        place = place[int(part) if part.isdigit() else part]
    place[last] = what
    if what is DELETED:
        del place[last]
    return workflow


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_workflows_on_our_machines_keep_the_rule_and_planted_violations_are_found(rule: Rule) -> None:
    assert {name: found for name in GATED if (found := rule(WORKFLOWS[name]))} == {} == dict.fromkeys(rule(SOUND))
    for where, each in RULES[rule].items():
        assert [what for what in each if rule(planted(where, what)) == []] == [], where


def test_all_workflows_read_only_and_have_limits_and_ours_are_known() -> None:
    for name, workflow in WORKFLOWS.items():
        assert (workflow["permissions"], has_no_limit(workflow)) == (READ, []), name
    assert tuple(name for name, workflow in WORKFLOWS.items() if jobs(workflow, own=True)) == OURS
    given = [{job: each["permissions"] for job, each in WORKFLOWS[name]["jobs"].items()} for name in GATED[:2]]
    assert given == [
        {"release": {"contents": "read", "issues": "read"}, "gate": FOR_THE_GATE},
        {"gate": READ, "report": {"issues": "write"}},
    ]


def test_a_pinned_action_has_one_commit_and_says_which_version_it_is() -> None:
    texts = [path.read_text("utf-8") for path in (*FOLDER.glob("*.yml"), ACTION)]
    found = {line for text in texts for line in re.findall(r"uses: (\S+@[0-9a-f]{40}.*)", text)}
    assert all(re.search(r" # v\d+\.\d+\.\d+$", line) for line in found)
    assert len(found) == len({line.split("@")[0] for line in found}) > 0


def test_what_makes_a_release_is_installed_by_hash_and_one_job_stands_for_all_of_ci() -> None:
    scripts = [step["run"] for step in steps(WORKFLOWS["release.yml"]) if "run" in step]
    pip = "python -m pip install --require-hashes -r requirements/publish.lock"
    assert [line for line in scripts if "pip install" in line] == [pip]
    assert "python -m build --no-isolation" in scripts, "or pip would fetch what the backend needs"
    everything = WORKFLOWS["ci.yml"]["jobs"]
    (required,) = (job for job in everything.values() if job.get("if") == "always()")
    assert {*required["needs"]} == {name for name, job in everything.items() if job is not required}


def test_the_action_keeps_the_rules_and_inputs_and_outputs_go_through() -> None:
    action, inputs = read(ACTION), WORKFLOWS["gate.yml"]["on"]["workflow_call"]["inputs"]
    running = [step for step in action["runs"]["steps"] if "run" in step]
    assert {step.get("shell") for step in running} == {"bash"}, "the default of an action is none"
    (gate,) = (step for step in running if "bin/pytest" in step["run"])
    assert (gate["id"], gate["env"]["SLM_REQUIRE_GPU"]) == ("gate", "1")
    as_workflow = {"on": {}, "env": action["inputs"], "jobs": {"action": {"steps": action["runs"]["steps"]}}}
    assert has_tokens(as_workflow) == uses_strange_actions(as_workflow) == []
    there = {name: dict(each) for name, each in inputs.items() if name != "runner"}
    assert {each.pop("type") for each in there.values()} == {"string"} and there == action["inputs"]
    (used,) = (step for step in steps(WORKFLOWS["gate.yml"]) if step.get("uses") == STEPS_OF_THE_GATE)
    assert used["with"] == {name: f"${{{{ inputs.{name} }}}}" for name in action["inputs"]}
    (caller,) = callers(WORKFLOWS["upgrade-gate.yml"]).values()
    assert {name for name, each in inputs.items() if each.get("required")} <= caller["with"].keys() <= inputs.keys()
    given = {name: each["value"] for name, each in action["outputs"].items()}
    assert (given.pop("records"), given.pop("page")) == (gate["env"]["SLM_RECORDS"], gate["env"]["SLM_HTML"])
    assert given == {name: f"${{{{ steps.gate.outputs.{name} }}}}" for name in ("status", "verdict")}
    assert all(f'"{name}=$' in gate["run"] for name in given)


# The scripts of the steps, with commands that only take notes


@pytest.fixture
def step(tmp_path: Path) -> Step:
    made = Step(tmp_path)
    (made.folder / "gate").mkdir()
    return made


def gated(step: Step, status: int, **inputs: str) -> Ran:
    step.files["CALLED"].write_text("", "utf-8")
    told = f'echo "# Gate" | tee gate/gate.json >> "$GITHUB_STEP_SUMMARY"\nexit {status}'
    step.command(step.temp / "plugin/bin/pytest", told)
    return step.act("Gate", inputs)


def test_a_caller_names_tests_models_and_loads(step: Step) -> None:
    asked = {"tests": "tests/gpu\n-k gate", "models": "Qwen/Qwen3-0.6B,models/mine", "concurrency": "8,256"}
    for inputs, words in (
        (asked, "tests/gpu -k gate --slm-models=Qwen/Qwen3-0.6B,models/mine --slm-concurrency=8,256 --slm-gpu"),
        ({}, "--pyargs pytest_slmserve.benchmarks --slm-gpu --slm-gate"),
        ({"tests": ""}, "--slm-gpu --slm-gate"),
    ):
        assert gated(step, 0, **inputs).called.startswith(f"pytest {words}")


@pytest.mark.parametrize(
    ("status", "level", "verdict"), [(0, "notice", "passes"), (1, "error", "fails"), (10, "error", "inconclusive")]
)
def test_the_gate_ends_as_pytest_does_and_tells_its_status(step: Step, status: int, level: str, verdict: str) -> None:
    ran = gated(step, status)
    assert (ran.status, ran.outputs) == (status, f"status={status}\nverdict={verdict}\n")
    assert f"::{level}::{verdict}, 0.27.0 against 0.26.0" in ran.printed
    assert (step.folder / "gate/summary.md").read_text("utf-8") == "# Gate\n"
    baseline, candidate = (f"{step.temp}/vllm-0.{n}.0/bin/python" for n in (26, 27))
    assert f"--slm-gate --junitxml=gate/junit.xml --slm-side=baseline:python={baseline}" in ran.called
    assert f"--slm-side=candidate:python={candidate}" in ran.called


@pytest.mark.parametrize("status", [2, 3, 4, 5, 137])
def test_what_is_no_verdict_fails_the_job_and_tells_no_status(step: Step, status: int) -> None:
    ran = gated(step, status)
    assert (ran.status, ran.outputs) == (status, "") and "::error::no verdict" in ran.printed
    assert ("the gate was broken off" in ran.printed) is (status == 3)


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
    summary = (step.folder / "gate/summary.md").read_text("utf-8")
    assert "opt-1.3b: FAIL" in summary and "output tokens/s" in summary
    assert "opt-125m" not in summary, "the models are those of the repository"
    told, body = reported(step, text="")
    assert told.status == 0 and "output tokens/s" in body and "\ufffd" not in body, "of ours all is seen"


def reported(step: Step, status: str = "1", known: str = "", text: str = "# Gate\n", pull: str = "") -> tuple[Ran, str]:
    """How the step that writes the issue ended, and the text of the issue."""
    if text:
        (step.folder / "gate/summary.md").write_text(text, "utf-8")
    (step.folder / "listing").write_text(known, "utf-8")
    url = "https://example.org/o/r/issues/7"
    reply = f'case "$1 $2" in "issue create") echo {url} ;; "api --paginate") cat listing ;; esac'
    step.command(step.bin / "gh", reply)
    names = {"GH_REPO": "o/r", "BASELINE": "0.26.0", "CANDIDATE": "0.27.0", "RUN": "https://example.org/run/1"}
    ran, body = (
        step.run(script_of("report", "Write the issue"), STATUS=status, PULL=pull, **names),
        step.folder / "body.md",
    )
    return ran, body.read_text("utf-8") if body.exists() else ""


CREATED = "gh issue create --title vLLM 0.27.0: gate --label vllm-gate --body-file body.md\n"
KNOWN = "3\tvLLM 0.27.0: gated\n4\tvLLM 0.27.0: gate\n5\tvLLM 0.27.01: gate\n"


@pytest.mark.parametrize(
    ("given", "said", "called"),
    [
        ({"status": "0"}, "passes", f"{CREATED}gh issue close 7\n"),
        ({"status": "1"}, "fails", f"{CREATED}gh issue reopen 7\n"),
        ({"status": "10"}, "is inconclusive", f"{CREATED}gh issue reopen 7\n"),
        ({"known": KNOWN}, "fails", "gh issue comment 4 --body-file body.md\ngh issue reopen 4\n"),
        ({"pull": "12"}, "fails", "gh issue comment 12 --body-file body.md\n"),
    ],
    ids=["passes", "fails", "inconclusive", "a further result", "on a pull request"],
)
def test_a_result_becomes_an_issue_which_a_pass_closes_or_a_comment(step: Step, given, said: str, called: str) -> None:
    ran, body = reported(step, **given)
    assert ran.status == 0 and re.findall("gh issue .*\n", ran.called) == called.splitlines(keepends=True)
    assert body == f"vLLM 0.27.0 {said} against 0.26.0. [Log and records](https://example.org/run/1)\n\n# Gate\n"


def test_the_text_of_an_issue_is_cut_calls_nobody_and_is_written_if_it_is_no_text(step: Step) -> None:
    ran, body = reported(step, text="@everyone $(touch harm) `touch harm` é\n" + "x" * 100_000)
    assert ran.status == 0 and len(body) < 65_000 and not (step.folder / "harm").exists()
    assert "@everyone" not in body and "@\u200beveryone $(touch harm) `touch harm` é\n" in body
    (step.folder / "gate/summary.md").write_bytes(b"caf\xe9\n")
    ran, body = reported(step, text="")
    assert ran.status == 0 and body.endswith("caf\ufffd\n")


@pytest.mark.parametrize("status", ["", "4", "0; true", "pass", "a link"])
def test_what_is_no_status_or_a_link_in_place_of_the_text_writes_no_issue(step: Step, status: str) -> None:
    if status == "a link":
        (step.folder / "gate/summary.md").symlink_to("/proc/self/environ")
    ran, body = reported(step, "1" if status == "a link" else status, text="")
    assert (ran.status, ran.called, body) == (1, "", "") and "::error::no " in ran.printed


def test_each_release_has_an_environment_of_its_own_and_says_what_is_in_it(step: Step) -> None:
    """Without a plugin that of the action is installed: it is on no index yet, and its commit the caller has read."""
    step.environments(pip='echo "installed: ${0%/bin/pip}"')
    ran = step.act(INSTALL, {})
    assert ran.status == 0, ran.printed
    installs = [line.removeprefix("pip install ") for line in ran.called.splitlines() if line.startswith("pip install")]
    assert [line for line in installs if "vllm==" in line] == [
        f"--only-binary vllm vllm=={release}" for release in ("0.26.0", "0.27.0")
    ]
    assert Path(installs[0].removeprefix("-- ")).resolve() == CHECKOUT and (CHECKOUT / "pyproject.toml").is_file()
    assert "vllm-0.27.0" in (step.folder / "gate/vllm-0.27.0.txt").read_text("utf-8")


@pytest.mark.parametrize(
    "plugin", ["pytest-slmserve", ".", f"git+https://example.org/o/r@{SHA}", f"pytest-slmserve @ git+https://o/r@{SHA}"]
)
def test_the_plugin_is_what_pip_takes_and_gets_its_extra_by_name(step: Step, plugin: str) -> None:
    step.environments()
    ran = step.act(INSTALL, {"plugin": plugin})
    made = f"python3 -m venv --clear {step.temp}/plugin"
    assert ran.status == 0, ran.printed
    assert ran.called.startswith(f"{made}\npip install -- {plugin}\npip install pytest-slmserve[report]\n")


def test_the_nightly_run_takes_the_release_in_use(step: Step) -> None:
    step.environments()
    (step.folder / ".github").mkdir()
    (step.folder / ".github/vllm-baseline.txt").write_text("0.26.0\n", "utf-8")
    (install,) = (each["run"] for each in steps(WORKFLOWS["gpu.yml"]) if "Install" in each.get("name", ""))
    ran = step.run(install)
    assert ran.status == 0 and "pip install --only-binary vllm vllm==0.26.0\n" in ran.called
    assert step.files["GITHUB_ENV"].read_text("utf-8") == f"SLM_PYTHON={step.temp}/vllm-0.26.0/bin/python\n"
