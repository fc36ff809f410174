"""grpo_loss and gspo_loss against published definitions in plain PyTorch (R8)."""

import pytest
import torch
import torch.nn.functional as F

from ullage.torch import grpo_loss, gspo_loss, head_loss, token_logprobs

LOGP = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -0.7, 0.0]], dtype=torch.float64)
OLD = torch.tensor([[-1.2, -1.5, -0.5], [-2.0, -0.7, 0.0]], dtype=torch.float64)
REF = torch.tensor([[-1.0, -1.8, -0.9], [-3.2, -0.6, 0.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -0.5], dtype=torch.float64)
TARGETS = torch.tensor([[0, 0, 0], [0, 0, -100]])
OPTIONS = dict(reference_logprobs=REF, epsilon_low=0.2, epsilon_high=0.28, kl_beta=0.04)


def logits_with(logp):
    """Two classes, the first with the given log-probability: hidden states under the identity."""
    return torch.stack([logp, torch.log1p(-logp.clamp(max=-1e-3).exp())], -1)


HIDDEN, WEIGHT = logits_with(LOGP), torch.eye(2, dtype=torch.float64)


@pytest.mark.parametrize(
    "loss, options, right",
    [
        (grpo_loss, {"normalizer": "sequence_means"}, -0.245472),
        (grpo_loss, {"normalizer": "tokens"}, -0.384662),
        (grpo_loss, {}, -0.384662),
        (grpo_loss, {"normalizer": "max_length", "max_length": 3}, -0.320551),
        (gspo_loss, {"normalizer": "sequence_means"}, -0.251568),
        (gspo_loss, {"normalizer": "tokens"}, -0.381977),
        (gspo_loss, {"divisor": 6.0}, -0.318315),
    ],
)
def test_values_r8(loss, options, right):
    found = loss(HIDDEN, WEIGHT, TARGETS, ADVANTAGES, OLD, **OPTIONS, **options)
    assert found.item() == pytest.approx(right, abs=2e-6)


def test_gradients_of_the_log_probabilities_r8():
    logp = LOGP.clone().requires_grad_()
    grpo_loss(logits_with(logp), WEIGHT, TARGETS, ADVANTAGES, OLD, **OPTIONS, divisor=1.0).backward()
    right = torch.tensor([[-1.221403, -0.615387, -0.986813], [0.007251, 0.495793, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(logp.grad, right, rtol=0, atol=2e-6)


def eager(kind, hidden, weight, targets, advantages, old, ref, low, high, beta, temperature):
    mask = (targets >= 0).double()
    log_q = F.log_softmax(hidden @ weight.T / temperature, -1)
    logp = log_q.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    log_ratio = (logp - old) * mask
    if kind == "gspo":
        log_ratio = (log_ratio.sum(1) / mask.sum(1).clamp(min=1))[:, None].expand_as(logp)
    ratio = log_ratio.exp()
    advantages = advantages[:, None]
    surrogate = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    gap = (ref - logp) * mask
    return ((surrogate + beta * (gap.exp() - gap - 1)) * mask).sum()


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_against_the_definition(kind, temperature):
    hidden = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(19, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 19, (3, 7))
    targets[0, :3] = targets[1, 5:] = -100
    with torch.no_grad():
        old = token_logprobs(hidden, weight, targets, temperature=temperature) + 0.3 * torch.randn(3, 7).double()
        ref = old + 0.2 * torch.randn(3, 7).double()
    advantages = torch.randn(3, dtype=torch.float64)
    loss = {"grpo": grpo_loss, "gspo": gspo_loss}[kind]
    ours = loss(
        hidden, weight, targets, advantages, old, reference_logprobs=ref, epsilon_high=0.3, kl_beta=0.1, divisor=1.0,
        temperature=temperature,
    )  # fmt: skip
    theirs = eager(kind, hidden, weight, targets, advantages, old, ref, 0.2, 0.3, 0.1, temperature)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    for f, w in zip(torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(theirs, (hidden, weight))):
        torch.testing.assert_close(f, w, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("loss", [grpo_loss, gspo_loss])
def test_micro_batches_add_up_to_the_batch_r8(loss):
    whole = loss(HIDDEN, WEIGHT, TARGETS, ADVANTAGES, OLD, **OPTIONS, divisor=5.0)
    halves = [
        loss(
            HIDDEN[i : i + 1], WEIGHT, TARGETS[i : i + 1], ADVANTAGES[i : i + 1], OLD[i : i + 1], divisor=5.0,
            **(OPTIONS | {"reference_logprobs": REF[i : i + 1]}),
        )
        for i in (0, 1)
    ]  # fmt: skip
    torch.testing.assert_close(sum(halves), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("loss", [grpo_loss, gspo_loss])
def test_a_fully_masked_sequence_adds_nothing_r8(loss):
    targets = TARGETS.clone()
    targets[1] = -100
    hidden = HIDDEN.clone().requires_grad_()
    found = loss(hidden, WEIGHT, targets, ADVANTAGES, OLD, **OPTIONS, divisor=3.0)
    alone = loss(
        HIDDEN[:1],
        WEIGHT,
        targets[:1],
        ADVANTAGES[:1],
        OLD[:1],
        **(OPTIONS | {"reference_logprobs": REF[:1]}),
        divisor=3.0,
    )
    torch.testing.assert_close(found, alone)
    found.backward()
    assert (hidden.grad[1] == 0).all()


def test_packed_rows_and_metrics():
    flat = dict(
        segments=torch.tensor([0, 0, 0, 1, 1, 1]), n_segments=2, return_metrics=True,
        **(OPTIONS | {"reference_logprobs": REF.reshape(-1)}),
    )  # fmt: skip
    packed, out = gspo_loss(
        HIDDEN.reshape(-1, 2), WEIGHT, TARGETS.reshape(-1), ADVANTAGES.repeat_interleave(3), OLD.reshape(-1), **flat
    )
    assert torch.equal(packed, gspo_loss(HIDDEN, WEIGHT, TARGETS, ADVANTAGES, OLD, **OPTIONS))
    assert out.metrics.shape == (1, 13)
    found = out.policy_metrics()
    assert len(found) == 13 and (found["n_tokens"].item(), found["n_segments"].item()) == (5, 2)
    counted = TARGETS >= 0
    share = counted.double() / counted.sum(1, keepdim=True)
    log_ratio = (share * (token_logprobs(HIDDEN, WEIGHT, TARGETS) - OLD)).sum(1, keepdim=True)  # of the sequence
    for name, rows in {"old_log_probs": OLD, "ratio": log_ratio.exp(), "kl": log_ratio.exp() - log_ratio - 1}.items():
        torch.testing.assert_close(found[name], (share * rows).sum(), rtol=1e-12, atol=1e-12)
    assert found["max_advantage"] == ADVANTAGES.max() and found["min_advantage"] == ADVANTAGES.min()
    with pytest.raises(ValueError, match="no metrics"):
        head_loss([{"kind": "cross_entropy"}], hidden=HIDDEN, weight=WEIGHT, labels=TARGETS).policy_metrics()


def test_refusals():
    with pytest.raises(ValueError, match="reference_logprobs"):
        grpo_loss(HIDDEN, WEIGHT, TARGETS, ADVANTAGES, OLD, kl_beta=0.1)
    with pytest.raises(ValueError, match="n_segments"):
        grpo_loss(HIDDEN, WEIGHT, TARGETS, ADVANTAGES[:, None].expand(2, 3), OLD, segments=TARGETS.clamp(min=0))
    with pytest.raises(ValueError, match="detach"):
        grpo_loss(HIDDEN, WEIGHT, TARGETS, ADVANTAGES, OLD.clone().requires_grad_())
    with pytest.raises(ValueError, match=r"advantages have shape \(1,\); accepted: \(2,\)"):
        grpo_loss(HIDDEN, WEIGHT, TARGETS, ADVANTAGES[:1], OLD)
    with pytest.raises(ValueError, match="old_log_probs has shape"):
        grpo_loss(HIDDEN, WEIGHT, TARGETS, ADVANTAGES, OLD[:1])
    with pytest.raises(ValueError, match="686"):
        grpo_loss(HIDDEN, WEIGHT, TARGETS, ADVANTAGES, OLD, epsilon_low=-0.1)
