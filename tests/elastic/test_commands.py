"""`sparsecomm lighthouse`, the example and its configuration, as a user runs them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_sparsecomm.commands import main
from lightning_sparsecomm.commands.lighthouse import _address
from lightning_sparsecomm.commands.replay import _start, replay
from lightning_sparsecomm.elastic.replay import REPLICA
from lightning_sparsecomm.elastic.script import Script
from tests.elastic.replicas import lighthouse, needs_torchft

pytestmark = [
    needs_torchft,
    pytest.mark.timeout(300),
]

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_lighthouse_serves_until_it_is_interrupted() -> None:
    command = [sys.executable, "-m", "lightning_sparsecomm", "lighthouse"]
    # Where these tests run in the background, interrupts are ignored, and a child inherits that.
    options: dict[str, Any] = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen([*command, "--bind=127.0.0.1:0"], stdout=subprocess.PIPE, text=True, **options) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    assert re.fullmatch(r"lighthouse at http://\S+:\d+, until interrupted\n", line)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--min-replicas=0", "--min-replicas must be at least 1; got 0"),
        ("--min-replicas=99999999999999999999", "--min-replicas and the timeouts must be numbers that 64 bits hold"),
        ("--join-timeout=5", "--join-timeout must be a time with its unit"),
        ("--heartbeat-timeout=0s", "--heartbeat-timeout must be at least 100ms"),
        ("--bind=999.0.0.1:0", "--bind must be an address of this machine with a free port"),
    ],
)
def test_a_lighthouse_that_cannot_serve_says_why(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["lighthouse", option])
    assert raised.value.code == 2
    assert words in capsys.readouterr().err


def test_what_a_replicas_command_has_started_ends_with_it(tmp_path: Path) -> None:
    script = "sleep 1000 & echo $! > child; wait"
    process = _start({REPLICA: "a:1"}, ["bash", "-c", f"cd {tmp_path}; {script}"])
    written = tmp_path / "child"
    while not (written.exists() and written.read_text()):
        time.sleep(0.01)
    process.kill()
    process.wait()
    child = Path("/proc") / written.read_text().strip() / "stat"
    # Gone, or without a parent that looks after the dead.
    while child.exists() and child.read_text().split()[2] != "Z":
        time.sleep(0.01)


def test_what_a_command_that_has_ended_has_left_running_ends_too(tmp_path: Path) -> None:
    written = tmp_path / "child"
    command = ["bash", "-c", f"sleep 1000 & echo $! > {written}; exit 0"]
    script = Script("a:1", [], [], "", [])
    ends = replay([script], lambda environment: _start(environment, command))
    assert ends.keys() == {"a:1"}
    child = Path("/proc") / written.read_text().strip() / "stat"
    while child.exists() and child.read_text().split()[2] != "Z":
        time.sleep(0.01)


def _run(script: str, *arguments: str, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    finished = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


@pytest.mark.slow
def test_the_example_trains(tmp_path: Path) -> None:
    with lighthouse() as address:
        output = _run("elastic.py", f"--lighthouse={address}", "--replica=a", "--steps=40", folder=tmp_path)
    assert "after 40 steps and 3 rounds" in output
    assert "sparsecomm: after round 0, a joined; 1 replica from now on" in output


@pytest.mark.slow
@needs_torchft
def test_the_example_is_made_again_from_its_log(tmp_path: Path) -> None:
    with lighthouse() as address:
        _run("elastic.py", f"--lighthouse={address}", "--steps=40", "--log=members.jsonl", folder=tmp_path)
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    example = [sys.executable, str(EXAMPLES / "elastic.py")]
    command = [sys.executable, "-m", "lightning_sparsecomm", "replay", "members.jsonl", "--", *example]
    # Another length of the run is another run.
    for steps, code, words in (("40", 0, "ended with the same bits as in the log"), ("60", 1, "must do what the log")):
        finished = subprocess.run(
            [*command, "--steps", steps], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert finished.returncode == code, finished.stdout + finished.stderr
        assert words in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["none.jsonl", "--", "true"],
            "LOG must be a file that membership_log has written; got 'none.jsonl': [Errno 2]",
        ),
        (["log.jsonl"], "COMMAND must be what starts a replica; got none"),
        (
            ["log.jsonl", "--", "true"],
            "membership_log has written; line 1 of 'log.jsonl' is 'no'",
        ),
    ],
)
def test_a_replay_that_cannot_be_says_why(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("log.jsonl").write_text("no\n")
    with pytest.raises(SystemExit) as ended:
        main(["replay", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_replay_that_is_told_to_end_leaves_no_replica_behind(tmp_path: Path) -> None:
    with lighthouse() as address:
        _run("elastic.py", f"--lighthouse={address}", "--steps=40", "--log=members.jsonl", folder=tmp_path)
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    command = [sys.executable, "-m", "lightning_sparsecomm", "replay", "members.jsonl"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    with subprocess.Popen(
        [*command, "--", sys.executable, "-c", script], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        replica = int(process.stdout.readline().rpartition("| ")[2])
        process.terminate()
        assert process.wait() == 1
    with pytest.raises(ProcessLookupError):
        os.kill(replica, 0)


@pytest.mark.slow
def test_the_configuration_trains(tmp_path: Path) -> None:
    config = f"--config={EXAMPLES / 'configs' / 'elastic.yaml'}"
    with lighthouse() as address:
        given = [f"--trainer.strategy.init_args.lighthouse={address}", "--trainer.max_steps=40"]
        _run("cli.py", "fit", config, *given, folder=tmp_path)
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert "sparsecomm/residual_norm" in metrics.read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("bound", "shown"),
    [
        ("[::]:29510", "http://here:37717"),
        ("0.0.0.0:0", "http://here:37717"),
        ("127.0.0.2:0", "http://127.0.0.2:37717"),
        ("[::1]:0", "http://[::1]:37717"),
    ],
)
def test_the_lighthouse_names_where_it_listens(bound: str, shown: str) -> None:
    assert _address(bound, "http://here:37717") == shown
