"""What hides in URLs, and what only looks like it."""

import pytest
from errors import raises_error

from leviathan.config.data import PrepConfig
from leviathan.config.load import dump_config, load_config
from leviathan.config.run import DataConfig
from leviathan.console import say
from leviathan.credentials import are_hidden, cleaned, without_credentials
from leviathan.data.dataset import open_dataset
from leviathan.errors import ConfigError, DataError

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"https://me:{SECRET}@host/a.jsonl", "https://***@host/a.jsonl"),
        (f"https://{SECRET}@host:8080/a", "https://***@host:8080/a"),
        (f"s3://key:{SECRET}@bucket/a", "s3://***@bucket/a"),
        (f"https://host/a?token={SECRET}", "https://host/a?token=***"),
        (f"https://h/a?x=1&access_token={SECRET}&y=2#z", "https://h/a?x=1&access_token=***&y=2#z"),
        (f"https://h/a?sv=2&se=3&sig={SECRET}%3D", "https://h/a?sv=2&se=3&sig=***"),
        (
            f"https://b.s3.aws.com/a?X-Amz-Credential={SECRET}%2F2&X-Amz-Signature={SECRET}",
            "https://b.s3.aws.com/a?X-Amz-Credential=***&X-Amz-Signature=***",
        ),
        (f"404, url='https://u:{SECRET}@h/a?key={SECRET}'", "404, url='https://***@h/a?key=***'"),
    ],
)
def test_what_is_hidden(url, shown):
    assert without_credentials(url) == shown
    assert without_credentials(shown) == shown
    assert are_hidden(shown)
    assert not are_hidden(url)
    assert cleaned({"a": [url, 1], "b": {"c": url}}) == {"a": [shown, 1], "b": {"c": shown}}


@pytest.mark.parametrize(
    "text",
    [
        "https://host/a@b/c?page=2",
        "hf://datasets/owner/name@main/train/*.zst",
        "abfs://container@account.dfs.core.windows.net/a",
        "file:///data/a@b:c/d.jsonl",
        "me@host: token=5",
        "s3://bucket/tokens=3/a.jsonl",
    ],
)
def test_what_is_left_alone(text):
    assert without_credentials(text) == text


def test_messages(capsys):
    url = f"https://me:{SECRET}@host/a"
    say(f"reading {url}")
    assert "reading https://***@host/a" in capsys.readouterr().err
    assert str(DataError("url.unreachable", f"{url}: gone")) == "https://***@host/a: gone"


def test_messages_about_a_configuration(tmp_path):
    path = tmp_path / "prep.yaml"
    # Long enough for the message to be cut before the @.
    url = f"https://me:{SECRET * 20}@host/a"
    path.write_text(f"source: {url}\ntokenizer: !!int {url}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, [], PrepConfig)
    path.write_text(f"source: {url}\nseq_len: {url}\nout: [{url}]\n")
    with pytest.raises(ConfigError) as also:
        load_config(path, [f"tokenizer={url}: x: y"], PrepConfig)
    with pytest.raises(ConfigError) as third:
        load_config(path, [], PrepConfig)
    for message in map(str, (caught.value, also.value, third.value)):
        assert "***@host" in message
        assert SECRET not in message


def test_a_stored_url_says_that_it_is_incomplete(tmp_path):
    url = f"https://me:{SECRET}@host/set"
    stored = dump_config(DataConfig(path=tmp_path, remote=url))
    assert SECRET not in stored
    with raises_error("url.hidden_credentials", "URL"):
        open_dataset(DataConfig(path=tmp_path, remote=without_credentials(url)))
