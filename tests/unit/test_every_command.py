"""Every command of the documentation is run by a test, or parsed here with a reason why not."""

import importlib.util
import re
from contextlib import suppress
from typing import Any

import pytest
import typer
from documentation import ONLY_PARSED, PAGES, ROOT, RUN_BY, commands, commands_in, runnable, words
from typer.main import get_command

from leviathan.cli import app
from leviathan.config.data import PrepConfig
from leviathan.config.load import load_config
from leviathan.config.run import RunConfig
from leviathan.experiments.expand import load_experiment

PROGRAM = get_command(app)
# What else a page may call; whoever runs the page has it, or is in for it.
OTHERS = {"hf", "ray", "lm_eval", "kill", "tail", "head", "ls", "pip", "git"}
STAND_IN = ROOT / "configs" / "run" / "quickstart.yaml"  # for a run.yaml that the reader writes
EVERY = [(page, command) for page in PAGES for command in commands(page)]
_MISSING = next(k for k in typer.BadParameter.__subclasses__() if k.__name__ == "MissingParameter")


def parsed(command: list[str]) -> tuple[str, Any]:
    """Name and context of a `leviathan` command; its errors are the test's."""
    sub, name, rest = PROGRAM.commands[command[1]], command[1], command[2:]  # type: ignore[attr-defined]
    while hasattr(sub, "commands") and rest:
        sub, name, rest = sub.commands[rest[0]], f"{name} {rest[0]}", rest[1:]
    if hasattr(sub, "commands"):
        return name, None  # a group of commands, in a sentence
    return name, sub.make_context(name, list(rest))


def check_configuration(name: str, file: str, changes: list[str]) -> None:
    path = ROOT / file if file.startswith("configs/") else STAND_IN
    if name == "prep":
        load_config(path, changes, PrepConfig)
    elif name.startswith("experiment"):
        load_experiment(path, changes)
    else:
        load_config(path, changes, RunConfig)


def check(command: list[str], page: str) -> None:
    """Fails unless this could be carried out: program, options, files, configuration."""
    head, *rest = command
    for word in rest:
        if word.startswith(("configs/", "launch/", "data_prep/", "benchmarks/", "docs/")):
            assert (ROOT / word).is_file(), word
    if head in ("deepspeed", "torchrun"):
        if "launch/train.py" in rest:
            place = rest.index("launch/train.py")
            command = ["leviathan", "train", *rest[place + 1 :]]
        else:
            command = rest[rest.index("leviathan") :]
        head = "leviathan"
    if head == "leviathan":
        name, context = parsed(command)
        file = context.params.get("config") or context.params.get("experiment")
        if file is not None and page != "docs/embedding_kind.md":  # its kind is new
            check_configuration(name, str(file), context.params.get("overrides") or [])
    elif head == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), rest
    elif head == "python":
        assert (ROOT / rest[-1 if rest[0] == "-m" else 0]).exists(), rest
    elif "sbatch" in head:
        assert any(word.endswith(".sbatch") for word in rest) or "--wrap" in rest
    else:
        assert head in OTHERS, f"{head}: an unknown program"


@pytest.mark.parametrize(("page", "command"), EVERY, ids=[f"{p}: {c}"[:60] for p, c in EVERY])
def test_it_parses_and_its_configuration_is_right(page, command):
    check(words(command), page)


def test_each_is_run_or_listed():
    everything = {command for _, command in EVERY}
    assert set(ONLY_PARSED) <= everything, "ONLY_PARSED names commands that no page has"
    for page in PAGES:
        if runnable(page):
            assert page in RUN_BY, f"{page}: no test runs its commands"
    assert set(RUN_BY) <= set(PAGES)
    for page, test in RUN_BY.items():
        source = (ROOT / test).read_text()
        assert "documentation import" in source, f"{test} has a list of its own"
        assert f'"{page}"' in source, f"{test} does not run {page}"


def test_no_page_is_forgotten():
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.md")}
    found = {page for page in found if not page.startswith((".", "shared/", "quickstart/"))}
    assert found - {"benchmarks/RESULTS.md"} == set(PAGES)


def test_new_commands_are_found():
    text = "A\n\n    leviathan x  # why\n    make y\n\n- item\n    continued\n\n```\nb\n```\n"
    assert commands_in(text + "```text\nno\n```\n```\nRANK=0 c\n```\n") == [
        "leviathan x",
        "make y",
        "b",
        "RANK=0 c",
    ]
    with pytest.raises(AssertionError, match="an unknown program"):
        check(["curl", "x"], "README.md")
    with pytest.raises(Exception, match="No such option"):
        check(["leviathan", "params", "configs/run/small.yaml", "--wrld-size", "2"], "README.md")
    with pytest.raises(Exception, match="did you mean"):
        check(["leviathan", "train", "configs/run/small.yaml", "train.stps=2"], "README.md")


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_a_sentence(page):
    """`leviathan …` between backquotes: the sub-command and its options exist."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`(leviathan [a-z][^`]+)`", text):
        with suppress(_MISSING):
            parsed(span.replace("[", "").replace("]", "").split())


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        if "://" not in link:
            assert ((ROOT / page).parent / link).exists(), link


def test_benchmarks_of_the_makefile_exist():
    names = re.search(r"for name in ([\w ]+);", (ROOT / "Makefile").read_text())
    assert names is not None
    for name in names[1].split():
        assert (ROOT / "benchmarks" / f"{name}.py").is_file()


def test_pictures_are_up_to_date():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "pictures" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    for name in ("data_flow", "lev"):
        drawn = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
        assert drawn == getattr(draw, name)(), "run `make docs`"
