"""Your own attention: one line in its forward, and its logits are measured map by map.

A hand-written differential attention, which multiplies q and k itself, so that nobody can see its
logits from outside; `record_qk` says them. Prints the largest logit of either map and lambda.

    python examples/own_attention.py
"""

import torch
from torch import Tensor, nn

import quantkit

HEADS, SIZE, LAMBDA = 2, 16, 0.5


class DifferentialAttention(nn.Module):
    """softmax(q1 k1) - lambda softmax(q2 k2), causal (Ye et al. 2024, equation 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, 2 * HEADS * SIZE, bias=False)
        self.k = nn.Linear(width, 2 * HEADS * SIZE, bias=False)
        self.v = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # [map, batch, head, token, SIZE]
        q, k = (
            linear(x).view(batch, length, 2, HEADS, SIZE).permute(2, 0, 3, 1, 4)
            for linear in (self.q, self.k)
        )
        v = self.v(x).view(batch, length, HEADS, -1).transpose(1, 2)
        scale, seen = SIZE**-0.5, torch.ones(length, length, dtype=torch.bool).tril()
        weights = torch.zeros(())
        for number, mix in ((1, 1.0), (2, -LAMBDA)):
            one, other = q[number - 1], k[number - 1]
            quantkit.record_qk(self, one, other, scale, seen, map=number, maps=2, mix=mix)
            logits = (scale * one @ other.mT).masked_fill(~seen, -torch.inf)
            weights = weights + mix * logits.softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, width)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(DifferentialAttention(64), DifferentialAttention(64))
    batches = [torch.randn(2, 24, 64) for _ in range(4)]

    stats = quantkit.stats(model, batches, name="mine", layers=("0", "1"))

    for group in stats.points["attention_logit"]:
        if group.head is None and group.map is not None and group.token_class == "all":
            print(f"layer {group.layer}, map {group.map}: max logit {group.max:.4f}")
    print("rows of the effective map sum to", *(f"{d.row_sum:.2f}" for d in stats.differential))


if __name__ == "__main__":
    main()
