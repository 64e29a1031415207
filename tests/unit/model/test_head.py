"""The head's loss, scores and logits against torch's cross-entropy."""

import pytest
import torch
import torch.nn.functional as F

from leviathan.model import head as head_module
from leviathan.model.head import IGNORE, LMHead

VOCABULARY = 90  # of 96 rows


@pytest.fixture(params=["one chunk", "chunks of 5 tokens"])
def batch(request, monkeypatch, make_config):
    """A float64 head with hidden states and targets, some ignored, one row wholly."""
    if request.param != "one chunk":
        monkeypatch.setattr(head_module, "CHUNK_LOGITS", 5 * 96)
    generator = torch.Generator().manual_seed(0)
    head = LMHead(make_config(), None).double()
    with torch.no_grad():
        head.weight.normal_(generator=generator)
    hidden = torch.randn(3, 7, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (3, 7), generator=generator)
    targets[0, :4] = IGNORE
    targets[1] = IGNORE
    return head, hidden, targets


def plain(head, hidden, targets):
    logits = F.linear(hidden, head.weight[:VOCABULARY])
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def test_loss_and_gradients_equal_cross_entropy(batch):
    head, hidden, targets = batch
    expected = plain(head, hidden, targets)
    expected_grads = torch.autograd.grad(expected * 3, (hidden, head.weight))
    loss = head(hidden, targets)
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(
        torch.autograd.grad(loss * 3, (hidden, head.weight)), expected_grads, strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_padding_rows_get_no_gradient_and_no_probability(batch):
    head, hidden, targets = batch
    head(hidden, targets).backward()
    assert not head.weight.grad[VOCABULARY:].any()
    assert bool(head.weight.grad[:VOCABULARY].any())
    logits = head(hidden, output="logits")
    assert logits.shape == (3, 7, 96)
    assert bool((logits[..., VOCABULARY:] == float("-inf")).all())


def test_scores(batch):
    head, hidden, targets = batch
    scores = head(hidden, targets, output="scores")
    logits = F.linear(hidden, head.weight[:VOCABULARY])
    counts = targets != IGNORE
    nll = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none"
    )
    assert scores.nll.dtype == torch.float32
    torch.testing.assert_close(scores.nll, nll.view(3, 7).float())
    assert scores.is_greedy.equal((logits.argmax(-1) == targets) & counts)
    likeliest = logits.argmax(-1)
    assert bool(head(hidden, likeliest, output="scores").is_greedy.all())


def test_a_row_of_fillers_has_no_loss_and_finite_zero_gradients(batch):
    head, hidden, targets = batch
    nothing = torch.full_like(targets, IGNORE)
    loss = head(hidden, nothing)
    assert loss.item() == 0
    for grad in torch.autograd.grad(loss, (hidden, head.weight)):
        assert not grad.any()


def test_gradcheck(batch):
    head, hidden, targets = batch

    def loss(h, w):
        return head_module._SummedCrossEntropy.apply(h, w, targets.flatten(), head._part())

    part = hidden.detach().flatten(0, 1).requires_grad_()
    assert torch.autograd.gradcheck(loss, (part, head.weight), fast_mode=True)


def test_bf16_head_sums_in_fp32(make_config):
    generator = torch.Generator().manual_seed(0)
    head = LMHead(make_config(), None)
    with torch.no_grad():
        head.weight.normal_(std=0.1, generator=generator)
    hidden = torch.randn(4, 16, 32, generator=generator)
    targets = torch.randint(0, VOCABULARY, (4, 16), generator=generator)
    exact = head(hidden, targets)
    low = head.bfloat16()(hidden.bfloat16(), targets)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, exact, rtol=2e-3, atol=0)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_z_loss_is_what_it_says_and_off_when_off(batch, make_config, z_loss):
    head, hidden, targets = batch
    head.z_loss = z_loss
    logits = F.linear(hidden, head.weight[:VOCABULARY])
    counts = targets != IGNORE
    expected = plain(head, hidden, targets)
    expected = expected + z_loss * (logits.logsumexp(-1).square() * counts).sum()
    loss = head(hidden, targets)
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, (hidden, head.weight))
    for ours, theirs in zip(torch.autograd.grad(loss, (hidden, head.weight)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():  # a measurement is of the NLL alone
        torch.testing.assert_close(head(hidden, targets), plain(head, hidden, targets).float())
