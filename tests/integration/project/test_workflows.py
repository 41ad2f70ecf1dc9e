"""What the workflows promise: rules as data, each tried on a planted violation, and the scripts of their steps, run."""

from __future__ import annotations

import json
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

WORKFLOWS = sorted(FOLDER.glob("*.yml"))
OURS = ("gate.yml", "gpu.yml")  # those that use our own machines
CALLED = "$/.github/workflows/gate.yml"  # by a job that has no steps; $ is the repository and commit of the file
STEPS_OF_THE_GATE = "$/.github/actions/gate"
HOSTED = "ubuntu-latest"
TRUSTED = {"actions/checkout", "actions/download-artifact", "actions/upload-artifact"}

Workflow = Mapping[str, Any]
Job = Mapping[str, Any]


def jobs(workflow: Workflow, own: bool) -> Iterator[tuple[str, Job]]:
    """Those on our own machines, or the others. What is not known to be GitHub's is ours."""
    there = ((name, job) for name, job in workflow["jobs"].items() if "uses" not in job)
    yield from ((name, job) for name, job in there if (job.get("runs-on") != HOSTED) is own)


def callers(workflow: Workflow) -> list[tuple[str, Job]]:
    """Jobs that are another workflow's."""
    return [(name, job) for name, job in workflow["jobs"].items() if "uses" in job]


def steps(workflow: Workflow) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from ((name, step) for name, job in workflow["jobs"].items() for step in job.get("steps", ()))


# Rules for workflows that use our own machines: what breaks each


def strange_triggers(workflow: Workflow) -> list[str]:
    """Whatever a stranger can cause: a pull request, a comment, another workflow's end. Who calls a workflow answers
    for what causes the call; the called one runs nothing of a fork."""
    wanted = {"workflow_dispatch", "schedule", "push", "workflow_call"}
    found = sorted(set(workflow["on"]) - wanted)
    push = workflow["on"].get("push", {"branches": ["main"]})
    return found if push == {"branches": ["main"]} else [*found, f"push: {push}"]


def in_forks(workflow: Workflow) -> list[str]:
    """A job without needs, or on our machines, asks for the repository's own variable; all it asks for has to hold.
    Where others call it, a pull request's code is not a fork's."""
    guard = "github.repository == vars.SLM_GPU_REPOSITORY"
    asked = {
        name: str(job.get("if", ""))
        for name, job in workflow["jobs"].items()
        if job.get("runs-on") != HOSTED or "needs" not in job
    }
    found = [name for name, text in asked.items() if not re.fullmatch(rf"{re.escape(guard)}( && [^|]+)?", text)]
    if "workflow_call" in workflow["on"]:
        found += [name for name, _ in jobs(workflow, own=True) if f" && {NOT_A_FORK}" not in asked[name]]
    return found


def too_much_access(workflow: Workflow) -> list[str]:
    """On our machines reading the code; writing only where nothing but issues can be written."""
    found = [name for name, job in jobs(workflow, own=True) if job.get("permissions") != {"contents": "read"}]
    for name, job in jobs(workflow, own=False):
        given = job.get("permissions", {"contents": "read"})
        if not isinstance(given, dict) or ("write" in given.values() and given != {"issues": "write"}):
            found.append(name)
    found += [name for name, job in callers(workflow) if job.get("permissions") != FOR_THE_GATE]
    return found if workflow.get("permissions") == {"contents": "read"} else [*found, "the whole"]


def tokens_on_our_machines(workflow: Workflow) -> list[str]:
    known = ("secrets", "github.token", "GITHUB_TOKEN", "GH_TOKEN", "id-token", "toJSON(github)", "environment:")
    texts = {name: yaml.safe_dump(job, width=10_000) for name, job in jobs(workflow, own=True)}
    shared = yaml.safe_dump(workflow.get("env", {}), width=10_000)
    return [f"{name}: {word}" for name, text in {**texts, "env": shared}.items() for word in known if word in text]


def writers_of_issues_that_run_code(workflow: Workflow) -> list[str]:
    """Who may write fetches one text and no code."""
    found = []
    for name, job in workflow["jobs"].items():
        if "steps" in job and "write" in (job.get("permissions") or {}).values():
            used = [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step]
            fetched = [step.get("with", {}).get("name") for step in job["steps"] if "uses" in step]
            strange = re.findall(r"pip|git clone|curl|\bsh\b|bash", yaml.safe_dump(job, width=10_000))
            if used != ["actions/download-artifact"] or fetched != ["gate-summary"] or strange or "defaults" in job:
                found.append(name)
    return found


def unpinned_actions(workflow: Workflow) -> list[str]:
    used = [step["uses"] for _, step in steps(workflow) if "uses" in step]
    used += [job["uses"] for _, job in callers(workflow) if job["uses"] != CALLED]
    return [
        use
        for use in used
        if use != STEPS_OF_THE_GATE
        and (not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", use) or use.split("@")[0] not in TRUSTED)
    ]


def credentials_left_behind(workflow: Workflow) -> list[str]:
    checkouts = [(name, step) for name, step in steps(workflow) if "actions/checkout@" in step.get("uses", "")]
    return [name for name, step in checkouts if step.get("with", {}).get("persist-credentials") is not False]


def expressions_in_scripts(workflow: Workflow) -> list[str]:
    """`${{ }}` is put into a script before the shell reads it; a variable is not."""
    return [name for name, step in steps(workflow) if "${{" in step.get("run", "")]


def without_limit(workflow: Workflow) -> list[str]:
    limits = {name: job.get("timeout-minutes") for name, job in workflow["jobs"].items() if "uses" not in job}
    return [name for name, limit in limits.items() if not isinstance(limit, int) or not 0 < limit <= 120]


def at_the_same_time(workflow: Workflow) -> list[str]:
    """One group for all that measure, in all workflows; what measures is not cancelled."""
    wanted = {"group": "gpu", "cancel-in-progress": False}
    return [name for name, job in jobs(workflow, own=True) if job.get("concurrency") != wanted or "strategy" in job]


def remote_executor(workflow: Workflow) -> list[str]:
    wanted = ["self-hosted", "linux", "gpu"]
    inputs = (workflow["on"].get("workflow_call") or {}).get("inputs", {})
    known: list[object] = [wanted]
    if json.loads(inputs.get("runner", {}).get("default", "[]")) == wanted:
        known.append("${{ fromJSON(inputs.runner) }}")
    return [name for name, job in jobs(workflow, own=True) if job["runs-on"] not in known or "container" in job]


def without_a_gpu(workflow: Workflow) -> list[str]:
    """A run without a GPU is an error there, and no skip; the action sees to it where it is all that runs."""
    running = [(name, job) for name, job in jobs(workflow, own=True) if any("run" in step for step in job["steps"])]
    found = {name: job.get("env", {}).get("SLM_REQUIRE_GPU") for name, job in running}
    return [name for name, value in found.items() if value != "1"]


RULES: dict[str, Callable[[Workflow], Sequence[str]]] = {
    "no stranger starts it": strange_triggers,
    "it does not run in a fork": in_forks,
    "our machines may read, and issues may be written": too_much_access,
    "no token is on our machines": tokens_on_our_machines,
    "who writes issues runs no code": writers_of_issues_that_run_code,
    "actions are pinned": unpinned_actions,
    "no credentials are left behind": credentials_left_behind,
    "scripts hold no expressions": expressions_in_scripts,
    "every job has a limit": without_limit,
    "one run at a time": at_the_same_time,
    "the labels are those of the documentation": remote_executor,
    "a GPU is required": without_a_gpu,
}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_leave_no_credentials_in_every_workflow(path):
    workflow = read(path)
    used = {step["uses"] for _, step in steps(workflow) if "uses" in step} - {STEPS_OF_THE_GATE}
    assert [use for use in used if not re.search(r"@[0-9a-f]{40}$", use)] == []
    assert credentials_left_behind(workflow) == []


def test_what_makes_a_release_is_installed_by_hash() -> None:
    scripts = [step["run"] for _, step in steps(read(FOLDER / "release.yml")) if "run" in step]
    assert [line for line in scripts if "pip install" in line] == [
        "python -m pip install --require-hashes -r requirements/publish.lock"
    ]
    assert "python -m build --no-isolation" in scripts, "or pip would fetch what the backend needs"


GUARD = "github.repository == vars.SLM_GPU_REPOSITORY"
NOT_A_FORK = "github.event.pull_request.head.repo.fork != true"
FOR_THE_GATE = {"contents": "read", "issues": "write"}  # of a job that calls it, whose jobs take less each
SHA = "0123456789abcdef0123456789abcdef01234567"
CHECKOUT_STEP = {"uses": f"actions/checkout@{SHA}", "with": {"persist-credentials": False}}
FETCH = {"uses": f"actions/download-artifact@{SHA}", "with": {"name": "gate-summary", "path": "gate"}}
SOUND: dict[str, Any] = {
    "on": {"workflow_dispatch": None, "schedule": [{"cron": "0 3 * * *"}], "push": {"branches": ["main"]}},
    "permissions": {"contents": "read"},
    "jobs": {
        "gate": {
            "if": f"{GUARD} && needs.release.outputs.candidate != ''",
            "runs-on": ["self-hosted", "linux", "gpu"],
            "timeout-minutes": 90,
            "permissions": {"contents": "read"},
            "concurrency": {"group": "gpu", "cancel-in-progress": False},
            "env": {"SLM_REQUIRE_GPU": "1"},
            "steps": [CHECKOUT_STEP, {"run": "pytest $ARGUMENTS", "env": {"ARGUMENTS": "${{ inputs.arguments }}"}}],
        },
        "report": {
            "needs": "gate",
            "runs-on": HOSTED,
            "timeout-minutes": 10,
            "permissions": {"issues": "write"},
            "steps": [FETCH, {"run": "gh issue create", "env": {"GH_TOKEN": "${{ github.token }}"}}],
        },
    },
}
SOUND["jobs"]["call"] = {"needs": "gate", "if": GUARD, "permissions": FOR_THE_GATE, "uses": CALLED}
GATE, REPORT, CALL = ("jobs", "gate"), ("jobs", "report"), ("jobs", "call")
DELETED = object()
PLANTED: list[tuple[str, Sequence[str | int], object]] = [
    ("no stranger starts it", ("on", "pull_request"), None),
    ("no stranger starts it", ("on", "pull_request_target"), None),
    ("no stranger starts it", ("on", "workflow_run"), {"workflows": ["CI"]}),
    ("no stranger starts it", ("on", "issue_comment"), None),
    ("no stranger starts it", ("on", "push"), None),
    ("no stranger starts it", ("on", "push", "branches"), ["main", "**"]),
    ("it does not run in a fork", (*GATE, "if"), DELETED),
    ("it does not run in a fork", (*GATE, "if"), f"{GUARD} || true"),
    ("it does not run in a fork", (*GATE, "if"), "needs.release.outputs.candidate != ''"),
    ("it does not run in a fork", (*REPORT, "needs"), DELETED),
    ("it does not run in a fork", (*CALL, "if"), DELETED),
    ("it does not run in a fork", ("on", "workflow_call"), None),
    ("our machines may read, and issues may be written", (*GATE, "permissions"), DELETED),
    ("our machines may read, and issues may be written", (*GATE, "permissions", "issues"), "write"),
    ("our machines may read, and issues may be written", (*GATE, "permissions"), "write-all"),
    ("our machines may read, and issues may be written", (*REPORT, "permissions", "contents"), "write"),
    ("our machines may read, and issues may be written", (*REPORT, "permissions"), "write-all"),
    ("our machines may read, and issues may be written", ("permissions",), DELETED),
    ("our machines may read, and issues may be written", (*CALL, "permissions"), DELETED),
    ("our machines may read, and issues may be written", (*CALL, "permissions", "contents"), "write"),
    ("no token is on our machines", (*GATE, "env", "HF_TOKEN"), "${{ secrets.HF_TOKEN }}"),
    ("no token is on our machines", (*GATE, "steps", 1, "env", "T"), "${{ github.token }}"),
    ("no token is on our machines", (*GATE, "environment"), "gpu"),
    ("no token is on our machines", ("env",), {"T": "${{ secrets.T }}"}),
    ("who writes issues runs no code", (*REPORT, "steps", 0), CHECKOUT_STEP),
    ("who writes issues runs no code", (*REPORT, "steps", 0, "with"), {"name": "gate-records"}),
    ("who writes issues runs no code", (*REPORT, "steps", 0, "with"), {}),
    ("who writes issues runs no code", (*REPORT, "steps", 1, "run"), "pip install vllm"),
    ("who writes issues runs no code", (*GATE, "permissions", "issues"), "write"),
    ("actions are pinned", (*GATE, "steps", 0, "uses"), "actions/checkout@v5"),
    ("actions are pinned", (*GATE, "steps", 0, "uses"), "actions/checkout@0123456"),
    ("actions are pinned", (*GATE, "steps", 0, "uses"), f"somebody/checkout@{SHA}"),
    ("actions are pinned", (*GATE, "uses"), "somebody/else/.github/workflows/gpu.yml@main"),
    ("actions are pinned", (*CALL, "uses"), "$/.github/workflows/release.yml"),
    ("actions are pinned", (*GATE, "steps", 0, "uses"), "./.github/actions/gate"),  # of whoever was checked out
    ("actions are pinned", (*GATE, "steps", 0, "uses"), "$/.github/actions/other"),
    ("actions are pinned", (*GATE, "steps", 0, "uses"), "OWNER/pytest-slmserve/.github/actions/gate@v0.1.0"),
    ("no credentials are left behind", (*GATE, "steps", 0, "with"), {}),
    ("no credentials are left behind", (*GATE, "steps", 0, "with", "persist-credentials"), True),
    ("scripts hold no expressions", (*GATE, "steps", 1, "run"), "pytest ${{ inputs.arguments }}"),
    ("every job has a limit", (*GATE, "timeout-minutes"), DELETED),
    ("every job has a limit", (*REPORT, "timeout-minutes"), 360),
    ("one run at a time", (*GATE, "concurrency"), DELETED),
    ("one run at a time", (*GATE, "concurrency", "group"), "gate"),
    ("one run at a time", (*GATE, "concurrency", "cancel-in-progress"), True),
    ("the labels are those of the documentation", (*GATE, "runs-on"), ["self-hosted"]),
    ("the labels are those of the documentation", (*REPORT, "runs-on"), "gpu"),
    ("the labels are those of the documentation", (*GATE, "runs-on"), "${{ fromJSON(inputs.runner) }}"),
    ("a GPU is required", (*GATE, "env"), {}),
]


def planted(where: Sequence[str | int], what: object, sound: Mapping[str, Any] = SOUND) -> dict[str, Any]:
    """What is sound, with one entry more, another, or one less."""
    workflow = deepcopy(dict(sound))
    *path, last = where
    place: Any = workflow
    for part in path:
        place = place[part]
    if what is DELETED:
        del place[last]
    else:
        place[last] = what
    return workflow


@pytest.mark.parametrize("name", [*OURS, "upgrade-gate.yml"])
@pytest.mark.parametrize("rule", RULES)
def test_a_workflow_on_our_machines_keeps_the_rule(name: str, rule: str) -> None:
    assert RULES[rule](read(FOLDER / name)) == []


@pytest.mark.parametrize("rule", RULES)
def test_a_sound_workflow_breaks_no_rule(rule: str) -> None:
    assert RULES[rule](SOUND) == []


@pytest.mark.parametrize(("rule", "where", "what"), PLANTED)
def test_a_planted_violation_is_found(rule: str, where: Sequence[str | int], what: object) -> None:
    assert RULES[rule](planted(where, what)) != []


def test_every_rule_was_tried() -> None:
    assert {rule for rule, _, _ in PLANTED} == RULES.keys()


# The action: it has no rights of its own, and the same rules for its steps


def as_workflow(action: Mapping[str, Any]) -> Workflow:
    """A job with its steps; what an input may be without being given is read as a variable of all."""
    return {"on": {}, "env": action["inputs"], "jobs": {"action": {"steps": action["runs"]["steps"]}}}


def without_bash(action: Mapping[str, Any]) -> list[str]:
    """The default of an action is none, and `bash` has pipefail."""
    return [step["name"] for step in action["runs"]["steps"] if "run" in step and step.get("shell") != "bash"]


def skips_without_a_gpu(action: Mapping[str, Any]) -> list[str]:
    running = [step for step in action["runs"]["steps"] if "bin/pytest" in step.get("run", "")]
    return [step["name"] for step in running if step["env"].get("SLM_REQUIRE_GPU") != "1"]


def of_steps(rule: str) -> Callable[[Mapping[str, Any]], Sequence[str]]:
    return lambda action: RULES[rule](as_workflow(action))


ACTION_RULES: dict[str, Callable[[Mapping[str, Any]], Sequence[str]]] = {
    "bash runs each script": without_bash,
    "a GPU is required": skips_without_a_gpu,
    "no token is on our machines": of_steps("no token is on our machines"),
    "actions are pinned": of_steps("actions are pinned"),
    "no credentials are left behind": of_steps("no credentials are left behind"),
    "scripts hold no expressions": of_steps("scripts hold no expressions"),
}
RUN = {"name": "Gate", "shell": "bash", "run": "plugin/bin/pytest $TESTS", "env": {"SLM_REQUIRE_GPU": "1"}}
SOUND_ACTION = {"inputs": {"tests": {"default": ""}}, "runs": {"using": "composite", "steps": [RUN, CHECKOUT_STEP]}}
FIRST, SECOND = ("runs", "steps", 0), ("runs", "steps", 1)
PLANTED_IN_THE_ACTION: list[tuple[str, Sequence[str | int], object]] = [
    ("bash runs each script", (*FIRST, "shell"), DELETED),
    ("bash runs each script", (*FIRST, "shell"), "sh"),
    ("a GPU is required", (*FIRST, "env"), {}),
    ("a GPU is required", (*FIRST, "env", "SLM_REQUIRE_GPU"), "0"),
    ("no token is on our machines", (*FIRST, "env", "T"), "${{ github.token }}"),
    ("no token is on our machines", ("inputs", "token"), {"default": "${{ github.token }}"}),
    ("no token is on our machines", (*FIRST, "env", "GH_TOKEN"), "${{ inputs.tests }}"),
    ("actions are pinned", (*SECOND, "uses"), "actions/checkout@v5"),
    ("actions are pinned", (*SECOND, "uses"), "./.github/actions/other"),
    ("no credentials are left behind", (*SECOND, "with"), {}),
    ("scripts hold no expressions", (*FIRST, "run"), "pytest ${{ inputs.tests }}"),
]


@pytest.mark.parametrize("rule", ACTION_RULES)
def test_the_action_keeps_the_rule(rule: str) -> None:
    assert ACTION_RULES[rule](read(ACTION)) == ACTION_RULES[rule](SOUND_ACTION) == []


@pytest.mark.parametrize(("rule", "where", "what"), PLANTED_IN_THE_ACTION)
def test_a_violation_planted_in_the_action_is_found(rule: str, where: Sequence[str | int], what: object) -> None:
    assert ACTION_RULES[rule](planted(where, what, SOUND_ACTION)) != []


def test_every_rule_was_tried_on_the_action() -> None:
    assert {rule for rule, _, _ in PLANTED_IN_THE_ACTION} == ACTION_RULES.keys()


def test_the_workflow_has_the_inputs_of_the_action_and_hands_each_on() -> None:
    workflow, action = read(FOLDER / "gate.yml"), read(ACTION)
    there = {name: dict(each) for name, each in workflow["on"]["workflow_call"]["inputs"].items()}
    del there["runner"]
    for each in there.values():
        assert each.pop("type") == "string"
    assert there == action["inputs"]
    (used,) = (step for step in workflow["jobs"]["gate"]["steps"] if step["uses"] == STEPS_OF_THE_GATE)
    assert used["with"] == {name: f"${{{{ inputs.{name} }}}}" for name in action["inputs"]}


def test_what_the_action_gives_is_what_its_steps_leave() -> None:
    action = read(ACTION)
    (gate,) = (step for step in action["runs"]["steps"] if step.get("id") == "gate")
    given = {name: each["value"] for name, each in action["outputs"].items()}
    assert (given.pop("records"), given.pop("page")) == (gate["env"]["SLM_RECORDS"], gate["env"]["SLM_HTML"])
    assert given == {name: f"${{{{ steps.gate.outputs.{name} }}}}" for name in ("status", "verdict")}
    for name in given:
        assert f'"{name}=$' in gate["run"]


# All workflows


def test_these_and_no_others_use_our_own_machines() -> None:
    assert tuple(path.name for path in WORKFLOWS if any(jobs(read(path), own=True))) == OURS


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_workflow_reads_only_has_limits_and_names_versions(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"} and without_limit(workflow) == []
    used = {step["uses"] for _, step in steps(workflow) if "uses" in step} - {STEPS_OF_THE_GATE}
    assert used
    assert [u for u in used if not re.search(r"@(v\d+|release/v\d+|[0-9a-f]{40})$", u)] == []


def test_a_pinned_action_has_one_commit_and_says_which_version_it_is() -> None:
    found = {line for p in WORKFLOWS for line in re.findall(r"uses: (\S+@[0-9a-f]{40}.*)", p.read_text("utf-8"))}
    assert all(re.search(r" # v\d+\.\d+\.\d+$", line) for line in found)
    assert len(found) == len({line.split("@")[0] for line in found}) > 0


def test_one_job_stands_for_all_of_ci() -> None:
    everything = read(FOLDER / "ci.yml")["jobs"]
    (required,) = (job for job in everything.values() if job.get("if") == "always()")
    assert {*required["needs"]} == {name for name, job in everything.items() if job is not required}


def test_the_gate_may_do_what_its_jobs_need() -> None:
    found = {
        path: {name: job["permissions"] for name, job in read(FOLDER / path)["jobs"].items()}
        for path in ("upgrade-gate.yml", "gate.yml")
    }
    assert found == {
        "upgrade-gate.yml": {"release": {"contents": "read", "issues": "read"}, "gate": FOR_THE_GATE},
        "gate.yml": {"gate": {"contents": "read"}, "report": {"issues": "write"}},
    }


def test_what_calls_the_gate_gives_it_inputs_that_it_has() -> None:
    (job,) = (job for _, job in callers(read(FOLDER / "upgrade-gate.yml")))
    inputs = read(FOLDER / "gate.yml")["on"]["workflow_call"]["inputs"]
    assert job["with"].keys() <= inputs.keys()
    assert {name for name, each in inputs.items() if each.get("required")} <= job["with"].keys()


# The scripts of the steps, with commands that only take notes


@pytest.fixture
def step(tmp_path: Path) -> Step:
    return Step(tmp_path)


def gated(step: Step, status: int, **inputs: str) -> Ran:
    (step.folder / "gate").mkdir(exist_ok=True)
    step.files["CALLED"].write_text("", "utf-8")
    step.command(
        step.temp / "plugin/bin/pytest", f'echo "# Gate" | tee gate/gate.json >> "$GITHUB_STEP_SUMMARY"\nexit {status}'
    )
    return step.act("Gate", inputs)


def test_a_caller_names_tests_models_and_loads(step: Step) -> None:
    asked = {"tests": "tests/gpu\n-k gate", "models": "Qwen/Qwen3-0.6B,models/mine", "concurrency": "8,256"}
    words = "pytest tests/gpu -k gate --slm-models=Qwen/Qwen3-0.6B,models/mine --slm-concurrency=8,256 --slm-gpu"
    assert gated(step, 0, **asked).called.startswith(words)
    assert gated(step, 0).called.startswith("pytest --pyargs pytest_slmserve.benchmarks --slm-gpu --slm-gate")
    assert gated(step, 0, tests="").called.startswith("pytest --slm-gpu --slm-gate")


@pytest.mark.parametrize(
    ("status", "level", "verdict"), [(0, "notice", "passes"), (1, "error", "fails"), (10, "error", "inconclusive")]
)
def test_the_gate_ends_as_pytest_does_and_tells_its_status(step: Step, status: int, level: str, verdict: str) -> None:
    ran = gated(step, status)
    assert (ran.status, ran.outputs) == (status, f"status={status}\nverdict={verdict}\n")
    assert f"::{level}::{verdict}, 0.27.0 against 0.26.0" in ran.printed
    assert (step.folder / "gate/summary.md").read_text("utf-8") == "# Gate\n"
    assert (
        f"--slm-gate --junitxml=gate/junit.xml --slm-side=baseline:python={step.temp}/vllm-0.26.0/bin/python"
        in ran.called
    )
    assert f"--slm-side=candidate:python={step.temp}/vllm-0.27.0/bin/python" in ran.called


@pytest.mark.parametrize("status", [2, 3, 4, 5, 137])
def test_what_is_no_verdict_fails_the_job_and_tells_no_status(step: Step, status: int) -> None:
    ran = gated(step, status)
    assert (ran.status, ran.outputs) == (status, "") and "::error::no verdict" in ran.printed
    assert ("the gate was broken off" in ran.printed) is (status == 3)


@pytest.mark.parametrize(
    ("slower", "status", "verdict"), [("", 0, "passes"), ("--slm-simulate-slowdown=5%", 1, "fails")]
)
def test_the_gate_is_rehearsed_in_somebodys_repository(step: Step, slower: str, status: int, verdict: str) -> None:
    """The steps of the action as scripts, on a simulated engine, with models and margin of its pyproject.toml."""
    pytest.importorskip("jinja2", reason="a page needs Jinja2")
    (step.folder / "gate").mkdir()
    (step.folder / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\nslm_models = ["opt-1.3b"]\nslm_concurrency = ["64"]\nslm_input_len = "64"\n',
        "utf-8",
    )
    step.command(step.temp / "plugin/bin/pytest", REHEARSED)
    variables = {"PYTHON": sys.executable, "PYTHONPATH": str(CHECKOUT), "SLOWER": slower}
    ran = step.act("Gate", {"tests": put(step.folder, "test_gate")}, **variables)
    assert (ran.status, ran.outputs) == (status, f"status={status}\nverdict={verdict}\n"), ran.printed
    left = {path.name for path in (step.folder / "gate").iterdir()}
    assert left >= {"records.jsonl.gz", "page.html", "junit.xml", "summary.md", "gate.json"}
    summary = (step.folder / "gate/summary.md").read_text("utf-8")
    assert f"opt-1.3b: {'FAIL' if status else 'PASS'}" in summary and "output tokens/s" in summary
    assert "opt-125m" not in summary, "the models are those of the repository"
    told = reported(step, str(status), text="")
    assert told.status == 0 and "output tokens/s" in (step.folder / "body.md").read_text("utf-8")
    assert "\ufffd" not in (step.folder / "body.md").read_text("utf-8"), "of ours all is seen"


def reported(step: Step, status: str = "1", known: str = "", text: str = "# Gate\n", pull: str = "") -> Ran:
    (step.folder / "gate").mkdir(exist_ok=True)
    if text:
        (step.folder / "gate/summary.md").write_text(text, "utf-8")
    (step.folder / "listing").write_text(known, "utf-8")
    url = "https://example.org/o/r/issues/7"
    reply = f'case "$1 $2" in "issue create") echo {url} ;; "api --paginate") cat listing ;; esac'
    step.command(step.bin / "gh", reply)
    names = {"GH_REPO": "o/r", "BASELINE": "0.26.0", "CANDIDATE": "0.27.0", "RUN": "https://example.org/run/1"}
    return step.run(script_of("report", "Write the issue"), STATUS=status, PULL=pull, **names)


def test_on_a_pull_request_the_result_is_a_comment_and_no_issue(step: Step) -> None:
    ran = reported(step, pull="12")
    assert ran.status == 0 and ran.called == "gh issue comment 12 --body-file body.md\n"


@pytest.mark.parametrize(
    ("status", "said", "last"),
    [("0", "passes", "close 7"), ("1", "fails", "reopen 7"), ("10", "is inconclusive", "reopen 7")],
)
def test_a_result_becomes_an_issue_which_a_pass_closes(step: Step, status: str, said: str, last: str) -> None:
    ran = reported(step, status)
    assert ran.status == 0, ran.printed
    assert "gh issue create --title vLLM 0.27.0: gate --label vllm-gate --body-file body.md\n" in ran.called
    assert ran.called.endswith(f"gh issue {last}\n")
    body = (step.folder / "body.md").read_text("utf-8")
    assert body == f"vLLM 0.27.0 {said} against 0.26.0. [Log and records](https://example.org/run/1)\n\n# Gate\n"


def test_a_further_result_of_a_release_is_a_comment(step: Step) -> None:
    ran = reported(step, known="3\tvLLM 0.27.0: gated\n4\tvLLM 0.27.0: gate\n5\tvLLM 0.27.01: gate\n")
    assert ran.status == 0 and "issue create" not in ran.called
    assert "gh issue comment 4 --body-file body.md\n" in ran.called and ran.called.endswith("gh issue reopen 4\n")


def test_the_text_of_an_issue_is_cut_and_calls_nobody(step: Step) -> None:
    ran = reported(step, text="@everyone $(touch harm) `touch harm` é\n" + "x" * 100_000)
    body = (step.folder / "body.md").read_text("utf-8")
    assert ran.status == 0 and len(body) < 65_000 and not (step.folder / "harm").exists()
    assert "@everyone" not in body and "@\u200beveryone $(touch harm) `touch harm` é\n" in body


def test_a_text_that_is_no_text_is_written_all_the_same(step: Step) -> None:
    (step.folder / "gate").mkdir()
    (step.folder / "gate/summary.md").write_bytes(b"caf\xe9\n")
    assert reported(step, text="").status == 0
    assert (step.folder / "body.md").read_text("utf-8").endswith("caf\ufffd\n")


def test_a_link_in_place_of_the_text_is_not_read(step: Step) -> None:
    (step.folder / "gate").mkdir()
    (step.folder / "gate/summary.md").symlink_to("/proc/self/environ")
    ran = reported(step, text="")
    assert ran.status != 0 and ran.called == "" and not (step.folder / "body.md").exists()


@pytest.mark.parametrize("status", ["", "4", "0; true", "pass"])
def test_what_is_no_status_writes_no_issue(step: Step, status: str) -> None:
    ran = reported(step, status)
    assert ran.status == 1 and ran.called == "" and "::error::no verdict" in ran.printed


def test_each_release_has_an_environment_of_its_own_and_says_what_is_in_it(step: Step) -> None:
    step.environments(pip='echo "installed: ${0%/bin/pip}"')
    ran = step.act(INSTALL, {})
    assert ran.status == 0, ran.printed
    assert [line for line in ran.called.splitlines() if "vllm==" in line] == [
        "pip install --only-binary vllm vllm==0.26.0",
        "pip install --only-binary vllm vllm==0.27.0",
    ]
    assert "vllm-0.27.0" in (step.folder / "gate/vllm-0.27.0.txt").read_text("utf-8")


@pytest.mark.parametrize(
    "plugin", ["pytest-slmserve", ".", f"git+https://example.org/o/r@{SHA}", f"pytest-slmserve @ git+https://o/r@{SHA}"]
)
def test_the_plugin_is_what_pip_takes_and_gets_its_extra_by_name(step: Step, plugin: str) -> None:
    step.environments()
    ran = step.act(INSTALL, {"plugin": plugin})
    assert ran.status == 0, ran.printed
    assert ran.called.startswith(
        f"python3 -m venv --clear {step.temp}/plugin\npip install -- {plugin}\npip install pytest-slmserve[report]\n"
    )


def test_without_a_plugin_that_of_the_action_is_installed(step: Step) -> None:
    """It is on no index yet, and its commit is the one that the caller has read."""
    step.environments()
    called = step.act(INSTALL, {}).called.splitlines()
    installed = next(line for line in called if line.startswith("pip install")).removeprefix("pip install -- ")
    assert Path(installed).resolve() == CHECKOUT and (CHECKOUT / "pyproject.toml").is_file()


def test_the_nightly_run_takes_the_release_in_use(step: Step) -> None:
    step.environments()
    (step.folder / ".github").mkdir()
    (step.folder / ".github/vllm-baseline.txt").write_text("0.26.0\n", "utf-8")
    (install,) = (
        s["run"] for s in read(FOLDER / "gpu.yml")["jobs"]["sweep"]["steps"] if "Install" in s.get("name", "")
    )
    ran = step.run(install)
    assert ran.status == 0 and "pip install --only-binary vllm vllm==0.26.0\n" in ran.called
    assert step.files["GITHUB_ENV"].read_text("utf-8") == f"SLM_PYTHON={step.temp}/vllm-0.26.0/bin/python\n"
