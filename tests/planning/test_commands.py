"""`sparsecomm probe` and `sparsecomm doctor`."""

import json
import os
import re
from pathlib import Path

import pytest

from lightning_sparsecomm.basis.groups import destroy_all
from lightning_sparsecomm.commands import doctor, main
from tests.distributed.launch import run_ranks


def _probe(rank: int, store: str, arguments: list[str], output: str) -> None:
    import contextlib

    import torch.distributed as dist

    # As torchrun starts them: not joined yet.
    destroy_all()
    port = int(Path(store).read_text())
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
    with open(f"{output}{rank}", "w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        main(["probe", "--seconds", "0.2", *arguments])
    # The runner leaves a group when the function returns.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def probed(tmp_path: Path, *arguments: str) -> tuple[str, str]:
    import socket

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    (tmp_path / "port").write_text(str(port))
    run_ranks(tmp_path, 2, _probe, str(tmp_path / "port"), list(arguments), str(tmp_path / "out"))
    return (tmp_path / "out0").read_text(), (tmp_path / "out1").read_text()


def test_the_probe_prints_a_table_on_rank_0(tmp_path: Path) -> None:
    shown, nothing = probed(tmp_path)
    assert nothing == ""
    assert re.match(r"2 ranks\. A hop takes .*; a sum reaches .*bit/s\.", shown)
    assert re.search(r"rank 0 on \S+ +rank 1 on \S+ .*s .*bit/s", shown)
    assert "The default method computes" in shown


def test_the_probe_prints_json(tmp_path: Path) -> None:
    found = json.loads(probed(tmp_path, "--json")[0])
    assert found["collectives"].keys() == {"all_reduce", "all_gather"}
    assert [pair["ranks"] for pair in found["pairs"]] == [[0, 1]]
    assert found["slow"] == []
    assert found["coding_seconds_per_million"] > 0


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_probe_describes_a_model(tmp_path: Path, options: list[str]) -> None:
    shown, _ = probed(tmp_path, "--model", "tests.planning.test_model_layout:Tuned", *options)
    if options:
        model = json.loads(shown)["model"]
        assert model["elements"] == 603_605
        assert model["largest"][0] == {"name": "middle.weight", "shape": [600, 1000], "elements": 600_000}
    else:
        assert "The model has 603,605 parameters in 4 tensors" in shown
        assert re.search(r"Their sums take about .*s here", shown)


def test_without_a_launcher_the_probe_says_how(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        main(["probe"])
    assert re.search(r"RANK.* must be set in the environment.*torchrun", capsys.readouterr().err)


def test_ranks_that_do_not_meet_are_told_how(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist

    def failing(*arguments: object, **options: object) -> None:
        raise dist.DistStoreError("Timed out after 121 seconds waiting for clients. 1/2 clients joined.")

    monkeypatch.setattr(dist, "init_process_group", failing)
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere", "MASTER_PORT": "29500"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["probe"])
    error = capsys.readouterr().err
    assert re.search(r"reached by all 2 ranks within 120 s; got nowhere:29500, and: Timed out.*--master-addr", error)


def test_a_single_rank_has_nothing_to_probe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["probe"])
    assert re.search(r"WORLD_SIZE must be at least 2.*got 1\. .*torchrun", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("WORLD_SIZE", "abc", "WORLD_SIZE must be a whole number; got 'abc'"),
        ("RANK", "x", "RANK must be a whole number; got 'x'"),
        ("WORLD_SIZE", "-2", "WORLD_SIZE must be a whole number; got '-2'"),
        ("WORLD_SIZE", "01", "WORLD_SIZE must be at least 2"),
        ("RANK", "7", "RANK must be from 0 to WORLD_SIZE − 1; got 7, and 2 ranks"),
        ("MASTER_PORT", "http", "MASTER_PORT must be a whole number; got 'http'"),
        ("MASTER_PORT", "99999", "MASTER_PORT must be from 1 to 65535; got 99999"),
    ],
)
def test_the_probe_refuses_what_no_launcher_sets(
    name: str, value: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", name: value}
    for each, text in environment.items():
        monkeypatch.setenv(each, text)
    with pytest.raises(SystemExit):
        main(["probe"])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "-1", "inf"])
def test_the_probe_refuses_times_without_end(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["probe", "--seconds", seconds])
    assert f"--seconds must be positive, and finite; got {float(seconds)}" in capsys.readouterr().err


def test_the_doctor_refuses_what_no_launcher_sets() -> None:
    with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE must be the number of ranks.*got 'two'\. Unset it"):
        remedies(doctor.threads({"LOCAL_WORLD_SIZE": "two"}))


def test_the_probe_takes_some_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["probe", "--seconds", "0"])
    assert "--seconds must be positive, and finite; got 0.0. Leave it out for 2." in capsys.readouterr().err


def test_the_doctor_prints_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    shown = capsys.readouterr().out
    assert re.search(r"^  torch \d", shown, re.MULTILINE)
    assert re.search(r"\d+ cores; torch uses \d+ threads", shown)
    # What is marked has a remedy.
    marked = re.findall(r"^! ", shown, re.MULTILINE)
    assert len(marked) % 2 == 0


def remedies(findings: object) -> list[str]:
    return [finding.remedy for finding in findings if finding.remedy]  # type: ignore[attr-defined]


def test_too_many_threads_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: 8)
    assert remedies(doctor.threads({})) == []
    (remedy,) = remedies(doctor.threads({"LOCAL_WORLD_SIZE": "4"}))
    assert "4 ranks with 8 threads share 8 cores: set OMP_NUM_THREADS=2" in remedy


def test_an_allocator_that_keeps_memory_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert len(remedies(doctor.memory({}))) == 1
    assert remedies(doctor.memory({"MALLOC_TRIM_THRESHOLD_": "1", "MALLOC_MMAP_THRESHOLD_": "1"})) == []
    assert remedies(doctor.memory({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"})) == []


def test_a_device_that_is_not_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.socket, "if_nameindex", lambda: [(1, "lo"), (2, "ifb0"), (3, "eth0")])
    assert remedies(doctor.network({"GLOO_SOCKET_IFNAME": "eth0"})) == []
    assert "names eth1, which this machine does not have" in remedies(doctor.network({"GLOO_SOCKET_IFNAME": "eth1"}))[0]
    monkeypatch.setattr(doctor.socket, "gethostbyname", lambda _: "127.0.1.1")
    for unset in ({}, {"GLOO_SOCKET_IFNAME": ""}):
        assert "set GLOO_SOCKET_IFNAME=eth0" in remedies(doctor.network(unset))[0]
    monkeypatch.setattr(doctor.socket, "gethostbyname", lambda _: "10.0.0.7")
    assert remedies(doctor.network({})) == []
