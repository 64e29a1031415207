import pytest
from errors import raises_error

from leviathan.errors import ConfigError
from leviathan.launch.hosts import Host, read_hostfile


def written(tmp_path, text):
    path = tmp_path / "hostfile"
    path.write_text(text)
    return path


def test_hosts_in_order_without_comments(tmp_path):
    path = written(tmp_path, "# two\nb.example slots=8\n\n10.0.0.1  slots=4  # old\n")
    assert read_hostfile(path) == [Host("b.example", 8), Host("10.0.0.1", 4)]


def test_every_wrong_line_is_named_at_once(tmp_path):
    path = written(tmp_path, "a slots=1\na slots=2\nb slots=0\nc\n-oProxyCommand=x slots=1\nd\n")
    with pytest.raises(ConfigError) as caught:
        read_hostfile(path)
    assert caught.value.code == "hostfile.invalid"
    problems = str(caught.value).splitlines()
    assert len(problems) == 5
    assert "hostfile:2: duplicate host a" in problems[0]
    assert "hostfile:3: b has 0 slots" in problems[1]
    assert "hostfile:4: 'c': expected `name slots=N`" in problems[2]


@pytest.mark.parametrize(("text", "code"), [("", "hostfile.empty"), (None, "hostfile.unreadable")])
def test_no_hosts(tmp_path, text, code):
    path = tmp_path / "none" if text is None else written(tmp_path, text)
    with raises_error(code, path, error=ConfigError):
        read_hostfile(path)
