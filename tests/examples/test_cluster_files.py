"""examples/cluster: the manifest fits Kubernetes' schema, the batch script bash and SLURM, and both the guide."""

import importlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from pytorch_lightning.plugins.environments import SLURMEnvironment

from tests.examples.test_restarts import ROOT, commands

CLUSTER = ROOT / "examples" / "cluster"
SCHEMA: dict[str, Any] = json.loads(Path(__file__).with_name("kubernetes-schema.json").read_text(encoding="utf-8"))
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}


def problems(item: Any, schema: dict[str, Any], where: str) -> list[str]:
    """Where an item does not fit a schema that uses only the keywords of the one in this folder."""
    while "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    kind = schema.get("type")
    if kind is not None and (not isinstance(item, TYPES[kind]) or (isinstance(item, bool) and kind != "boolean")):
        return [f"{where} must be of type {kind}; got {item!r}"]
    found = [f"{where} must have {name}" for name in schema.get("required", []) if name not in item]
    if kind == "array":
        for number, each in enumerate(item):
            found += problems(each, schema["items"], f"{where}[{number}]")
    if kind == "object":
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        for name, each in item.items():
            if name in known or others is not False:
                found += problems(each, known.get(name, others), f"{where}.{name}")
            else:
                found.append(f"{where} must not have {name}")
    return found


def manifest() -> dict[str, dict[str, Any]]:
    """The objects, by kind."""
    text = (CLUSTER / "pytorchjob.yaml").read_text(encoding="utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def checked(item: dict[str, Any]) -> list[str]:
    name = SCHEMA["kinds"][f"{item['apiVersion']} {item['kind']}"]
    return problems(item, {"$ref": f"#/definitions/{name}"}, item["kind"])


def test_the_manifest_fits_the_schema() -> None:
    objects = manifest()
    assert sorted(objects) == ["Deployment", "PyTorchJob", "Service"]
    assert [problem for each in objects.values() for problem in checked(each)] == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda spec: spec["elasticPolicy"].update(maxReplicas="4"), ".maxReplicas must be of type integer"),
        (lambda spec: spec["elasticPolicy"].update(nnodes=4), "elasticPolicy must not have nnodes"),
        (lambda spec: spec.update(nprocPerNode=1), "nprocPerNode must be of type string"),
        (lambda spec: spec.pop("pytorchReplicaSpecs"), "spec must have pytorchReplicaSpecs"),
        (
            lambda spec: spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["env"].append({}),
            "containers[0].env[1] must have name",
        ),
        (lambda spec: spec["elasticPolicy"]["rdzvConf"][0].update(value=0), "rdzvConf[0].value must be of type string"),
    ],
)
def test_the_schema_finds(change: Any, problem: str) -> None:
    job = manifest()["PyTorchJob"]
    change(job["spec"])
    (found,) = checked(job)
    assert problem in found


def test_the_manifest_starts_what_the_guide_starts() -> None:
    objects = manifest()
    service, store, job = (objects[kind] for kind in ("Service", "Deployment", "PyTorchJob"))
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert (policy["rdzvHost"], policy["rdzvPort"]) == (
        service["metadata"]["name"],
        service["spec"]["ports"][0]["port"],
    )
    assert service["spec"]["selector"] == store["spec"]["template"]["metadata"]["labels"]
    assert store["spec"]["selector"]["matchLabels"] == store["spec"]["template"]["metadata"]["labels"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    mounts = [mount["name"] for mount in container["volumeMounts"]]
    assert mounts == [volume["name"] for volume in worker["template"]["spec"]["volumes"]]

    guide = commands()
    (serving,) = store["spec"]["template"]["spec"]["containers"]
    assert serving["command"] == shlex.split(guide["store"])
    setting, *words = shlex.split(guide["node"].replace("\\\n", " "))
    assert {setting} == {f"{each['name']}={each['value']}" for each in container["env"]}
    assert [words[0], words[-1]] == container["command"][:2]
    options = dict(word.removeprefix("--").split("=", 1) for word in words[1:-1])
    assert options["nnodes"] == f"{policy['minReplicas']}:{policy['maxReplicas']}"
    assert options["nproc-per-node"] == job["spec"]["nprocPerNode"]
    assert int(options["max-restarts"]) == policy["maxRestarts"]
    assert options["rdzv-backend"] == policy["rdzvBackend"] and options["rdzv-id"] == policy["rdzvId"]
    known = {pair.partition("=")[0] for pair in options["rdzv-conf"].split(",")}
    assert {pair["key"] for pair in policy["rdzvConf"]} <= known


def test_the_batch_script() -> None:
    path = CLUSTER / "sparsecomm.sbatch"
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#!/bin/bash\n")
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert len(directives) == text.count("#SBATCH")
    # SLURM reads none below the first command.
    head = re.split(r"^[^#\n]", text, maxsplit=1, flags=re.MULTILINE)[0]
    assert head.count("#SBATCH") == len(directives)
    assert set(directives) == {
        *("job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "requeue", "open-mode", "output", "signal")
    }
    name, _, seconds = directives["signal"].partition("@")
    assert int(seconds) > 0
    requeue = SLURMEnvironment().requeue_signal
    # None: Lightning's own default, which is this one.
    assert requeue is None or requeue.name == name
    assert name == "SIGUSR1"
    (started,) = re.findall(r"^srun .*$", text, re.MULTILINE)
    script = next(word for word in shlex.split(started) if word.endswith(".py"))
    assert (ROOT / script).is_file()


# Stand-ins for SLURM's commands: one starts the ranks, and writes down their process ids; the other how it was called.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = [word for word in sys.argv[1:] if word != "--kill-on-bad-exit=1"]
assert words.pop(0) == "python"
ranks = []
for rank in ("0", "1"):
    environment = os.environ | {{"SLURM_PROCID": rank, "SLURM_NODEID": rank, "SLURM_LOCALID": "0"}}
    ranks.append(subprocess.Popen([sys.executable, *words], env=environment))
with open("ranks.new", "w") as file:
    file.write(" ".join(str(rank.pid) for rank in ranks))
os.rename("ranks.new", "ranks")
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""
SCONTROL = """#!/bin/sh
echo "$@" >> called
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_batch_script_is_requeued_and_goes_on(tmp_path: Path) -> None:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    job = {"JOB_ID": "17", "JOB_NAME": "digits", "NODELIST": "localhost", "NTASKS": "2", "NNODES": "2"}
    environment = os.environ | {f"SLURM_{name}": value for name, value in job.items()}
    environment |= {"SLURM_NTASKS_PER_NODE": "1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    environment |= {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = ["bash", str(CLUSTER / "sparsecomm.sbatch")]
    checkpoints, ranks = tmp_path / "checkpoints", []

    def wait(path: Path) -> None:
        deadline = time.monotonic() + 300
        while not path.exists():
            assert time.monotonic() < deadline and started.poll() is None, log.read_text()
            time.sleep(0.1)

    log = tmp_path / "log"
    with log.open("wb") as file:
        started = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait(checkpoints / "last.ckpt")
        ranks = [int(pid) for pid in (tmp_path / "ranks").read_text().split()]
        for pid in ranks:
            os.kill(pid, signal.SIGUSR1)
        wait(tmp_path / "called")
    finally:
        # As SLURM does once the job's time is up.
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        started.wait()
    assert (tmp_path / "called").read_text() == "requeue 17\n"
    assert len(list(checkpoints.glob("hpc_ckpt_1.ckpt.sparsecomm/rank_*"))) == 2
    # Of both, the script takes the newest.
    newest = max(checkpoints.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    again = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output = again.stdout.decode()
    assert again.returncode == 0, output
    assert f"sparsecomm: resumed from checkpoints/{newest.name}, with what ranks had not sent yet" in output
    assert re.search(r"^accuracy 9\d\.\d% after 1000 steps, on 2 nodes in the end$", output, re.MULTILINE), output


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "3"}, (2, 3)),
        ({"SLURM_NTASKS_PER_NODE": "4", "SLURM_NNODES": "2"}, (4, 2)),
    ],
    ids=["torchrun", "SLURM"],
)
def test_the_example_reads_how_many_there_are(
    environment: dict[str, str], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    restarts = importlib.import_module("restarts")
    for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="Start this by torchrun"):
        restarts.world()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert restarts.world() == expected
