"""Commands with secrets in URLs and the environment: outputs contain none; files are private."""

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
USER, PASSWORD, TOKEN, KEY = "somebody", "pa55w0rd", "t0k3nt0k3n", "hf_k3yk3yk3y"
SECRETS = (USER, PASSWORD, TOKEN, KEY, base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode())
UMASK = 0o027


class Guarded(SimpleHTTPRequestHandler):
    """Serves files to clients with the password or the token."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def send_head(self):
        given = self.headers.get("Authorization", "").removeprefix("Basic ")
        if given != SECRETS[-1] and f"token={TOKEN}" not in self.path:
            self.send_error(401)
            return None
        return super().send_head()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Guarded, directory=str(folder))) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{http.server_port}", folder
        http.shutdown()


def leviathan(folder: Path, *words: str | Path, status: int = 0) -> str:
    """All output of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "leviathan", *map(str, words)],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        | {"WANDB_API_KEY": KEY, "HF_TOKEN": KEY},
        umask=UMASK,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


@pytest.mark.timeout(900)
def test_secrets_stay_out_and_modes_follow_the_umask(
    server: tuple[str, Path], tiny_corpus: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    host, served = server
    for file in tiny_corpus.iterdir():
        (served / file.name).write_bytes(file.read_bytes())
    work = tmp_path / "work"
    work.mkdir()
    urls = [f"http://{USER}:{PASSWORD}@{host}/00.jsonl", f"http://{host}/01.jsonl?token={TOKEN}"]
    prep = {"source": {"paths": urls}, "validation": {"fraction": 0.1}, "seq_len": 32}
    # The user's configuration contains them; it is elsewhere.
    (tmp_path / "prep.yaml").write_text(
        yaml.safe_dump(prep | {"tokenizer": str(tiny_tokenizer), "out": "data"})
    )
    run = {
        "run_dir": "run",
        "data": {"path": "cache", "remote": f"http://{USER}:{PASSWORD}@{host}/set"},
        "model": {"d_model": 16, "n_layers": 1, "n_heads": 2, "seq_len": 32, "vocab_size": 601}
        | {"embedding": {"kind": "tied"}},
        "train": {"steps": 2, "global_batch_size": 4, "micro_batch_size": 4},
        "engine": {"kind": "fsdp2"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))

    output = leviathan(work, "prep", tmp_path / "prep.yaml")
    again = leviathan(work, "prep", tmp_path / "prep.yaml")
    assert "is complete" in again
    (served / "set").symlink_to(work / "data")
    output += again + leviathan(work, "train", tmp_path / "run.yaml")
    output += leviathan(work, "train", tmp_path / "run.yaml", "train.steps=3", status=2)
    output += leviathan(work, "report", "run", "--out", "report")
    output += leviathan(work, "export", "run", "exported")
    # Mistakes: a wrong password, a URL where none is expected, a run from the stored configuration.
    wrong = f"source.paths=[http://{USER}:{TOKEN}@{host}/00.jsonl]"
    output += leviathan(work, "prep", tmp_path / "prep.yaml", wrong, "out=other", status=2)
    output += leviathan(work, "prep", tmp_path / "prep.yaml", f"seq_len={urls[0]}", status=2)
    stored = leviathan(work, "train", "run/config.yaml", "run_dir=b", "data.path=c", status=2)
    assert "url.hidden_credentials" in stored

    for secret in SECRETS:
        assert secret not in output + stored
        holders = [path for path in work.rglob("*") if path.is_file() and secret in _text(path)]
        assert holders == []
    assert f"http://***@{host}/00.jsonl" in _text(work / "data/dataset.json")
    assert f"http://***@{host}/set" in _text(work / "run/config.yaml")

    files = [path for path in work.rglob("*") if path.is_file()]
    assert {f"{path.stat().st_mode & 0o777:o} {path.name}" for path in files} == {
        f"640 {path.name}" for path in files
    }
    folders = [path for path in work.rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o750}


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")
