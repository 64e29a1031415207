"""docs/embedding_kind.md, applied to a copy of the repository: its kind works throughout."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from documentation import runnable
from runs import REPOSITORY

PAGE = (REPOSITORY / "docs/embedding_kind.md").read_text()
NEW_FILES = ("leviathan/config/embeddings/hashed.py", "leviathan/model/embeddings/hashed.py")


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A copy in which every block of the page has been carried out."""
    copy = tmp_path_factory.mktemp("changed")
    for name in ("leviathan", "tests", "configs", "docs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, copy / name, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", copy)
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks] == ["python", "python", "diff", "diff", "diff"]
    assert all(f"`{name}`" in PAGE for name in NEW_FILES)
    new_files = iter(NEW_FILES)
    for kind, content in blocks:
        if kind == "python":
            (copy / next(new_files)).write_text(content)
            continue
        done = subprocess.run(
            ["git", "apply", "--recount", "-C2", "-"],
            input=content, cwd=copy, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + content
    return copy


def run(copy, *words, folder=None):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        cwd=folder or copy,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_its_code_passes_ruff(changed):
    files = [*NEW_FILES, "leviathan/config/embeddings/__init__.py", "tests/unit/model"]
    for task in (["check"], ["format", "--check"]):
        run(changed, "ruff", *task, *files)


@pytest.mark.heavy
def test_the_tests_of_all_kinds_pass(changed):
    output = run(
        changed, "pytest", "-q", "-p", "no:cacheprovider", "-k", "hashed",
        "tests/unit/model/embeddings/test_kinds.py",
    )  # fmt: skip
    assert int(re.search(r"(\d+) passed", output)[1]) >= 9


def test_it_trains_and_is_exported(changed, run_file, tmp_path):
    commands = [shlex.split(line) for line in runnable("docs/embedding_kind.md")]
    (params, train) = commands
    shown = run(changed, *params, "--json")
    assert '"kind": "hashed"' in shown
    small = yaml.safe_load(run_file.read_text())
    small["model"]["embedding"] = {"kind": "tied"}
    small["train"] |= {"steps": 2, "eval_every": 0}
    small |= {"run_dir": "run", "engine": {"kind": "fsdp2"}, "optim": {"warmup_steps": 0}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(small))
    run(changed, *train, "model.embedding.buckets=20", folder=tmp_path)
    assert "hashed" in (tmp_path / "run/config.yaml").read_text()
    run(changed, "leviathan", "export", "run", "exported", folder=tmp_path)
    assert "by hashes" in (tmp_path / "exported/README.md").read_text()
