"""The files of a release: one version, a README that works on a package index, no strays in wheel and sdist."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import lightning_sparsecomm

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
SOURCE = re.findall(r'^Source = "(.*)"$', PROJECT, re.MULTILINE)[0]
BLOB = f"{SOURCE}/blob/main/"
RAW = f"{SOURCE.replace('github.com', 'raw.githubusercontent.com')}/main/"


def test_the_version_is_the_same_everywhere() -> None:
    version = lightning_sparsecomm.__version__
    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert 'dynamic = ["version"]' in PROJECT


def test_the_readme_is_short_and_begins_with_the_installation() -> None:
    assert len(README.split()) <= 1000
    assert re.findall(r"```\w*\n(.*?)```", README, re.DOTALL)[0] == "pip install lightning-sparsecomm\n"


def test_the_readme_links_work_on_a_package_index() -> None:
    """They are absolute, and name files of this checkout."""
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", README)
    ours = [(image, link) for image, link in links if link.startswith((BLOB, RAW))]
    assert len(ours) > 10
    assert [link for _, link in links if not link.startswith("https://")] == []
    for image, link in ours:
        assert link.startswith(RAW if image else BLOB)
        path, _, anchor = link.removeprefix(RAW).removeprefix(BLOB).partition("#")
        assert (ROOT / path).exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], link


@pytest.mark.parametrize("name", ["CITATION.cff", "SECURITY.md", "RELEASING.md", ".github/ISSUE_TEMPLATE/config.yml"])
def test_other_files_name_the_same_repository(name: str) -> None:
    file = ROOT / name
    if not file.exists():
        assert name.startswith(".github"), "an sdist holds all but .github"
        return
    named = re.findall(r"https://github\.com/[\w-]+/[\w-]+", file.read_text())
    assert set(named) <= {SOURCE}
    assert named or name == "RELEASING.md"


def test_wheel_and_sdist_hold_no_strays(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="it builds the package, and is in the extra `test`")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = wheel.namelist()
    inside = {name for name in names if not re.match(r"lightning_sparsecomm-[\d.]+\.dist-info/", name)}
    assert all(re.fullmatch(r"lightning_sparsecomm/[\w/]+\.py|lightning_sparsecomm/py\.typed", each) for each in inside)
    assert "lightning_sparsecomm/py.typed" in inside
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        files = [name.partition("/")[2] for name in sdist.getnames()]
    kinds = r"py|typed|md|toml|txt|cff|yaml|yml|json|png|hex|ipynb|sbatch|gitignore"
    assert [name for name in files if not re.fullmatch(rf"LICENSE|PKG-INFO|[\w./-]*\.({kinds})", name)] == []
    tops = {name.partition("/")[0] for name in files if "/" in name}
    assert tops == {"benchmarks", "docs", "examples", "lightning_sparsecomm", "tests"}
