"""Distils a wide random teacher into a narrow student from their hidden states: neither model's logits are ever held.

usage: distil.py [--steps N]
"""

from __future__ import annotations

import argparse

import torch

from ullage.torch import linear_distillation

TOKENS, VOCAB, TEACHER, STUDENT = 128, 4000, 64, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    inputs = torch.randn(TOKENS, STUDENT)
    teacher_hidden = torch.tanh(inputs @ torch.randn(STUDENT, TEACHER) / STUDENT**0.5)
    teacher_weight = torch.randn(VOCAB, TEACHER) / TEACHER**0.5 * 4
    body, head = torch.nn.Linear(STUDENT, STUDENT), torch.nn.Linear(STUDENT, VOCAB, bias=False)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-2, foreach=False)
    for step in range(steps):
        loss = linear_distillation(
            torch.tanh(body(inputs)),
            head.weight,
            teacher_hidden=teacher_hidden,
            teacher_weight=teacher_weight,
            divergence="forward_kl",
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3d}  KL(teacher | student) {loss.item():.4f} nats a token")


if __name__ == "__main__":
    main()
