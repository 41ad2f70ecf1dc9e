"""Workflows and the action as data, and the scripts of their steps, run with commands that only take notes."""

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from scripts import CHECKOUT, needs_checkout

FOLDER = CHECKOUT / ".github" / "workflows"
ACTION = CHECKOUT / ".github" / "actions" / "gate" / "action.yml"
needs_checkout()

INSTALL = "Install the plugin, and each release into an environment of its own"
RELEASES = {"baseline": "0.26.0", "candidate": "0.27.0"}
# The gate's pytest, on the simulated engine; SLOWER: further arguments.
REHEARSED = """
words=()
for word in "$@"; do
  case $word in
    --slm-gpu) words+=(--slm-simulate) ;;
    --slm-*-python=*) ;;
    *) words+=("$word") ;;
  esac
done
exec "$PYTHON" -m pytest -p no:cacheprovider "${words[@]}" $SLOWER
"""


def read(path: Path) -> dict[str, Any]:
    loaded = yaml.safe_load(path.read_text("utf-8"))
    return {"on": loaded.pop(True, None), **loaded}  # YAML 1.1 reads the key `on` as true


def script_of(job: str, name: str, workflow: str = "gate.yml") -> str:
    (found,) = (each for each in read(FOLDER / workflow)["jobs"][job]["steps"] if each.get("name") == name)
    text: str = found["run"]
    return text


@dataclass(frozen=True, slots=True)
class Ran:
    """How a step ended, what it printed and put into its outputs, and how the commands were called."""

    status: int
    printed: str
    outputs: str
    called: str


class Step:
    """The script of a step, in an empty folder. command: puts a script of bash where the step finds it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temp, self.bin = folder / "work", folder / "temp", folder / "bin"
        for path in (self.folder, self.temp, self.bin):
            path.mkdir()
        self.files = {name: folder / name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "GITHUB_ENV", "CALLED")}
        for path in self.files.values():
            path.touch()

    def command(self, path: Path, script: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/usr/bin/env bash\necho "{path.name} $*" >> "$CALLED"\n{script}\n', "utf-8")
        path.chmod(0o755)

    def environments(self, pip: str = "") -> None:
        """Puts a python3 there that makes environments, with this script as the pip of each."""
        self.command(self.bin / "pip", pip)
        self.command(self.bin / "python3", f'mkdir -p "${{@: -1}}/bin" && cp "{self.bin / "pip"}" "${{@: -1}}/bin/pip"')

    def run(self, script: str, **variables: str) -> Ran:
        fixed = {name: str(path) for name, path in self.files.items()}
        env = {"PATH": f"{self.bin}:{os.environ['PATH']}", "RUNNER_TEMP": str(self.temp), "LC_ALL": "C.UTF-8"}
        bash = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script]
        done = subprocess.run(bash, cwd=self.folder, env={**env, **fixed, **variables}, capture_output=True, text=True)
        outputs, called = (self.files[name].read_text("utf-8") for name in ("GITHUB_OUTPUT", "CALLED"))
        return Ran(done.returncode, done.stdout + done.stderr, outputs, called)

    def act(self, name: str, inputs: Mapping[str, str], **variables: str) -> Ran:
        """The action's step of this name, with the environment that it has by these inputs."""
        action = read(ACTION)
        given = {key: each.get("default", "") for key, each in action["inputs"].items()} | RELEASES | inputs
        (found,) = (each for each in action["runs"]["steps"] if each["name"] == name)
        variables["GITHUB_ACTION_PATH"] = str(ACTION.parent)
        for key, text in found["env"].items():
            variables[key] = re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda m: given[m[1]], text)
        return self.run(found["run"], **variables)
