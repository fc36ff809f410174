"""Policy steps on a toy task, a reward for even tokens: sample, advantages within the group, GRPO at the head.

usage: grpo_step.py [--steps N]
"""

from __future__ import annotations

import argparse

import torch

from ullage.torch import grpo_loss, token_logprobs

GROUP, LENGTH, WIDTH, VOCAB = 16, 12, 24, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    hidden = torch.randn(GROUP, LENGTH, WIDTH)  # a real policy's depend on its tokens
    head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
    optimizer = torch.optim.Adam(head.parameters(), lr=5e-2)
    for step in range(steps):
        with torch.no_grad():
            tokens = torch.distributions.Categorical(logits=head(hidden)).sample()
            lengths = torch.randint(LENGTH // 2, LENGTH + 1, (GROUP, 1))
            tokens[torch.arange(LENGTH) >= lengths] = -100  # padding
            old = token_logprobs(hidden, head.weight, tokens)
            counted = tokens >= 0
            reward = ((tokens % 2 == 0) & counted).sum(1) / counted.sum(1)
            advantages = (reward - reward.mean()) / (reward.std() + 1e-6)
        for _ in range(2):  # a second step on the same samples: the ratio leaves 1, and the clip may bind
            loss, out = grpo_loss(hidden, head.weight, tokens, advantages, old, epsilon_high=0.28, return_metrics=True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        clipped = out.policy_metrics()["clipped"].item() / GROUP  # a sum over sequences of their share
        print(f"step {step:2d}  reward {reward.mean():.3f}  loss {loss.item():+.4f}  clipped {clipped:.1%}")


if __name__ == "__main__":
    main()
