"""The programs of MPS for tests: `install` puts them into a folder, and they do what files beside them say.

clients: process ids, one a line; a server is started when the first is there, as the real one is at the first client
fail:     the daemon prints the text, and ends
mute:     the daemon lives, and never opens its socket
deaf:     the control program hangs
stubborn: the daemon hears neither quit nor SIGTERM
stray:    servers leave the daemon's process group
"""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

CONTROL, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"


def install(folder: Path, patch: Any) -> Path:
    """Both programs, in `folder`, run by our interpreter: first on the PATH, and none of a driver beside them. patch:
    pytest's."""
    folder.mkdir()
    patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    patch.setattr("pytest_slmserve.engines.pool.DRIVER_FOLDER", "/nowhere")
    for name in (CONTROL, SERVER):
        program = folder / name
        program.write_text(f"#!{sys.executable} -IS\n{Path(__file__).read_text('utf-8')}", "utf-8")
        program.chmod(0o755)
    return folder


class Daemon:
    def __init__(self, told: Path) -> None:
        self.told = told
        self.servers: list[int] = []
        self.pipe, logs = (Path(os.environ[f"CUDA_MPS_{name}_DIRECTORY"]) for name in ("PIPE", "LOG"))
        self.log = logs / "control.log"
        self.say(f"Starting control daemon using socket {self.pipe}/control")

    def say(self, line: str) -> None:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"[Control {os.getpid()}] {line}\n")

    def serve(self) -> None:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(self.pipe / "control"))
            door.listen()
            (self.pipe / f"{CONTROL}.pid").write_text(str(os.getpid()), "utf-8")
            while True:
                client, _ = door.accept()
                with client:
                    client.sendall(self.answer(client.recv(1000).decode().strip()).encode())

    def answer(self, command: str) -> str:
        self.say(f"heard {command}")
        match command.split():
            case ["get_server_list"]:
                if not self.servers and (self.told / "clients").exists():
                    stray = (self.told / "stray").exists()
                    self.servers.append(subprocess.Popen([self.told / SERVER], start_new_session=stray).pid)
                    self.say(f"Starting new server {self.servers[0]}")
                return "".join(f"{pid}\n" for pid in self.servers)
            case ["get_client_list", pid] if int(pid) in self.servers:
                return (self.told / "clients").read_text("utf-8")
            case ["quit"] if not (self.told / "stubborn").exists():
                for server in self.servers:
                    os.kill(server, signal.SIGTERM)
                    os.waitpid(server, 0)
                (self.pipe / f"{CONTROL}.pid").unlink()  # the socket stays, as the real one's does
                sys.exit(0)
        return f"{command}: not understood\n"


def daemon(told: Path) -> None:
    if (told / "fail").exists():
        sys.exit((told / "fail").read_text("utf-8"))
    if (told / "stubborn").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serving = Daemon(told)
    if (told / "mute").exists():
        time.sleep(60)
    serving.serve()


def ask(told: Path) -> None:
    if (told / "deaf").exists():
        time.sleep(60)
    with socket.socket(socket.AF_UNIX) as door:
        try:
            door.connect(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps") + "/control")
        except OSError:
            sys.exit("Cannot find MPS control daemon process")
        door.sendall(sys.stdin.read().encode())
        with suppress(ConnectionError):
            print(door.recv(1000).decode(), end="")


if __name__ == "__main__":
    told = Path(sys.argv[0]).parent
    if Path(sys.argv[0]).name == SERVER:
        time.sleep(60)
    elif sys.argv[1:] == ["-f"]:
        daemon(told)
    else:
        ask(told)
