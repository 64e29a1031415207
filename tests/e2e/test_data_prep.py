"""The commands of data_prep/README.md, the walk through The Pile among them, on a tiny corpus.

Only what is not here is stood in for: the Hub's download and Slurm's `sbatch`, which runs the very
script with the variables that Slurm would set.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from documentation import commands_in, runnable

ROOT = Path(__file__).parents[2]
README = (ROOT / "data_prep/README.md").read_text()
WALK = README.split("## The Pile, from download")[1].split("\n## ")[0]
SUBSETS = ["Wikipedia (en)", "Github", "Pile-CC"]

SBATCH = """#!/bin/bash
set -euo pipefail
if [ "$1" = --parsable ]; then
  shift
  for task in 0 1 2; do
    SLURM_ARRAY_TASK_ID=$task SLURM_ARRAY_TASK_MIN=0 SLURM_ARRAY_TASK_MAX=2 \\
      SLURM_ARRAY_TASK_COUNT=3 SLURM_CPUS_PER_TASK=1 bash "$@" >&2
  done
  echo 7
else
  while [ "$1" != --wrap ]; do shift; done
  bash -c "$2"
fi
"""


LINES = runnable("data_prep/README.md")


def commands() -> list[str]:
    return [line for line in LINES if line in commands_in(WALK)]


@pytest.fixture
def place(tmp_path: Path, tiny_tokenizer: Path) -> Path:
    """A directory with `pile`, the configuration, and the programs that the commands call."""
    texts = [f"document {n}: " + "some words to pack " * (n % 9 + 1) for n in range(120)]
    for number, name in enumerate(["train/00", "train/01", "train/02", "val"]):
        lines = [
            json.dumps({"text": text, "meta": {"pile_set_name": SUBSETS[place % 3]}})
            for place, text in enumerate(texts[number * 30 : number * 30 + 30])
        ]
        path = tmp_path / f"pile/{name}.jsonl.zst"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(zstandard.ZstdCompressor().compress("\n".join(lines).encode()))
    (tmp_path / "data_prep").symlink_to(ROOT / "data_prep")
    (tmp_path / "configs/data").mkdir(parents=True)
    config = (ROOT / "configs/data/pile.yaml").read_text()
    assert "tokenizer: o200k_base" in config
    config = config.replace("tokenizer: o200k_base", f"tokenizer: {tiny_tokenizer}")
    config = config.replace("seq_len: 512", "seq_len: 32")
    (tmp_path / "configs/data/pile.yaml").write_text(config)
    programs = {"leviathan": f'#!/bin/bash\nexec {sys.executable} -m leviathan "$@"\n'}
    programs |= {"hf": "#!/bin/bash\nls pile/train/*.zst pile/val.jsonl.zst\n", "sbatch": SBATCH}
    for name, content in programs.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        path.chmod(0o755)
    return tmp_path


def run(lines: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": f"{place / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    # Sixteen workers are for sixteen cores.
    script = "\n".join(["set -euo pipefail", *lines])
    script = script.replace("workers=16", "workers=1").replace("--workers 16", "--workers 1")
    return subprocess.run(
        ["bash", "-c", script],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_every_command_of_the_walk(place: Path) -> None:
    lines = [line for line in commands() if not line.startswith("ray ") and "ray" not in line]
    assert len(lines) >= 12
    result = run(lines, place)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "verified: all hashes and counts match" in result.stdout
    assert "Wikipedia (en)" in result.stdout
    assert "[document " in result.stdout
    data = place / "data"
    assert hashes(data / "slurm") == hashes(data / "pile")
    assert sorted(path.name for path in (data / "subsets").iterdir()) == [
        "github",
        "pile-cc",
        "wikipedia-en",
    ]
    mixed = json.loads((data / "mixed/dataset.json").read_text())["splits"]["train"]["subsets"]
    merged = json.loads((data / "merged/dataset.json").read_text())["splits"]["train"]["subsets"]
    wikipedia, github = (mixed[name]["documents"] for name in SUBSETS[:2])
    assert wikipedia == 3 * merged[SUBSETS[0]]["documents"]
    assert 0 < github < merged[SUBSETS[1]]["documents"]


def test_the_commands_before_the_walk(place: Path) -> None:
    before = [line for line in LINES if line not in commands()]
    assert len(before) == 6
    for split in ("train", "corpus"):
        (place / "corpus").mkdir(exist_ok=True)
        for file in (place / "pile/train").iterdir():
            (place / "corpus" / f"train-{split}-{file.name}").write_bytes(file.read_bytes())
    *_, keys, exclude = before
    lines = [line.replace("8192", "300") for line in before[:4]]
    result = run([*lines, exclude], place)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "verified: all hashes and counts match" in result.stdout
    assert "Books3" in result.stderr  # which no document is of

    for file in (place / "pile/train").iterdir():
        row = {"content": "text " * 40, "meta": {"source": "mail"}}
        file.write_bytes("\n".join([json.dumps(row | {"n": n}) for n in range(60)]).encode())
    result = run([f"{keys} out=data/other"], place)
    assert result.returncode == 0, result.stderr[-4000:]
    assert json.loads((place / "data/other/dataset.json").read_text())["subsets"] == ["mail"]


# On busy cores `ray start` was seen to give up on its own agent; one that a program starts was
# there every time.
CLUSTER = """
import os, subprocess, sys, ray
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
address = ray.get_runtime_context().gcs_address
done = subprocess.run(sys.argv[1:], env=os.environ | {"RAY_ADDRESS": address})
ray.shutdown()
sys.exit(done.returncode)
"""


@pytest.mark.heavy
def test_the_ray_command(place: Path) -> None:
    pytest.importorskip("ray")
    start, command, stop = (line for line in commands() if "ray" in line)
    assert (start, stop) == ("ray start --head", "ray stop")
    (place / "cluster.py").write_text(CLUSTER)
    result = run([f"{sys.executable} cluster.py {command}"], place)
    assert result.returncode == 0, result.stderr[-4000:]
    assert (place / "data/ray/dataset.json").is_file()


def test_the_format_of_other_converters_is_a_configuration() -> None:
    import yaml

    from leviathan.config.run import DataConfig

    section = README.split("## Datasets of other converters")[1]
    block = re.search(r"^```yaml\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert block is not None
    config = DataConfig.model_validate(yaml.safe_load(block[1])["data"])
    assert config.format is not None
    assert config.format.tokenizer == "o200k_base"
