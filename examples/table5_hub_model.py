"""Table 5 of the Differential Transformer paper, for any model: a hub id, a folder, a shipped name.

Prints the largest |x| by rank and the median, of attention logits and of hidden states, with the
paper's reading of the logits (all of QK^T) below. Without a name: a shipped model, offline.

    python examples/table5_hub_model.py HuggingFaceTB/SmolLM2-135M
"""

import sys

import quantkit
from quantkit.results import TOP_RANKS, PointSummary


def row(words: str, point: PointSummary) -> str:
    figures = [point.abs_top[str(rank)] for rank in TOP_RANKS] + [point.abs_median]
    return f"{words:<28}" + "".join(f"{value:>10.2f}" for value in figures)


def main(model: str, data: str | None, samples: int) -> None:
    stats = quantkit.stats(model, data, seq_len=128, samples=samples, paper=True)
    summary = stats.summary
    head = "".join(f"{f'top-{rank}':>10}" for rank in TOP_RANKS)
    print(f"{stats.model.name:<28}{head}{'median':>10}")
    print(row("attention logits", summary.attention_logit))
    assert summary.attention_logit_unmasked is not None
    print(row("attention logits, all", summary.attention_logit_unmasked))
    print(row("hidden states", summary.hidden_state))
    print(f"sink rate {summary.sink_rate:.2f}; written to {stats.folder}")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        given[0] if given else "baseline",
        given[1] if len(given) > 1 else None,
        int(given[2]) if len(given) > 2 else 16,
    )
