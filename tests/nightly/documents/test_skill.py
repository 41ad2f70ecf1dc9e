"""The skill for agents: its form is that of agentskills.io, each of its commands runs on the simulated engine in an
empty folder, and each field of JSON that it names is there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from pages import fences
from scripts import CHECKOUT, needs_checkout
from workflow_steps import yaml

needs_checkout()
SKILL = CHECKOUT / "skills" / "gate-vllm" / "SKILL.md"
OURS = {"pytest": "pytest -p no:cacheprovider", "slmserve": "pytest_slmserve"}


def test_skill_has_agent_form() -> None:
    _, front, body = SKILL.read_text("utf-8").split("---\n", 2)
    facts = yaml.safe_load(front)
    assert facts.keys() == {"name", "description", "license", "compatibility"} and facts["name"] == SKILL.parent.name
    assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", facts["name"]) and len(facts["name"]) <= 64
    assert 0 < len(facts["description"]) <= 1024 and len(facts["compatibility"]) <= 500
    assert body.startswith("\n# ")


def test_skill_commands_run(tmp_path: Path) -> None:
    """The doctor is right to find no GPU, so its status tells nothing; the side that is slower is 5% slower."""
    text = SKILL.read_text("utf-8")
    for release in ("v24", "v25", "v26"):
        (tmp_path / release / "bin").mkdir(parents=True)
        (tmp_path / release / "bin" / "python").symlink_to(sys.executable)
    for name, words in OURS.items():
        script = tmp_path / "ours" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m {words} "$@"\n', "utf-8")
        script.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLM_", "GITHUB_"))}
    env = kept | {"PATH": f"{tmp_path}/ours:{os.environ['PATH']}", "PYTHONPATH": str(CHECKOUT)}
    statuses = []
    for kind, block in fences(text):
        if kind != "sh":
            (tmp_path / kind.removeprefix("json ")).write_text(json.dumps(json.loads(block)), "utf-8")
            continue
        for command in block.splitlines():
            line = command.replace("--slm-gpu", "--slm-simulate")
            done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True)
            assert done.returncode in (0, 1, 10) and "Traceback" not in done.stderr, (line, done.stdout, done.stderr)
            statuses.append((command.split()[0], done.returncode))
    assert [status for name, status in statuses if name == "pytest"] == [0, 0], statuses
    verdict = json.loads((tmp_path / "verdict.json").read_text("utf-8"))
    named = re.findall(r"`(gates\[0\][\w.\[\]]+)`", text)
    assert len(named) > 10
    for path in named:
        value = verdict
        for key, number in re.findall(r"(\w+)|\[(\d+)\]", path):
            value = value[key] if key else value[int(number)]
    assert verdict["gates"] == json.loads((tmp_path / "gate/gate.json").read_text("utf-8"))
    assert verdict["gates"][0]["outcome"] == "pass" and verdict["gates"][0]["gated"][0]["ratio"].keys() >= {
        "low",
        "high",
    }
    assert json.loads((tmp_path / "bisect.json").read_text("utf-8"))["suspects"] == []
